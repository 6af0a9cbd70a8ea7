"""One process leads; when it dies the next one does, and the one that was replaced cannot write."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import asyncpg
import pytest

from berth.store.database import Database
from berth.store.errors import Deposed
from berth.store.leader import Leadership
from berth.testing.postgres import PostgresPlatform

LEAD_AND_SAY_SO = """
import asyncio, sys
from berth.store import leader
from berth.store.database import StoreSettings
from berth.store.leader import Leadership

leader.SILENCE_S = int(sys.argv[2])

async def main():
    async with Leadership(StoreSettings(sys.argv[1], "placement"), "placement") as leadership:
        print(await leadership.acquired(), flush=True)
        await leadership.lost.wait()

asyncio.run(main())
"""


async def a_leading_process(dsn: str, *, silence_s: int = 10) -> asyncio.subprocess.Process:
    root = Path(__file__).parents[3]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        LEAD_AND_SAY_SO,
        dsn,
        str(silence_s),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{root / 'libs'}:{root}"},
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"1\n"
    return process


async def test_the_epoch_rises_with_each_leader_and_names_it(postgres: PostgresPlatform) -> None:
    settings = postgres.settings("placement")
    async with Leadership(settings, "placement", holder="a") as first:
        assert await first.acquired() == 1
        assert first.is_leader
    assert first.lost.is_set()
    async with Leadership(settings, "placement", holder="b") as second:
        assert await second.acquired() == 2
    async with Database(settings) as store, store.reader() as connection:
        assert await connection.fetchval("SELECT holder FROM lease") == "b"


async def test_a_standby_waits_and_leads_after_release(postgres: PostgresPlatform) -> None:
    settings = postgres.settings("placement")
    async with Leadership(settings, "placement") as first, Leadership(settings, "placement") as second:
        await first.acquired()
        waiting = asyncio.create_task(second.acquired())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await first.release()
        async with asyncio.timeout(2):
            assert await waiting == 2
        assert not first.is_leader


async def test_leases_and_services_do_not_stand_in_each_others_way(postgres: PostgresPlatform) -> None:
    async with (
        Leadership(postgres.settings("placement"), "a") as one,
        Leadership(postgres.settings("placement"), "b") as two,
        Leadership(postgres.settings("lifecycle"), "a") as three,
    ):
        async with asyncio.timeout(5):
            assert [await leader.acquired() for leader in (one, two, three)] == [1, 1, 1]


async def test_a_standby_takes_over_within_a_second_when_the_leader_is_killed(postgres: PostgresPlatform) -> None:
    settings = postgres.settings("placement")
    process = await a_leading_process(settings.dsn)
    async with Leadership(settings, "placement") as standby:
        waiting = asyncio.create_task(standby.acquired())
        await asyncio.sleep(0.3)
        assert not waiting.done()
        process.kill()
        started = time.monotonic()
        async with asyncio.timeout(5):
            assert await waiting == 2
        assert time.monotonic() - started < 1.0
    await process.wait()


async def test_a_frozen_leader_that_was_replaced_cannot_write(postgres: PostgresPlatform, store: Database) -> None:
    settings = postgres.settings("placement")
    process = await a_leading_process(settings.dsn, silence_s=2)
    process.send_signal(signal.SIGSTOP)  # its kernel goes on answering for it, so only its silence tells
    try:
        async with Leadership(settings, "placement") as successor:
            async with asyncio.timeout(8):
                assert await successor.acquired() == 2
            with pytest.raises(Deposed):
                async with store.batch() as tx:
                    tx.check_epoch("placement", 1)
                    tx.upsert_records([("job", "1", b"{}")])
            async with store.batch() as tx:
                tx.check_epoch("placement", 2)
                tx.upsert_records([("job", "1", b"{}")])
    finally:
        process.kill()
        await process.wait()


async def test_a_leader_knows_at_once_when_the_server_drops_it(postgres: PostgresPlatform) -> None:
    async with Leadership(postgres.settings("placement"), "placement") as leadership:
        await leadership.acquired()
        admin = await asyncpg.connect(postgres.admin_dsn)
        try:
            await admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '%/leader'"
            )
        finally:
            await admin.close()
        async with asyncio.timeout(1):
            await leadership.lost.wait()
        assert not leadership.is_leader
        async with asyncio.timeout(5):
            assert await leadership.acquired() == 2


async def test_a_cancelled_standby_lets_go(postgres: PostgresPlatform) -> None:
    settings = postgres.settings("placement")
    async with Leadership(settings, "placement") as leader:
        await leader.acquired()
        async with Leadership(settings, "placement") as standby:
            waiting = asyncio.create_task(standby.acquired())
            await asyncio.sleep(0.05)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert leader.is_leader
