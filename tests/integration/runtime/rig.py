"""The event-service loop with a core small enough to see through, and what feeds it and reads what it says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry

from berth.bus.connection import Connection
from berth.bus.publisher import Outgoing, Publisher
from berth.contracts import subjects
from berth.contracts.envelope import HEADER_TYPE, Envelope, decode
from berth.contracts.events import JobHeld, JobSubmitted
from berth.contracts.jobs import JobSpec
from berth.decisions.core import Core, Outbox, Record, Settled
from berth.runtime.core_handler import CoreHandler
from berth.runtime.event_service import EventService
from berth.runtime.wiring import ParkedAnswers
from berth.store.database import Database
from berth.store.leader import Leadership
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
    handler_class: type[CoreHandler[CountingCore]] = CoreHandler

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
    async def running(self, *, name: str = "test") -> AsyncIterator[EventService[CoreHandler[CountingCore]]]:
        """A process of the service; leaving is its death. name: of its database sessions."""
        handler_class = self.handler_class
        settings = replace(self.postgres.settings("admission"), application_name=name)
        connection = Connection(self.nats.server.settings("admission"))
        await connection.open()
        try:
            async with Database(settings) as database:
                service = EventService(
                    service="admission",
                    pool=POOL,
                    make_handler=lambda: handler_class(self.core_class(), pool=POOL),
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
