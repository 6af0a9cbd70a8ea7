"""A leader that stands still while another takes over: what it has begun must not count."""

from __future__ import annotations

import asyncio

import asyncpg

from berth.runtime.core_handler import CoreHandler
from berth.runtime.event_service import EventService
from berth.store.batch import BatchTransaction
from tests.integration.runtime.rig import CountingCore, Rig


class Pause:
    """Holds a process in the middle of a batch: everything is decided, nothing is committed."""

    def __init__(self) -> None:
        self.is_on = True
        self.reached = asyncio.Event()
        self.over = asyncio.Event()

    def handler(self) -> type[CoreHandler[CountingCore]]:
        pause = self

        class Pausing(CoreHandler[CountingCore]):
            async def write(self, tx: BatchTransaction) -> None:
                if pause.is_on:
                    pause.is_on = False
                    pause.reached.set()
                    await pause.over.wait()
                await super().write(tx)

        return Pausing


async def end_session(rig: Rig, name: str) -> None:
    """What the database does to the lease of a process that it takes for dead."""
    admin = await asyncpg.connect(rig.postgres.admin_dsn)
    try:
        ended = await admin.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", f"{name}/leader"
        )
        assert len(ended) == 1
    finally:
        await admin.close()


async def leads(service: EventService[CoreHandler[CountingCore]]) -> None:
    async with asyncio.timeout(10):
        while service.now_unlocked() is None:
            await asyncio.sleep(0.01)


async def test_a_paused_leader_that_was_replaced_cannot_write(rig: Rig) -> None:
    pause = Pause()
    rig.handler_class = pause.handler()
    async with rig.running(name="first") as first:
        await leads(first)
        async with rig.running(name="second") as second:
            await rig.submit("a", "b")
            await asyncio.wait_for(pause.reached.wait(), 10)
            await end_session(rig, "first")
            await leads(second)
            assert await rig.held(2) == ["j-a.1.JobHeld", "j-b.1.JobHeld"]

            pause.over.set()
            await rig.submit("c")
            assert await rig.held(1) == ["j-c.1.JobHeld"]
            assert await second.query(lambda handler: handler.core.seen) == 3
            assert first.now_unlocked() is None
            assert await epochs(rig) == 2


async def test_the_standby_goes_on_where_the_dead_leader_stopped(rig: Rig) -> None:
    async with rig.running(name="first") as first:
        await leads(first)
        await rig.submit("a")
        assert await rig.held(1) == ["j-a.1.JobHeld"]
        async with rig.running(name="second") as second:
            await end_session(rig, "first")
            await rig.submit("b")
            assert await rig.held(1) == ["j-b.1.JobHeld"]
            leading = [service for service in (first, second) if service.now_unlocked() is not None]
            assert len(leading) == 1
            assert await leading[0].query(lambda handler: handler.core.seen) == 2


async def epochs(rig: Rig) -> int:
    admin = await asyncpg.connect(rig.postgres.admin_dsn)
    try:
        return int(await admin.fetchval("SELECT epoch FROM admission.lease WHERE name = 'admission'"))
    finally:
        await admin.close()
