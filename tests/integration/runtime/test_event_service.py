"""The event-service loop on real NATS and PostgreSQL, with a core small enough to see through."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from berth.bus.connection import Connection
from berth.bus.publisher import Outgoing, Publisher
from berth.contracts import subjects
from berth.contracts.envelope import HEADER_TYPE, Envelope, decode
from berth.contracts.events import JobHeld, JobSubmitted
from berth.contracts.jobs import JobSpec
from berth.decisions.core import Core, Outbox, Record, Settled
from berth.runtime import faults
from berth.runtime.core_handler import CoreHandler
from berth.runtime.event_service import EventService
from berth.runtime.wiring import ParkedAnswers
from berth.store.database import Database
from berth.store.leader import Leadership
from berth.store.parked import list_parked, request_replay
from berth.telemetry.metrics import PipelineMetrics
from berth.testing.postgres import PostgresPlatform
from berth.testing.servers import POOL, NatsPlatform

NOW = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)


class Crash(BaseException):
    """Stands for a killed process at a fault point."""


class CountingCore(Core):
    """Answers each submission with one `JobHeld`; remembers how many there were."""

    NAME = "admission"
    CONSUMES = (JobSubmitted,)
    fails_on = ""

    def __init__(self) -> None:
        self.seen = 0
        self.outbox = Outbox()
        self.wakes_at: datetime | None = None
        self.timers = 0

    def apply(self, event: Envelope[Any], *, now: datetime) -> None:
        data = event.data
        if not isinstance(data, JobSubmitted):  # the consumer of these tests is not filtered
            return
        if data.spec.name == "contradiction":
            raise ValueError("contradicts itself")
        if data.spec.name == self.fails_on:
            raise KeyError("a defect of ours")
        self.seen += 1
        if data.spec.name == "timer":
            self.wakes_at = now + timedelta(milliseconds=30)
        self.outbox.emit(JobHeld(job_id=data.job_id, reasons=(), policy_version=0), data.job_id, cause=event.id)

    def settle(self, *, now: datetime) -> Settled:
        fired = 0
        if self.wakes_at is not None and self.wakes_at <= now:
            self.wakes_at, fired = None, 1
            self.timers += 1
            self.outbox.emit(JobHeld(job_id="timer", reasons=(), policy_version=self.timers), "timer")
        emissions = self.outbox.drain()
        records = [Record("count", "all", {"seen": self.seen, "counters": dict(self.outbox.counters)})]
        return Settled(emissions, records if emissions else [], fired)

    def next_timer(self) -> datetime | None:
        return self.wakes_at

    def restore(self, records: Iterable[tuple[str, str, Any]], *, now: datetime) -> None:
        for _, _, body in records:
            self.seen = body["seen"]
            self.outbox.counters = body["counters"]

    @property
    def policy_version(self) -> int:
        return 0


@dataclass
class Rig:
    """One service under test and a gateway that feeds it."""

    nats: NatsPlatform
    postgres: PostgresPlatform
    gateway: Connection
    core_class: type[CountingCore] = CountingCore

    async def submit(self, *names: str) -> None:
        publisher = Publisher(self.gateway)
        results = await publisher.publish([self.message(name, f"j-{name}") for name in names], 5)
        assert all(result.is_stored for result in results)

    def message(self, name: str, job_id: str, *, event_id: str | None = None, source: str = "gateway") -> Outgoing:
        spec = JobSpec.model_validate({"name": name, "tenant": "t", "class": "general", "command": ["true"]})
        data = JobSubmitted(job_id=job_id, spec=spec, submitted_at=NOW, submitted_by="user:u")
        envelope = Envelope[JobSubmitted](
            id=event_id or f"{job_id}.1.JobSubmitted",
            type=JobSubmitted.TYPE,
            source=f"/berth/{POOL}/{source}",
            subject=job_id,
            time=NOW,
            data=data,
        )
        subject = subjects.event(POOL, JobSubmitted, job_id)
        return Outgoing(subject, envelope.to_json(), envelope.id, {HEADER_TYPE: JobSubmitted.TYPE})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EventService[CoreHandler[CountingCore]]]:
        """A process of the service; leaving is its death."""
        settings = self.postgres.settings("admission")
        connection = Connection(self.nats.server.settings("admission"))
        await connection.open()
        try:
            async with Database(settings) as database:
                service = EventService(
                    service="admission",
                    pool=POOL,
                    make_handler=lambda: CoreHandler(self.core_class(), pool=POOL),
                    database=database,
                    connection=connection,
                    make_leadership=lambda: Leadership(settings, "admission"),
                    metrics=PipelineMetrics(CollectorRegistry()),
                )
                service.serve("parked", ParkedAnswers(database).answer)
                task = asyncio.create_task(service.run())
                try:
                    yield service
                finally:
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Crash):
                        await task
        finally:
            await connection.close()

    async def held(self, count: int) -> list[str]:
        """Ids of the first `count` JobHeld events; fails when they do not come, or when more do."""
        from berth.bus.puller import Puller

        reader = await self.nats.connect("audit")
        async with Puller(reader, subjects.EVENTS_STREAM, "audit") as puller:
            found: list[str] = []
            patience = 10.0
            while True:
                messages = await puller.next(patience)
                found += [decode(m.data).id for m in messages if m.header(HEADER_TYPE) == JobHeld.TYPE]
                if len(found) >= count:
                    patience = 0.2
                if not messages:
                    return found


@pytest.fixture
async def rig(nats: NatsPlatform, postgres: PostgresPlatform) -> AsyncIterator[Rig]:
    yield Rig(nats, postgres, await nats.connect("gateway"))
    faults.arm(None)


async def test_every_event_has_its_effect_once_though_it_comes_twice(rig: Rig) -> None:
    async with rig.running():
        await rig.submit(*(str(n) for n in range(40)))
        copy = rig.message("7", "j-7")
        # Without a message id the broker stores it again, as it does with one after its window: only the inbox can tell.
        await rig.gateway.publish_core(copy.subject, copy.data, headers=copy.headers)
        held = await rig.held(40)
    assert sorted(held) == sorted(f"j-{n}.1.JobHeld" for n in range(40))


@pytest.mark.parametrize("point", ["before_commit", "between_commit_and_publish", "between_publish_and_ack"])
async def test_a_process_killed_at_any_point_leaves_each_effect_once(rig: Rig, point: str) -> None:
    def die() -> None:
        raise Crash

    faults.arm(f"admission.{point}:1", action=die)
    async with rig.running():
        await rig.submit("a", "b", "c")
        await asyncio.sleep(0.3)
    faults.arm(None)
    async with rig.running() as service:
        await rig.submit("d")
        held = await rig.held(4)
        assert await service.query(lambda handler: handler.core.seen) == 4
    assert sorted(held) == [f"j-{name}.1.JobHeld" for name in "abcd"]


async def test_what_cannot_be_read_is_parked_with_its_reason_and_blocks_nobody_else(rig: Rig) -> None:
    bad = rig.message("x", "j-x")
    bad.data = b'{"not": "an envelope"}'
    foreign = rig.message("y", "j-y", source="placement")
    async with rig.running() as service:
        await Publisher(rig.gateway).publish([bad, foreign, rig.message("contradiction", "j-z")], 5)
        await rig.submit("fine")
        assert await rig.held(1) == ["j-fine.1.JobHeld"]
        parked = await list_parked(service._database)
    reasons = {row.message.entity: row.message.reason for row in parked}
    assert set(reasons) == {"j-x", "j-y", "j-z"}
    assert "not for placement to send" in reasons["j-y"]
    assert "contradicts itself" in reasons["j-z"]


async def test_later_messages_of_a_parked_entity_wait_behind_it_and_are_replayed_in_order(rig: Rig) -> None:
    async with rig.running() as service:
        await Publisher(rig.gateway).publish([rig.message("contradiction", "j-1")], 5)
        await Publisher(rig.gateway).publish([rig.message("second", "j-1", event_id="j-1.2.JobSubmitted")], 5)
        await rig.submit("other")
        assert await rig.held(1) == ["j-other.1.JobHeld"]
        first, second = await list_parked(service._database)
        assert (first.message.event_id, second.message.event_id) == ("j-1.1.JobSubmitted", "j-1.2.JobSubmitted")
        mended = rig.message("mended", "j-1").data
        await request_replay(service._database, first.id, payload=mended, note="by the operator")
        held = await rig.held(2)
        assert await list_parked(service._database) == []
    assert held == ["j-1.1.JobHeld", "j-1.2.JobHeld"]


async def test_a_message_that_makes_the_code_raise_is_found_and_parked_alone(rig: Rig) -> None:
    class Failing(CountingCore):
        fails_on = "trap"

    rig.core_class = Failing
    async with rig.running() as service:
        await rig.submit("one", "trap", "two")
        held = await rig.held(2)
        parked = await list_parked(service._database)
    assert sorted(held) == ["j-one.1.JobHeld", "j-two.1.JobHeld"]
    assert [row.message.entity for row in parked] == ["j-trap"]
    assert "KeyError" in parked[0].message.reason


async def test_timers_fire_without_a_message(rig: Rig) -> None:
    async with rig.running():
        await rig.submit("timer")
        assert await rig.held(2) == ["j-timer.1.JobHeld", "timer.1.JobHeld"]


async def test_a_change_is_answered_after_its_commit(rig: Rig) -> None:
    async with rig.running() as service:
        await rig.submit("a")
        await rig.held(1)

        def change(handler: CoreHandler[CountingCore], now: datetime) -> int:
            handler.core.outbox.emit(JobHeld(job_id="asked", reasons=(), policy_version=0), "asked")
            return handler.core.seen

        assert await service.change(change) == 1
        assert "asked.1.JobHeld" in await rig.held(1)
    async with rig.running() as service:
        await rig.submit("b")
        await rig.held(1)
        assert await service.query(lambda handler: handler.core.outbox.counters["asked"]) == 1
