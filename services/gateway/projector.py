"""Keeps the views up to date: every event of the pool in, one row for each job that a batch has changed.

One process at a time projects (it leads the lease `gateway`), while every process serves the API. Event types that
change no view are not even decoded. Views of live jobs are kept in memory, so that a batch reads only what it has not
seen; a batch that fails drops all of it with the handler.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import asyncpg
import orjson

from berth.bus.message import Message
from berth.contracts import events as ev
from berth.contracts.envelope import HEADER_TYPE, Envelope
from berth.runtime.core_handler import read_event
from berth.runtime.event_service import BatchHandler, Outcome
from berth.store.batch import BatchTransaction
from berth.store.database import Database, store_errors
from services.gateway.progress import JobProgress

KEPT_VIEWS: Final = 20_000

_ABOUT_A_JOB: Final = frozenset(
    fact.TYPE
    for fact in (
        ev.JobRefused,
        ev.JobHeld,
        ev.AdmissionWithdrawn,
        ev.JobPlaced,
        ev.JobWaiting,
        ev.JobRunning,
        ev.JobUnknown,
        ev.JobStopping,
        ev.AttemptEnded,
        ev.JobRequeued,
        ev.JobSucceeded,
        ev.JobFailed,
        ev.JobCancelled,
        ev.JobReclaimed,
    )
)
_OTHERS: Final = frozenset(
    fact.TYPE
    for fact in (
        ev.PolicyActivated,
        ev.PolicyHeld,
        ev.PolicyProposed,
        ev.PolicyRejected,
        ev.NodeChanged,
    )
)

_WITH_SPECIFICATION: Final = frozenset({ev.JobSubmitted.TYPE, ev.JobAdmitted.TYPE})
PROJECTED: Final = _ABOUT_A_JOB | _OTHERS | _WITH_SPECIFICATION
"""All types that may change a view; the gateway's consumer brings no others."""


@dataclass(frozen=True, slots=True)
class _Undecoded:
    """An event with a whole specification, of which only the job's id is needed (nearly always)."""

    type_: str
    job_id: str
    message: Message


class ViewHandler(BatchHandler):
    """The projection. on_change: called when a policy was written, shortly before its commit."""

    decisions_version = "gateway-1"
    gather_seconds = 0.03

    def __init__(self, *, on_change: Callable[[], None] = lambda: None) -> None:
        self.filters: list[str] = []
        self._on_change = on_change
        self._events: list[tuple[int, Envelope[Any] | _Undecoded]] = []
        self._views: OrderedDict[str, tuple[JobProgress, int]] = OrderedDict()

    async def load(self, database: Database, *, now: datetime) -> None:
        """Nothing: views are read when an event needs them."""

    def apply(self, message: Message, *, now: datetime) -> None:
        """Decode what changes a view; the rest passes by."""
        type_ = message.header(HEADER_TYPE)
        if type_ in _WITH_SPECIFICATION:
            self._events.append((message.stream_seq, _Undecoded(type_ or "", message.subject.split(".")[4], message)))
        elif type_ in _ABOUT_A_JOB or type_ in _OTHERS:
            self._events.append((message.stream_seq, read_event(message)))

    def settle(self, *, now: datetime) -> Outcome:
        """Nothing is decided here."""
        return Outcome()

    async def write(self, tx: BatchTransaction) -> None:
        """Fold the batch into the views and write each row once."""
        if not self._events:
            return
        events, self._events = self._events, []
        connection = await tx.con()
        with store_errors():
            await self._read_missing(connection, events)
            changed: dict[str, int] = {}
            for seq, event in events:
                await self._fold(connection, seq, event, changed)
            await self._write_views(connection, changed)

    # --- folding ----------------------------------------------------------------------------------------------------

    async def _fold(
        self,
        connection: asyncpg.Connection[asyncpg.Record],
        seq: int,
        event: Envelope[Any] | _Undecoded,
        changed: dict[str, int],
    ) -> None:
        if isinstance(event, _Undecoded):
            if event.job_id not in self._views:
                await self._restore(connection, event)
            elif event.type_ == ev.JobAdmitted.TYPE:
                self._fold_job(event.job_id, seq, JobProgress.admit, changed)
            return
        data = event.data
        if type(data).TYPE in _ABOUT_A_JOB:
            self._fold_job(data.job_id, seq, lambda progress: progress.apply(event), changed)
        elif isinstance(data, ev.NodeChanged):
            await connection.execute(_NODE, data.node, sorted({g.card_type for g in data.gpus}), seq)
        elif isinstance(data, (ev.PolicyProposed, ev.PolicyHeld, ev.PolicyActivated, ev.PolicyRejected)):
            await self._fold_policy(connection, data, event.time)

    async def _fold_policy(self, connection: asyncpg.Connection[asyncpg.Record], data: Any, at: datetime) -> None:
        """A proposal's way. Its own event may come after admission's answer: then there is nothing left to keep."""
        if isinstance(data, ev.PolicyProposed):
            document = orjson.dumps(data.document)
            await connection.execute(_PROPOSED, data.proposal_id, document, data.author, data.why, at)
            return
        if isinstance(data, ev.PolicyHeld):
            await connection.execute(_HELD, data.proposal_id, data.based_on, data.required_for)
            return
        if isinstance(data, ev.PolicyActivated):
            document = orjson.dumps(data.document)
            await connection.execute(_POLICY, data.policy_version, document, data.author, data.why, at, data.approver)
            if data.proposal_id:
                await connection.execute(_PROPOSAL, data.proposal_id, data.policy_version, None)
            self._on_change()
        else:
            problems = [*data.problems, *({"path": "", "fault": f.code.value, "remedy": f.remedy} for f in data.faults)]
            await connection.execute(_PROPOSAL, data.proposal_id, None, orjson.dumps(problems))
        await connection.execute(_CLOSED, data.proposal_id)

    def _fold_job(self, job_id: str, seq: int, change: Callable[[JobProgress], bool], changed: dict[str, int]) -> None:
        known = self._views.get(job_id)
        if known is None:
            return  # forgotten, or its submission was never ours
        progress, last_seq = known
        if 0 <= seq <= last_seq:
            return
        if not change(progress):
            return
        changed[job_id] = max(seq, last_seq)
        self._views[job_id] = (progress, changed[job_id])

    # --- rows -------------------------------------------------------------------------------------------------------

    async def _read_missing(
        self, connection: asyncpg.Connection[asyncpg.Record], events: list[tuple[int, Envelope[Any] | _Undecoded]]
    ) -> None:
        wanted: set[str] = set()
        for _, event in events:
            if isinstance(event, _Undecoded):
                wanted.add(event.job_id)
            elif type(event.data).TYPE in _ABOUT_A_JOB:
                wanted.add(event.data.job_id)
        missing = [job_id for job_id in wanted if job_id not in self._views]
        if missing:
            for job_id, view, last_seq, submitted_at in await connection.fetch(_READ, missing):
                progress = JobProgress.from_json(view)
                if last_seq == 0 and progress.waits_since is None:
                    progress.waits_since = submitted_at.isoformat()
                self._views[job_id] = (progress, last_seq)

    async def _write_views(self, connection: asyncpg.Connection[asyncpg.Record], changed: dict[str, int]) -> None:
        if changed:
            ids, states, finals, views, seqs, over = [], [], [], [], [], []
            for job_id, seq in sorted(changed.items()):
                progress = self._views[job_id][0]
                ids.append(job_id)
                states.append(progress.state)
                finals.append(progress.is_final)
                views.append(progress.to_json())
                seqs.append(seq)
                if progress.is_final:
                    over.append(job_id)
                    del self._views[job_id]
            await connection.execute(_WRITE, ids, states, finals, views, seqs)
            if over:
                await connection.execute("DELETE FROM gateway.secret WHERE job_id = ANY ($1)", over)
        while len(self._views) > KEPT_VIEWS:
            self._views.popitem(last=False)

    async def _restore(self, connection: asyncpg.Connection[asyncpg.Record], undecoded: _Undecoded) -> None:
        """A job whose row is gone: the database is older than the stream. The event holds all but its secrets."""
        event = read_event(undecoded.message)
        data: ev.JobSubmitted | ev.JobAdmitted = event.data
        spec = data.spec
        await connection.execute(
            _INSERT,
            data.job_id,
            spec.tenant,
            spec.name,
            spec.job_class.value,
            spec.priority,
            spec.total_gpus,
            spec.total_workers,
            data.submitted_at,
            data.submitted_by,
            event.traceparent[3:35],
            spec.model_dump_json(by_alias=True, exclude_defaults=True).encode(),
        )
        self._views[data.job_id] = (JobProgress(waits_since=data.submitted_at.isoformat()), 0)


_READ = "SELECT job_id, view, last_seq, submitted_at FROM gateway.job WHERE job_id = ANY ($1)"
_WRITE = """
UPDATE gateway.job j SET state = u.state, is_final = u.is_final, view = u.view, last_seq = u.seq
FROM unnest($1::text[], $2::text[], $3::boolean[], $4::bytea[], $5::bigint[]) AS u (job_id, state, is_final, view, seq)
WHERE j.job_id = u.job_id
"""
_INSERT = """
INSERT INTO gateway.job (job_id, tenant, name, class, state, priority, gpus, workers, submitted_at, submitted_by,
    trace_id, spec)
VALUES ($1, $2, $3, $4, 'submitted', $5, $6, $7, $8, $9, $10, $11)
ON CONFLICT DO NOTHING
"""
_NODE = """
INSERT INTO gateway.node AS n (node, card_types, last_seq) VALUES ($1, $2, $3)
ON CONFLICT (node) DO UPDATE SET card_types = excluded.card_types, last_seq = excluded.last_seq
WHERE n.card_types <> excluded.card_types AND n.last_seq < excluded.last_seq
"""
_POLICY = """
INSERT INTO gateway.policy (version, document, author, why, activated_at, approver) VALUES ($1, $2, $3, $4, $5, $6)
ON CONFLICT DO NOTHING
"""
_PROPOSED = """
INSERT INTO gateway.open_proposal (proposal_id, document, author, why, proposed_at)
SELECT $1, $2, $3, $4, $5 WHERE NOT EXISTS (SELECT FROM gateway.proposal WHERE proposal_id = $1)
ON CONFLICT DO NOTHING
"""
_HELD = """
UPDATE gateway.open_proposal SET is_held = true, based_on = $2, required_for = $3 WHERE proposal_id = $1
"""
_CLOSED = "DELETE FROM gateway.open_proposal WHERE proposal_id = $1"
_PROPOSAL = """
INSERT INTO gateway.proposal (proposal_id, policy_version, problems) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING
"""
