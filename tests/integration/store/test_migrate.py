"""Roles, schemas, rights and migrations: from empty, again, and what each service cannot reach."""

import itertools
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from berth.embedded.postgres import PostgresServer
from berth.store.database import Database, StoreSettings
from berth.store.errors import MigrationRefused
from berth.store.migrate import SERVICES, SERVICES_DIR, main, migrate_all
from berth.store.tables import common_tables
from berth.testing.postgres import PASSWORD, PostgresPlatform

PASSWORDS = dict.fromkeys(SERVICES, PASSWORD)


@pytest.fixture
async def empty(postgres_server: PostgresServer) -> AsyncIterator[PostgresPlatform]:
    """A database with nothing in it."""
    admin = await asyncpg.connect(postgres_server.dsn("postgres"))
    try:
        await admin.execute("DROP DATABASE IF EXISTS empty_one WITH (FORCE)")
        await admin.execute("CREATE DATABASE empty_one")
        yield PostgresPlatform(postgres_server, "empty_one")
        await admin.execute("DROP DATABASE empty_one WITH (FORCE)")
    finally:
        await admin.close()


def a_services_dir(folder: Path, *, extra: str = "") -> Path:
    """A copy of the placement service's migrations, with one more if given."""
    versions = folder / "placement/migrations/versions"
    shutil.copytree(SERVICES_DIR / "placement/migrations/versions", versions, ignore=shutil.ignore_patterns("__pyc*"))
    if extra:
        (versions / "0099_extra.py").write_text(
            'from alembic import op\nrevision = "0099"\ndown_revision = "0002"\n'
            f'def upgrade():\n    op.execute("""{extra}""")\n'
        )
    return folder


async def test_from_empty_all_services_can_work_then_nothing_is_left_to_do(empty: PostgresPlatform) -> None:
    assert (await migrate_all(empty.admin_dsn, PASSWORDS)).upgraded == SERVICES
    for service in SERVICES:
        async with Database(empty.settings(service)) as store, store.batch() as tx:
            assert await tx.new_ids(["a"]) == {"a"}
    started = time.perf_counter()
    assert (await migrate_all(empty.admin_dsn, PASSWORDS)).upgraded == ()
    assert time.perf_counter() - started < 0.7


async def test_a_later_migration_runs_once_and_keeps_data(empty: PostgresPlatform, tmp_path: Path) -> None:
    passwords = {"placement": PASSWORD}
    await migrate_all(empty.admin_dsn, passwords, services_dir=a_services_dir(tmp_path / "old"))
    async with Database(empty.settings("placement")) as store, store.batch() as tx:
        tx.upsert_records([("job", "1", b"{}")])
    newer = a_services_dir(tmp_path / "new", extra="CREATE TABLE receipts (job text)")
    assert (await migrate_all(empty.admin_dsn, passwords, services_dir=newer)).upgraded == ("placement",)
    assert (await migrate_all(empty.admin_dsn, passwords, services_dir=newer)).upgraded == ()
    async with Database(empty.settings("placement")) as store, store.reader() as connection:
        assert await connection.fetchval("SELECT count(*) FROM records") == 1
        await connection.execute("INSERT INTO receipts VALUES ('1')")  # the service owns what its migration made


async def test_a_failing_migration_leaves_its_schema_as_it_was(empty: PostgresPlatform, tmp_path: Path) -> None:
    passwords = {"placement": PASSWORD}
    await migrate_all(empty.admin_dsn, passwords, services_dir=a_services_dir(tmp_path / "old"))
    broken = a_services_dir(tmp_path / "new", extra="CREATE TABLE receipts (job text, job text)")
    with pytest.raises(Exception, match="specified more than once"):
        await migrate_all(empty.admin_dsn, passwords, services_dir=broken)
    assert (await migrate_all(empty.admin_dsn, passwords, services_dir=tmp_path / "old")).upgraded == ()


async def test_an_older_program_leaves_a_newer_schema_alone(empty: PostgresPlatform, tmp_path: Path) -> None:
    passwords = {"placement": PASSWORD}
    newer = a_services_dir(tmp_path / "new", extra="CREATE TABLE receipts (job text)")
    await migrate_all(empty.admin_dsn, passwords, services_dir=newer)
    with pytest.raises(MigrationRefused):
        await migrate_all(empty.admin_dsn, passwords, services_dir=a_services_dir(tmp_path / "old"))


async def test_an_administrator_needs_not_be_superuser(empty: PostgresPlatform) -> None:
    admin = await asyncpg.connect(empty.admin_dsn)
    try:
        await admin.execute(
            "CREATE ROLE migrator LOGIN CREATEROLE PASSWORD 'm'; ALTER DATABASE empty_one OWNER TO migrator"
        )
        # On a server of its own the migrator makes the roles; here others have made them and let it use them.
        for service in SERVICES:
            await admin.execute(f"GRANT berth_{service} TO migrator WITH ADMIN TRUE")
    finally:
        await admin.close()
    dsn = empty.server.dsn(empty.database, user="migrator", password="m")
    try:
        assert (await migrate_all(dsn, PASSWORDS)).upgraded == SERVICES
        assert (await migrate_all(dsn, PASSWORDS)).upgraded == ()
    finally:
        admin = await asyncpg.connect(empty.admin_dsn)
        await admin.execute(
            "REASSIGN OWNED BY migrator TO berth_admin; DROP OWNED BY migrator CASCADE; DROP ROLE migrator"
        )
        await admin.close()


async def test_a_changed_password_replaces_the_old_one(empty: PostgresPlatform) -> None:
    await migrate_all(empty.admin_dsn, PASSWORDS)
    await migrate_all(empty.admin_dsn, {**PASSWORDS, "audit": "another"})
    try:
        with pytest.raises(asyncpg.InvalidPasswordError):
            await Database(empty.settings("audit")).open()
        dsn = empty.server.dsn(empty.database, user="berth_audit", password="another")
        async with Database(StoreSettings(dsn, "audit")):
            pass
    finally:
        await migrate_all(empty.admin_dsn, PASSWORDS)


@pytest.mark.parametrize(("reader", "owner"), list(itertools.permutations(SERVICES, 2)))
async def test_no_role_can_touch_another_schema(postgres: PostgresPlatform, reader: str, owner: str) -> None:
    connection = await asyncpg.connect(postgres.settings(reader).dsn)
    try:
        for statement in (
            f"SELECT * FROM {owner}.records",
            f"INSERT INTO {owner}.inbox (event_id) VALUES ('x')",
            f"UPDATE {owner}.lease SET epoch = 9",
            f"DROP TABLE {owner}.outbox",
            f"CREATE TABLE {owner}.mine (x int)",
            f"SELECT nextval('{owner}.outbox_id')",
            f"SET ROLE berth_{owner}",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)
    finally:
        await connection.close()


async def test_no_role_can_make_things_in_shared_places(postgres: PostgresPlatform) -> None:
    connection = await asyncpg.connect(postgres.settings("gateway").dsn)
    try:
        for statement in (
            "CREATE TABLE public.mine (x int)",
            "CREATE SCHEMA mine",
            "CREATE TEMP TABLE mine (x int)",
            "CREATE DATABASE mine",
            "CREATE ROLE mine",
            "COPY inbox TO '/tmp/mine'",
            "SELECT rolpassword FROM pg_authid",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(statement)
    finally:
        await connection.close()


@pytest.mark.parametrize("service", SERVICES)
async def test_the_table_classes_describe_what_the_migrations_made(postgres: PostgresPlatform, service: str) -> None:
    metadata = common_tables(service).metadata
    common = {table.name for table in metadata.tables.values()}

    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(
            connection,
            opts={
                "include_schemas": True,
                "include_name": lambda name, kind, _parents: name == service if kind == "schema" else True,
                "include_object": lambda it, name, kind, *_: kind != "index" and (kind != "table" or name in common),
                "compare_type": True,
            },
        )
        return list(compare_metadata(context, metadata))

    # Through another search path: what lies in the default schema has no schema in a comparison.
    store = Database(StoreSettings(postgres.admin_dsn, "public"))
    try:
        async with store.engine.connect() as connection:
            assert await connection.run_sync(differences) == []
    finally:
        await store.close()


def test_the_statements_can_be_printed_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--sql", "--services", "audit", "gateway"])
    printed = capsys.readouterr().out
    assert "CREATE TABLE audit.inbox" in printed
    assert "CREATE FUNCTION gateway.berth_commit" in printed
