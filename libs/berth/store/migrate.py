"""Brings the schemas of all services to their newest revision: roles, schemas, rights, migrations.

Run by one administrator (the migration role), never by the services: `python -m berth.store.migrate --admin-dsn ...`.
Each service owns one schema and can do nothing in the others. Its migrations lie in
`services/<name>/migrations/versions` and hold nothing but the steps; `berth/store/alembic/env.py` runs them, with a
version table in each schema.

Alembic takes half a second to import, so a start that has nothing to migrate finds that out with one query before.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import hashlib
import hmac
import importlib.util
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from berth.store.errors import MigrationRefused


def _services_dir() -> Path:
    """Where the services are, in a checkout or installed; found, not imported."""
    spec = importlib.util.find_spec("services")
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0])
    return Path(__file__).resolve().parents[3] / "services"


SERVICES = ("gateway", "inventory", "admission", "placement", "lifecycle", "audit")
ROLE_PREFIX = "berth_"
SERVICES_DIR = _services_dir()
ALEMBIC_DIR = Path(__file__).with_name("alembic")
MIGRATION_LOCK = 0x6265727468  # two starters at once: the second waits, then finds nothing to do
SCRAM_ITERATIONS = 4096
STATEMENT_TIMEOUT = "30s"


@dataclass(frozen=True, slots=True)
class ServiceSchema:
    """A service's schema, its login role, and that role's password."""

    name: str
    password: str

    @property
    def role(self) -> str:
        return ROLE_PREFIX + self.name


@dataclass(frozen=True, slots=True)
class Migrated:
    """What was done. `upgraded`: schemas that got at least one revision, in order."""

    upgraded: tuple[str, ...] = ()


async def migrate_all(admin_dsn: str, services: Mapping[str, str], *, services_dir: Path = SERVICES_DIR) -> Migrated:
    """Make or renew roles and schemas of `services` (name -> password), then run what is missing of their migrations.

    Idempotent. Passwords are set to those given. The administrator needs CREATEROLE and CREATE on the database; being
    superuser is not needed.

    Raises:
        MigrationRefused: a schema is at a revision that this program does not know; an older program must not touch it.
    """
    schemas = [ServiceSchema(name, password) for name, password in services.items()]
    heads = {schema.name: head_revision(services_dir, schema.name) for schema in schemas}
    connection = await asyncpg.connect(admin_dsn, timeout=10.0, command_timeout=120.0)
    try:
        await connection.execute("SET lock_timeout = 0; SET statement_timeout = 0")
        await connection.execute(f"SELECT pg_advisory_lock({MIGRATION_LOCK})")
        found = await _revisions(connection, schemas)
        if found is None:
            await _make_schemas(connection, schemas)
            found = dict.fromkeys(heads, "")
        await _set_passwords(connection, schemas)
        behind = [schema for schema in schemas if _is_behind(schema.name, found[schema.name], heads[schema.name])]
        if behind:
            await _upgrade(admin_dsn, behind, services_dir)
        return Migrated(tuple(schema.name for schema in behind))
    finally:
        await connection.close(timeout=5.0)  # releases the lock


def head_revision(services_dir: Path, service: str) -> str:
    """The newest revision in a service's folder, by file name: `0001_common_tables.py` holds revision `0001`."""
    found = sorted(path.name[:4] for path in (services_dir / service / "migrations/versions").glob("[0-9]*.py"))
    if not found:
        raise FileNotFoundError(f"no migrations of {service} below {services_dir}")
    return found[-1]


def _is_behind(schema: str, found: str, head: str) -> bool:
    if found > head:
        raise MigrationRefused(schema, found, head)
    return found < head


async def _revisions(
    connection: asyncpg.Connection[asyncpg.Record], schemas: Sequence[ServiceSchema]
) -> dict[str, str] | None:
    """The revision of each schema; None when at least one has no version table yet."""
    parts = [f"SELECT '{schema.name}', (SELECT version_num FROM {schema.name}.alembic_version)" for schema in schemas]
    try:
        return {name: revision or "" for name, revision in await connection.fetch(" UNION ALL ".join(parts))}
    except (asyncpg.UndefinedTableError, asyncpg.InvalidSchemaNameError):
        return None


# --- roles and schemas
# --------------------------------------------------------------------------------------------------


async def _make_schemas(connection: asyncpg.Connection[asyncpg.Record], schemas: Sequence[ServiceSchema]) -> None:
    database = await connection.fetchval("SELECT quote_ident(current_database())")
    known_roles = {row[0] for row in await connection.fetch("SELECT rolname FROM pg_roles")}
    async with connection.transaction():
        await connection.execute(
            f"REVOKE ALL ON DATABASE {database} FROM PUBLIC; REVOKE ALL ON SCHEMA public FROM PUBLIC"
        )
        for schema in schemas:
            role = schema.role
            if role not in known_roles:
                await connection.execute(f"CREATE ROLE {role} LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION")
            await connection.execute(
                f"GRANT {role} TO CURRENT_USER WITH SET TRUE, INHERIT FALSE;"
                f"GRANT CONNECT ON DATABASE {database} TO {role};"
                f"ALTER ROLE {role} SET statement_timeout = '{STATEMENT_TIMEOUT}';"
                f"CREATE SCHEMA IF NOT EXISTS {schema.name} AUTHORIZATION {role};"
            )


async def _set_passwords(connection: asyncpg.Connection[asyncpg.Record], schemas: Sequence[ServiceSchema]) -> None:
    """Set each role's password, as a verifier made here: the password itself never shows in a statement or log."""
    try:
        rows = await connection.fetch("SELECT rolname, rolpassword FROM pg_authid")
    except asyncpg.InsufficientPrivilegeError:
        rows = []
    stored: dict[str, str | None] = {row[0]: row[1] for row in rows}
    for schema in schemas:
        if not verifies(schema.password, stored.get(schema.role) or ""):
            await connection.execute(f"ALTER ROLE {schema.role} PASSWORD '{scram_verifier(schema.password)}'")


def scram_verifier(password: str, salt: bytes | None = None) -> str:
    """What PostgreSQL stores for `password` (RFC 5803). Passwords are ASCII here, so no normalisation is needed."""
    salt = salt or secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode("ascii"), salt, SCRAM_ITERATIONS)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    encoded = (base64.b64encode(part).decode() for part in (salt, stored, server))
    return "SCRAM-SHA-256${}:{}${}:{}".format(SCRAM_ITERATIONS, *encoded)


def verifies(password: str, stored: str) -> bool:
    """Whether `stored` was made from `password` the way `scram_verifier` does it."""
    prefix = f"SCRAM-SHA-256${SCRAM_ITERATIONS}:"
    if not stored.startswith(prefix):
        return False
    salt = base64.b64decode(stored.removeprefix(prefix).split("$", 1)[0])
    return hmac.compare_digest(scram_verifier(password, salt), stored)


# --- migrations
# ---------------------------------------------------------------------------------------------------------


async def _upgrade(admin_dsn: str, schemas: Sequence[ServiceSchema], services_dir: Path) -> None:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import create_async_engine
    from sqlalchemy.pool import NullPool

    def upgrade_each(connection: Connection) -> None:
        for schema in schemas:
            run_alembic(connection, schema.name, services_dir=services_dir)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=lambda: asyncpg.connect(admin_dsn, timeout=10.0, command_timeout=600.0),
        poolclass=NullPool,
    )
    try:
        async with engine.connect() as connection:
            await connection.run_sync(upgrade_each)
    finally:
        await engine.dispose()


def run_alembic(connection: object, schema: str, *, services_dir: Path = SERVICES_DIR, offline: bool = False) -> None:
    """Upgrade one schema to its head over a SQLAlchemy connection; offline, print the statements instead."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(ALEMBIC_DIR))
    config.set_main_option("version_locations", str(services_dir / schema / "migrations/versions"))
    config.set_main_option("path_separator", "os")
    config.attributes.update(connection=connection, schema=schema, role=ROLE_PREFIX + schema)
    command.upgrade(config, "head", sql=offline)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line. Passwords come from BERTH_STORE_PASSWORD_<SERVICE>, so that no process list shows them."""
    parser = argparse.ArgumentParser(prog="python -m berth.store.migrate", description=main.__doc__)
    parser.add_argument("--admin-dsn", default=os.environ.get("BERTH_ADMIN_DSN", ""), help="or BERTH_ADMIN_DSN")
    parser.add_argument("--services", nargs="*", default=SERVICES)
    parser.add_argument("--sql", action="store_true", help="print the statements of all migrations, connect to nothing")
    chosen = parser.parse_args(arguments)
    if chosen.sql:
        for service in chosen.services:
            run_alembic(None, service, offline=True)
        return
    variables = {service: f"BERTH_STORE_PASSWORD_{service.upper()}" for service in chosen.services}
    missing = [variable for variable in variables.values() if variable not in os.environ]
    if missing or not chosen.admin_dsn:
        parser.error(f"not set: {', '.join(missing) or '--admin-dsn'}")
    passwords = {service: os.environ[variable] for service, variable in variables.items()}
    done = asyncio.run(migrate_all(chosen.admin_dsn, passwords))
    sys.stdout.write(f"upgraded: {', '.join(done.upgraded) or 'nothing'}\n")


if __name__ == "__main__":
    main()
