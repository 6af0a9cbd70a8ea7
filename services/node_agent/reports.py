"""What agents tell the platform: envelopes with fixed ids, published in batches until the bus has them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Final
from urllib.parse import quote

import orjson

from berth.bus.errors import TransientError
from berth.bus.publisher import Outgoing, Publisher, PubResult
from berth.contracts import subjects
from berth.contracts.envelope import HEADER_TENANT, HEADER_TRACE, HEADER_TYPE, Fact
from berth.runtime.faults import fault_point
from berth.telemetry.logs import get_logger
from services.node_agent.journal import Journal
from services.node_agent.workers import Report, Worker

BATCH: Final = 500
BUSY_FROM: Final = 4
"""So many reports in one batch mean that more are coming: then it pays to wait a moment for them, since the bus syncs its
disk once per batch. An idle node's report is never held back."""
GATHER_SECONDS: Final = 0.02
PUBLISH_DEADLINE_SECONDS: Final = 5.0

KEPT: Final = "report"
"""Kind of journal entry of a report that is not confirmed."""

OnStored = Callable[[], None]


_quoted = lru_cache(maxsize=1024)(quote)


class Reporter:
    """Sends reports in the order they were handed in; nothing is sent before the journal has it on disk.

    What is not confirmed yet is in the journal, so that it is told again after a restart, under the same id: reports on
    workers follow from the records of workers, all others are kept as they are until the bus has them.
    """

    def __init__(self, publisher: Publisher, journal: Journal, *, pool: str) -> None:
        self._publisher = publisher
        self._journal = journal
        self._pool = pool
        self._source = f"/berth/{pool}/node_agent"
        self._waiting: deque[tuple[Outgoing, OnStored | None]] = deque()
        self._in_flight = 0
        self._arrived = asyncio.Event()
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._log = get_logger("node_agent")

    def tell(
        self,
        fact: Fact,
        *,
        entity: str,
        event_id: str,
        time: datetime,
        tenant: str = "",
        correlation: str = "",
        cause: str = "",
        trace: str = "",
    ) -> None:
        """Hand in one report that follows from no record: it is kept until the bus has it.

        `event_id` is the same whenever the same thing is told.
        """
        outgoing = self._encoded(
            fact,
            entity=entity,
            event_id=event_id,
            time=time,
            tenant=tenant,
            correlation=correlation,
            cause=cause,
            trace=trace,
        )
        kept = {"subject": outgoing.subject, "headers": outgoing.headers, "payload": outgoing.data.decode()}
        self._journal.put(KEPT, event_id, kept)
        self._hand_in(outgoing, partial(self._journal.remove, KEPT, event_id))

    def tell_kept(self) -> None:
        """Hand in what an earlier agent could not see confirmed."""
        for event_id, kept in self._journal.entries(KEPT):
            subject, headers, payload = kept["subject"], kept["headers"], kept["payload"]
            assert isinstance(headers, dict)
            outgoing = Outgoing(str(subject), str(payload).encode(), event_id, headers)
            self._hand_in(outgoing, partial(self._journal.remove, KEPT, event_id))

    def _hand_in(self, outgoing: Outgoing, on_stored: OnStored | None) -> None:
        self._waiting.append((outgoing, on_stored))
        self._arrived.set()
        self._emptied.clear()

    def _encoded(
        self,
        fact: Fact,
        *,
        entity: str,
        event_id: str,
        time: datetime,
        tenant: str,
        correlation: str,
        cause: str,
        trace: str,
    ) -> Outgoing:
        head = {
            "specversion": "1.0",
            "id": event_id,
            "type": fact.TYPE,
            "source": self._source,
            "subject": entity,
            "time": time.isoformat(),
            "datacontenttype": "application/json",
            "dataschema": f"berth:{fact.TYPE}",
            "correlationid": correlation or entity,
            "causationid": cause,
            "traceparent": trace,
            "tenant": tenant,
            "actor": "service:node_agent",
        }
        body = fact.__pydantic_serializer__.to_json(fact, exclude_none=True)
        headers = {HEADER_TYPE: fact.TYPE}
        if tenant:
            headers[HEADER_TENANT] = _quoted(tenant)
        if trace:
            headers[HEADER_TRACE] = trace
        subject = subjects.event(self._pool, type(fact), entity)
        payload = orjson.dumps(head)[:-1] + b',"data":' + body + b"}"
        return Outgoing(subject, payload, event_id, headers)

    def tell_worker(self, worker: Worker, report: Report, on_stored: OnStored | None = None) -> None:
        """Report on a worker; its id follows from worker and kind of report."""
        time = getattr(report, "started_at", None) or getattr(report, "ended_at", None)
        outgoing = self._encoded(
            report,
            entity=worker.job_id,
            event_id=f"{worker.job_id}.{worker.attempt}-{worker.worker}.{type(report).__name__}",
            time=time or datetime.fromtimestamp(worker.ended_at, tz=UTC),
            tenant=worker.tenant,
            correlation=worker.job_id,
            cause=worker.command_id,
            trace=worker.trace,
        )
        self._hand_in(outgoing, on_stored)

    @property
    def backlog(self) -> int:
        """Reports nobody has confirmed yet."""
        return len(self._waiting) + self._in_flight

    async def emptied(self) -> None:
        """Return when everything handed in was stored."""
        await self._emptied.wait()

    async def run(self) -> None:
        """Publish what has gathered, for ever; while one batch is on its way the next one gathers."""
        while True:
            await self._arrived.wait()
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), BATCH))]
            if not batch:
                self._arrived.clear()
                self._emptied.set()
                continue
            self._in_flight = len(batch)
            await self._journal.durable()
            await fault_point("node_agent.before_publish")
            await self._publish(batch)
            await fault_point("node_agent.between_publish_and_note")
            self._in_flight = 0
            if len(batch) >= BUSY_FROM and len(self._waiting) < BATCH:
                await asyncio.sleep(GATHER_SECONDS)

    async def _publish(self, batch: list[tuple[Outgoing, OnStored | None]]) -> None:
        while batch:
            results = await self._publisher.publish([outgoing for outgoing, _ in batch], PUBLISH_DEADLINE_SECONDS)
            batch = [item for item, result in zip(batch, results, strict=True) if not self._settled(item, result)]
            if batch:
                self._log.warning("reports wait for the bus", reports=len(batch))

    def _settled(self, item: tuple[Outgoing, OnStored | None], result: PubResult) -> bool:
        outgoing, on_stored = item
        if isinstance(result.error, TransientError):
            return False
        if result.error is not None:
            # It can never be stored, so repeating it would hold up all others; the record stays in the journal.
            self._log.error("report refused by the bus", event=outgoing.msg_id, reason=str(result.error))
        elif on_stored is not None:
            on_stored()
        return True
