"""Takes every event into the record, in stream order, and derives who used and who waited.

The record keeps the bytes as they came; only the few event types that usage needs are decoded. Rows go in by COPY.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import unquote

from berth.bus.message import Message
from berth.contracts.envelope import HEADER_ID, HEADER_TENANT, HEADER_TYPE, Envelope
from berth.contracts.events import AllocationReleased, JobAdmitted, JobPlaced, JobRequeued
from berth.runtime.core_handler import read_event
from berth.runtime.event_service import BatchHandler, Outcome
from berth.store.batch import BatchTransaction
from berth.store.database import Database, store_errors
from services.audit.chain import START, next_hash

RecordTuple = tuple[int, int, datetime, str, str, str, str, bytes, bytes]
UseTuple = tuple[str, int, str, str, str, int, float, datetime]
RECORD_COLUMNS = (
    "number",
    "stream_seq",
    "recorded_at",
    "event_id",
    "type",
    "entity",
    "tenant",
    "payload",
    "hash",
)
USAGE_TYPES = frozenset(fact.TYPE for fact in (JobAdmitted, JobPlaced, JobRequeued, AllocationReleased))


@dataclass(slots=True)
class WaitingJob:
    """A job of which usage needs to know whose it is and since when it waits."""

    tenant: str
    job_class: str
    waits_since: datetime


class AuditHandler(BatchHandler):
    """The record's tail in memory (number, hash, time), and the jobs that live."""

    decisions_version = "audit-1"
    gather_seconds = 0.1  # nobody waits for the record, and each of its batches is a commit

    def __init__(self) -> None:
        self.filters: list[str] = []
        self.number = 0
        self.hash = START
        self._recorded_at: datetime | None = None
        self._jobs: dict[str, WaitingJob] = {}
        self._rows: list[RecordTuple] = []
        self._taken: list[UseTuple] = []
        self._released: list[tuple[str, int, datetime]] = []
        self._job_rows: dict[str, WaitingJob | None] = {}

    async def load(self, database: Database, *, now: datetime) -> None:
        """The end of the chain, and the jobs that have not ended."""
        async with database.reader() as connection:
            last = await connection.fetchrow(
                "SELECT number, hash, recorded_at FROM audit.record ORDER BY number DESC LIMIT 1"
            )
            rows = await connection.fetch("SELECT job_id, tenant, class, waits_since FROM audit.job")
        if last is not None:
            self.number, self.hash, self._recorded_at = last["number"], last["hash"], last["recorded_at"]
        self._jobs = {row[0]: WaitingJob(row[1], row[2], row[3]) for row in rows}

    def apply(self, message: Message, *, now: datetime) -> None:
        """Number it, chain it, and take note of what it says of GPUs. Nothing is refused: this is the record."""
        recorded_at = now if self._recorded_at is None else max(now, self._recorded_at)
        type_ = message.header(HEADER_TYPE) or ""
        entity = message.subject.split(".")[4]
        if type_ in USAGE_TYPES:
            self._use(read_event(message), recorded_at)
        elif type_ in _FINAL and entity in self._jobs:
            del self._jobs[entity]
            self._job_rows[entity] = None
        number = self.number + 1
        hash_ = next_hash(self.hash, number=number, recorded_at=recorded_at, payload=message.data)
        tenant = unquote(message.header(HEADER_TENANT) or "")
        event_id = message.header(HEADER_ID) or ""
        self._rows.append(
            (number, message.stream_seq, recorded_at, event_id, type_, entity, tenant, message.data, hash_)
        )
        self.number, self.hash, self._recorded_at = number, hash_, recorded_at

    def settle(self, *, now: datetime) -> Outcome:
        """Nothing is decided here."""
        return Outcome()

    async def write(self, tx: BatchTransaction) -> None:
        """All rows of the batch, in the batch's transaction."""
        if not self._rows:
            return
        connection = await tx.con()
        with store_errors():
            await connection.copy_records_to_table(
                "record", schema_name="audit", records=self._rows, columns=RECORD_COLUMNS
            )
            if self._job_rows:
                await self._write_jobs(connection)
            if self._taken:
                await connection.execute(_TAKE, *(list(column) for column in zip(*self._taken, strict=True)))
            if self._released:
                await connection.execute(_RELEASE, *(list(column) for column in zip(*self._released, strict=True)))
        self._rows, self._taken, self._released, self._job_rows = [], [], [], {}

    async def _write_jobs(self, connection: Any) -> None:
        gone = [job_id for job_id, job in self._job_rows.items() if job is None]
        if gone:
            await connection.execute("DELETE FROM audit.job WHERE job_id = ANY ($1)", gone)
        kept = [(i, j.tenant, j.job_class, j.waits_since) for i, j in self._job_rows.items() if j is not None]
        if kept:
            await connection.execute(_KEEP_JOBS, *(list(column) for column in zip(*kept, strict=True)))

    # --- usage ------------------------------------------------------------------------------------------------------

    def _use(self, event: Envelope[Any], recorded_at: datetime) -> None:
        data = event.data
        if isinstance(data, JobAdmitted):
            job = WaitingJob(data.spec.tenant, data.spec.job_class.value, data.submitted_at)
            self._jobs[data.job_id] = self._job_rows[data.job_id] = job
        elif isinstance(data, JobRequeued):
            known = self._jobs.get(data.job_id)
            if known is not None:
                known.waits_since = recorded_at
                self._job_rows[data.job_id] = known
        elif isinstance(data, JobPlaced):
            self._placed(data, event.tenant, recorded_at)
        elif isinstance(data, AllocationReleased) and data.workers is None:
            self._released.append((data.job_id, data.attempt, recorded_at))

    def _placed(self, data: JobPlaced, tenant: str, recorded_at: datetime) -> None:
        job = self._jobs.get(data.job_id)
        waited = 0.0 if job is None else max(0.0, (recorded_at - job.waits_since).total_seconds())
        held: dict[str, int] = {}
        for assignment in data.assignments:
            held[assignment.card_type] = held.get(assignment.card_type, 0) + len(assignment.gpus) * assignment.gpu_milli
        for card_type, gpu_milli in held.items():
            self._taken.append(
                (
                    data.job_id,
                    data.attempt,
                    tenant or ("" if job is None else job.tenant),
                    "" if job is None else job.job_class,
                    card_type,
                    gpu_milli,
                    waited,
                    recorded_at,
                )
            )


_FINAL = frozenset(f"berth.job.{fact}.v1" for fact in ("refused", "succeeded", "failed", "cancelled", "reclaimed"))

_TAKE = """
INSERT INTO audit.use (job_id, attempt, tenant, class, card_type, gpu_milli, waited_seconds, taken_at)
SELECT * FROM unnest($1::text[], $2::int[], $3::text[], $4::text[], $5::text[], $6::bigint[], $7::float8[],
    $8::timestamptz[])
ON CONFLICT DO NOTHING
"""
_RELEASE = """
UPDATE audit.use u SET released_at = r.at
FROM unnest($1::text[], $2::int[], $3::timestamptz[]) AS r (job_id, attempt, at)
WHERE u.job_id = r.job_id AND u.attempt = r.attempt AND u.released_at IS NULL
"""
_KEEP_JOBS = """
INSERT INTO audit.job AS j (job_id, tenant, class, waits_since)
SELECT * FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[])
ON CONFLICT (job_id) DO UPDATE SET waits_since = excluded.waits_since
"""
