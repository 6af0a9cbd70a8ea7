"""The database server dies: what was committed is there, what was not is gone, and the store finds its way back."""

import asyncio
import itertools
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from berth.embedded.postgres import PostgresServer
from berth.store.database import Database, StoreSettings
from berth.store.errors import TransientError
from berth.store.leader import Leadership
from berth.store.migrate import migrate_all
from berth.store.outbox import OutboxRow
from berth.testing.postgres import memory_dir


@pytest.fixture
async def own_server() -> AsyncIterator[PostgresServer]:
    """A server that a test may kill, with the placement schema."""
    with tempfile.TemporaryDirectory(prefix="berth-test-kill-", dir=memory_dir(), ignore_cleanup_errors=True) as folder:
        os.chmod(folder, 0o711)  # noqa: PTH101 - in memory
        server = PostgresServer(Path(folder) / "postgres").start()
        try:
            await migrate_all(server.dsn(), {"placement": "pw"})
            yield server
        finally:
            server.destroy()


def settings_of(server: PostgresServer) -> StoreSettings:
    return StoreSettings(server.dsn(user="berth_placement", password="pw"), "placement")


async def test_everything_committed_survives_kill_9_and_nothing_else(own_server: PostgresServer) -> None:
    committed: list[str] = []
    enough = asyncio.Event()

    async def work() -> None:
        for n in itertools.count():
            async with store.batch() as tx:
                await tx.new_ids([f"e{n}"])
                tx.upsert_records([("job", f"{n:06d}", b"x" * 500)])
                tx.add_outbox([OutboxRow(f"o{n}", "s", b"", b"")])
            committed.append(f"{n:06d}")
            if n == 200:
                enough.set()

    async with Database(settings_of(own_server)) as store:
        working = asyncio.create_task(work())
        await enough.wait()
        await asyncio.to_thread(own_server.kill)
        with pytest.raises(TransientError):
            await working
        own_server.start()
        stored = [key async for _, key, _ in store.records()]
        # The last batch may have been committed without its answer arriving; it is there whole or not at all.
        assert stored[: len(committed)] == committed
        assert len(stored) - len(committed) in (0, 1)
        assert len(await store.unpublished(older_than_s=0)) == len(stored)
        async with store.batch() as tx:
            fresh = await tx.new_ids([f"e{len(stored) - 1}", f"e{len(stored)}"])
        assert fresh == {f"e{len(stored)}"}


async def test_while_the_server_is_away_everything_is_transient(own_server: PostgresServer) -> None:
    async with Database(settings_of(own_server)) as store:
        own_server.stop()
        for _ in range(2):
            with pytest.raises(TransientError):
                async with store.batch() as tx:
                    await tx.new_ids(["a"])
            with pytest.raises(TransientError):
                await store.position("placement", "BERTH_EVENTS")
            with pytest.raises(TransientError):
                await store.unpublished()
        own_server.start()
        async with store.batch() as tx:
            assert await tx.new_ids(["a"]) == {"a"}
        assert await store.position("placement", "BERTH_EVENTS") == 0


async def test_a_server_that_goes_in_the_middle_of_a_batch_makes_it_transient(own_server: PostgresServer) -> None:
    async with Database(settings_of(own_server)) as store:
        for explicit in (False, True):
            with pytest.raises(TransientError):
                async with store.batch() as tx:
                    await tx.new_ids(["a"])
                    if explicit:
                        await tx.con()
                    await asyncio.to_thread(own_server.kill)
            own_server.start()
        async with store.batch() as tx:
            assert await tx.new_ids(["a"]) == {"a"}


async def test_the_engine_for_administration_survives_a_restart(own_server: PostgresServer) -> None:
    async with Database(settings_of(own_server)) as store:
        for _ in range(2):
            async with store.engine.connect() as connection:
                assert (await connection.exec_driver_sql("SELECT current_schema()")).scalar() == "placement"
            own_server.stop()
            own_server.start()


async def test_a_leader_loses_its_lease_with_the_server_and_leads_again_after(own_server: PostgresServer) -> None:
    async with Leadership(settings_of(own_server), "placement") as leadership:
        assert await leadership.acquired() == 1
        await asyncio.to_thread(own_server.kill)
        async with asyncio.timeout(2):
            await leadership.lost.wait()
        leading_again = asyncio.create_task(leadership.acquired())
        await asyncio.sleep(0.1)
        own_server.start()
        async with asyncio.timeout(5):
            assert await leading_again == 2


async def test_a_frozen_server_costs_the_lease(own_server: PostgresServer) -> None:
    async with Leadership(settings_of(own_server), "placement") as leadership:
        await leadership.acquired()
        pid = await leader_backend(own_server)
        os.kill(pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(5):
                await leadership.lost.wait()
        finally:
            os.kill(pid, signal.SIGCONT)


async def leader_backend(server: PostgresServer) -> int:
    admin = await asyncpg.connect(server.dsn())
    try:
        return int(await admin.fetchval("SELECT pid FROM pg_stat_activity WHERE application_name LIKE '%/leader'"))
    finally:
        await admin.close()
