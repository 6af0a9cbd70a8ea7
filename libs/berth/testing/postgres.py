"""A real PostgreSQL for tests: one server for each test process, one migrated database for each test.

Import the fixtures in a `conftest.py`: `from berth.testing.postgres import *`. The server lies in memory where the
machine offers it, has all service schemas migrated once in a template, and goes when the process does. A database is
copied from the template in about 20 ms.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from berth.embedded.postgres import PostgresServer
from berth.store.database import Database, StoreSettings
from berth.store.migrate import ROLE_PREFIX, SERVICES, migrate_all
from berth.testing.places import memory_dir

__all__ = ["PostgresPlatform", "postgres", "postgres_server", "store"]

TEMPLATE = "berth_template"
PASSWORD = "for-tests-only"
TEST_SETTINGS = {"max_wal_size": "512MB", "max_connections": "200"}
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class PostgresPlatform:
    """One database with the schemas of all services, as a migrated platform has it."""

    server: PostgresServer
    database: str

    @property
    def admin_dsn(self) -> str:
        return self.server.dsn(self.database)

    def settings(self, service: str) -> StoreSettings:
        """How `service` reaches its schema, as its own role."""
        dsn = self.server.dsn(self.database, user=ROLE_PREFIX + service, password=PASSWORD)
        return StoreSettings(dsn=dsn, schema=service, application_name=f"test-{service}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A running server with the migrated template database."""
    with tempfile.TemporaryDirectory(prefix="berth-test-pg-", dir=memory_dir(), ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)  # ours: lets the server's account through when the tests run as root
        server = PostgresServer(Path(folder) / "postgres", settings=TEST_SETTINGS)
        server.start()
        try:
            asyncio.run(_make_template(server))
            yield server
        finally:
            server.destroy()


@pytest.fixture
async def postgres(postgres_server: PostgresServer) -> AsyncIterator[PostgresPlatform]:
    """A database of the test's own with all service schemas, empty."""
    name = f"test_{next(_numbers)}"
    admin = await asyncpg.connect(postgres_server.dsn("postgres"))
    try:
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE} STRATEGY file_copy")
        await admin.execute(f"REVOKE ALL ON DATABASE {name} FROM PUBLIC")
        roles = ", ".join(ROLE_PREFIX + service for service in SERVICES)
        await admin.execute(f"GRANT CONNECT ON DATABASE {name} TO {roles}")
        yield PostgresPlatform(postgres_server, name)
        if not admin.is_closed():
            await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        admin.terminate()


@pytest.fixture
async def store(postgres: PostgresPlatform) -> AsyncIterator[Database]:
    """The store of the placement service, open."""
    async with Database(postgres.settings("placement")) as database:
        yield database


async def _make_template(server: PostgresServer) -> None:
    admin = await asyncpg.connect(server.dsn("postgres"))
    try:
        await admin.execute(f"CREATE DATABASE {TEMPLATE}")
    finally:
        await admin.close()
    await migrate_all(server.dsn(TEMPLATE), dict.fromkeys(SERVICES, PASSWORD))
