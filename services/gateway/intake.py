"""Takes in what users want changed: many requests, one transaction, and an answer only after its commit.

While one transaction is on its way, the next requests gather; so the busier the gateway, the larger its groups, and an
idle one waits for nobody. After the commit the events go out in order from a task of their own: whoever was answered
does not wait for the bus, and what a crash leaves behind is published by the sweep.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

import orjson

from berth.bus.errors import TransientError as BusTransientError
from berth.bus.publisher import Outgoing, Publisher
from berth.contracts.envelope import Fact
from berth.contracts.events import JobCancelRequested, JobSubmitted
from berth.contracts.jobs import JobSpec, JobState
from berth.decisions.core import Emission
from berth.runtime.emissions import EmissionEncoder
from berth.runtime.faults import fault_point
from berth.store.database import Database
from berth.store.errors import TransientError
from berth.store.outbox import OutboxRow
from berth.telemetry.logs import get_logger
from berth.telemetry.tracing import SILENT_BATCH
from services.gateway.store.writes import ALWAYS, WITH_CANCEL, GroupRows, GroupWriter, JobTuple

SERVICE: Final = "gateway"
MAX_GROUP_JOBS: Final = 4000
SWEEP_SECONDS: Final = 1.0
PUBLISH_DEADLINE_SECONDS: Final = 5.0
TRIES: Final = 3
_SUBMITTED_VERSION: Final = 1
_CANCEL_VERSION: Final = 2

_log: Final = get_logger(SERVICE)


class KeyConflict(Exception):
    """The idempotency key stands for another submission."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """One job to store. spec: without secret values, which stand in `secrets`."""

    job_id: str
    spec: JobSpec
    secrets: dict[str, str]
    traceparent: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a submission led to: the jobs in order, and whether they were there before."""

    jobs: tuple[tuple[str, str, str], ...]
    """(job id, name, state)."""
    is_repeat: bool = False


@dataclass(slots=True)
class Submission:
    """Jobs to store all at once or not at all. digest: of their content, where a key was given."""

    jobs: Sequence[NewJob]
    user: str
    submitted_at: datetime
    scope: str = ""
    key: str = ""
    digest: bytes = b""
    key_seconds: int = 86400
    answer: asyncio.Future[Accepted] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(slots=True)
class Cancel:
    """A request to end a job; `answer`: whether it is new."""

    job_id: str
    tenant: str
    user: str
    why: str
    traceparent: str
    answer: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


@dataclass(slots=True)
class Tell:
    """An event without a row of its own: a proposal, a cordon request, a denial.

    version: makes the event's id; must differ where one entity is spoken of again.
    """

    data: Fact
    entity: str
    user: str
    tenant: str = ""
    version: int = 1
    traceparent: str = ""
    answer: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


Request = Submission | Cancel | Tell


class Intake:
    """One for each process; `run` does the work, `submit`, `cancel` and `tell` hand it over and wait for the commit."""

    def __init__(self, database: Database, publisher: Publisher, *, pool: str) -> None:
        self._database = database
        self._writer = GroupWriter(database)
        self._publisher = publisher
        self._encoder = EmissionEncoder(service=SERVICE, pool=pool)
        self._waiting: deque[Request] = deque()
        self._work = asyncio.Event()
        self._outgoing: asyncio.Queue[tuple[list[Outgoing], list[int]]] = asyncio.Queue()
        self._is_publishing = False
        self.groups = 0
        """Transactions so far."""

    async def submit(self, submission: Submission) -> Accepted:
        """Store a submission.

        Raises:
            KeyConflict: its key stands for other content. TransientError: whether it is stored is not known.
        """
        self._put(submission)
        return await submission.answer

    async def cancel(self, cancel: Cancel) -> bool:
        """Store a cancel request, once for each job; whether it was the first and the job was not over."""
        self._put(cancel)
        return await cancel.answer

    async def tell(self, tell: Tell) -> None:
        """Store and publish an event."""
        self._put(tell)
        await tell.answer

    def _put(self, request: Request) -> None:
        self._waiting.append(request)
        self._work.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._commit_forever(), name="intake commits")
            tasks.create_task(self._publish_forever(), name="intake publishes")
            tasks.create_task(self._sweep_forever(), name="intake sweeps")

    # --- committing -------------------------------------------------------------------------------------------------

    async def _commit_forever(self) -> None:
        while True:
            await self._work.wait()
            group = self._take()
            if not group:
                self._work.clear()
                continue
            try:
                await self._commit_group(group)
            except asyncio.CancelledError:
                for request in group:
                    request.answer.cancel()
                raise

    def _take(self) -> list[Request]:
        group: list[Request] = []
        jobs = 0
        while self._waiting and jobs < MAX_GROUP_JOBS:
            request = self._waiting.popleft()
            if request.answer.done():
                continue  # the caller went away before anything was done
            group.append(request)
            jobs += len(request.jobs) if isinstance(request, Submission) else 1
        return group

    async def _commit_group(self, group: list[Request]) -> None:
        """One transaction for all. A defect in one request must not fail the others, so then each goes by itself."""
        for attempt in range(TRIES):
            try:
                await self._once(group)
                return
            except TransientError as error:
                # Without a key nobody could tell a repeat from a second job; but nothing of this try can have been
                # stored unless the commit itself was cut off, and then the ids are the same: the insert says so.
                if attempt == TRIES - 1:
                    _fail(group, error)
                    return
                await asyncio.sleep(0.05 * (attempt + 1))
            except Exception as error:
                if len(group) == 1:
                    _log.error("request could not be stored", error=error)
                    _fail(group, error)
                else:
                    for request in group:
                        await self._commit_group([request])
                return

    async def _once(self, group: list[Request]) -> None:
        submissions, twins = _without_twins([r for r in group if isinstance(r, Submission)])
        cancels = [r for r in group if isinstance(r, Cancel)]
        tells = [r for r in group if isinstance(r, Tell)]
        rows = self._rows(submissions, cancels, tells)
        await fault_point("gateway.before_commit")
        written = await self._writer.write(rows)
        self.groups += 1
        await fault_point("gateway.between_commit_and_publish")
        self._hand_over(written.rows)
        for tell in tells:
            _answer(tell, None)
        first = set(written.cancelled)
        for cancel in cancels:
            _answer(cancel, cancel.job_id in first)
            first.discard(cancel.job_id)
        for number, submission in enumerate(submissions, 1):
            copies = twins.get((submission.scope, submission.key), [])
            if number in written.lost:
                for copy in (submission, *copies):
                    _answer(copy, await self._known(copy))
                continue
            _answer(submission, _accepted(submission))
            for copy in copies:
                is_same = copy.digest == submission.digest
                _answer(copy, _accepted(submission, is_repeat=True) if is_same else KeyConflict(copy.key))

    def _rows(self, submissions: list[Submission], cancels: list[Cancel], tells: list[Tell]) -> GroupRows:
        rows = GroupRows(cancels=[cancel.job_id for cancel in cancels])
        emissions: list[Emission] = []
        numbers: list[int] = []
        for number, submission in enumerate(submissions, 1):
            if submission.key:
                expires = submission.submitted_at + timedelta(seconds=submission.key_seconds)
                rows.keys.append((number, submission.scope, submission.key, submission.digest, expires))
            for job in submission.jobs:
                rows.jobs.append(_job_row(number, submission, job))
                rows.secrets += [(number, job.job_id, name, value) for name, value in job.secrets.items()]
                emissions.append(_submitted(submission, job))
                numbers.append(number)
        for cancel in {cancel.job_id: cancel for cancel in reversed(cancels)}.values():
            emissions.append(_cancel_requested(cancel))
            numbers.append(WITH_CANCEL)
        for tell in tells:
            emissions.append(_told(tell))
            numbers.append(ALWAYS)
        encoded, _ = self._encoder.encode(emissions, now=datetime.now(UTC), causes={}, batch=SILENT_BATCH)
        rows.outgoing = [
            (number, emission.entity, OutboxRow(e.event_id, e.subject, orjson.dumps(e.headers), e.payload))
            for number, emission, e in zip(numbers, emissions, encoded, strict=True)
        ]
        return rows

    async def _known(self, submission: Submission) -> Accepted | KeyConflict:
        """What an earlier submission under the same key led to."""
        async with self._database.reader() as connection:
            row = await connection.fetchrow(
                "SELECT digest, job_ids FROM gateway.idempotency WHERE scope = $1 AND key = $2",
                submission.scope,
                submission.key,
            )
            if row is None or bytes(row[0]) != submission.digest:
                return KeyConflict(submission.key)
            jobs = await connection.fetch("SELECT job_id, name, state FROM gateway.job WHERE job_id = ANY ($1)", row[1])
        found = {job[0]: (job[0], job[1], job[2]) for job in jobs}
        return Accepted(tuple(found[job_id] for job_id in row[1] if job_id in found), is_repeat=True)

    # --- publishing -------------------------------------------------------------------------------------------------

    def _hand_over(self, rows: Sequence[tuple[int, OutboxRow]]) -> None:
        if rows:
            self._is_publishing = True
            outgoing = [Outgoing(r.subject, r.payload, r.event_id, orjson.loads(r.headers)) for _, r in rows]
            self._outgoing.put_nowait((outgoing, [row_id for row_id, _ in rows]))

    async def _publish_forever(self) -> None:
        while True:
            outgoing, ids = await self._outgoing.get()
            while not self._outgoing.empty() and len(outgoing) < 1000:
                more, more_ids = self._outgoing.get_nowait()
                outgoing, ids = outgoing + more, ids + more_ids
            self._is_publishing = True
            await self._publish(outgoing, ids)
            self._is_publishing = not self._outgoing.empty()

    async def _publish(self, outgoing: list[Outgoing], ids: Sequence[int]) -> None:
        """Publish in order until stored; what can never be stored is logged and given up."""
        left = list(zip(outgoing, ids, strict=True))
        while left:
            results = await self._publisher.publish([item for item, _ in left], PUBLISH_DEADLINE_SECONDS)
            again, stored = [], []
            for (item, row_id), result in zip(left, results, strict=True):
                if isinstance(result.error, BusTransientError):
                    again.append((item, row_id))
                    continue
                if result.error is not None:
                    _log.error("event can never be published", event=item.msg_id, reason=str(result.error))
                stored.append(row_id)
            self._database.forget_outbox(stored)
            left = again
            if left:
                _log.warning("publishing again", left=len(left))

    async def _sweep_forever(self) -> None:
        """Publish what another process left behind, and write off what is published when no batch does."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self._sweep()
            except TransientError as error:
                _log.warning("cannot sweep the outbox", reason=str(error))

    async def _sweep(self) -> None:
        if self._is_publishing:
            return
        if self._database.outbox.not_written_off():
            await self._database.mark_published()
        rows = await self._database.unpublished(older_than_s=SWEEP_SECONDS)
        if rows and not self._is_publishing:
            _log.info("publishing what was left in the outbox", rows=len(rows))
            outgoing = [Outgoing(r.subject, r.payload, r.event_id, orjson.loads(r.headers or b"{}")) for r in rows]
            await self._publish(outgoing, [row.id for row in rows])


def _fail(group: Sequence[Request], error: Exception) -> None:
    for request in group:
        if not request.answer.done():
            request.answer.set_exception(error)


def _accepted(submission: Submission, *, is_repeat: bool = False) -> Accepted:
    state = JobState.SUBMITTED.value
    return Accepted(tuple((job.job_id, job.spec.name, state) for job in submission.jobs), is_repeat)


def _answer(request: Request, answer: Accepted | bool | Exception | None) -> None:
    """Give a request its answer, unless the caller has gone away."""
    if request.answer.done():
        return
    if isinstance(answer, Exception):
        request.answer.set_exception(answer)
    else:
        request.answer.set_result(answer)  # type: ignore[arg-type]  # each kind of request has its kind of answer


def _without_twins(submissions: list[Submission]) -> tuple[list[Submission], dict[tuple[str, str], list[Submission]]]:
    """Those to carry out, and later copies under the same key by that key."""
    chosen: list[Submission] = []
    copies: dict[tuple[str, str], list[Submission]] = {}
    for submission in submissions:
        slot = (submission.scope, submission.key)
        if submission.key and slot in copies:
            copies[slot].append(submission)
            continue
        chosen.append(submission)
        if submission.key:
            copies[slot] = []
    return chosen, copies


def _job_row(number: int, submission: Submission, job: NewJob) -> JobTuple:
    spec = job.spec
    return (
        number,
        job.job_id,
        spec.tenant,
        spec.name,
        spec.job_class.value,
        spec.priority,
        spec.total_gpus,
        spec.total_workers,
        submission.submitted_at,
        submission.user,
        job.traceparent[3:35],
        _spec_json(spec),
    )


def _submitted(submission: Submission, job: NewJob) -> Emission:
    data = JobSubmitted(
        job_id=job.job_id, spec=job.spec, submitted_at=submission.submitted_at, submitted_by=submission.user
    )
    return Emission(
        data,
        job.job_id,
        _SUBMITTED_VERSION,
        tenant=job.spec.tenant,
        actor=f"user:{submission.user}",
        correlation=job.job_id,
        trace=job.traceparent,
    )


def _cancel_requested(cancel: Cancel) -> Emission:
    data = JobCancelRequested(job_id=cancel.job_id, requested_by=cancel.user, why=cancel.why)
    return Emission(
        data,
        cancel.job_id,
        _CANCEL_VERSION,
        tenant=cancel.tenant,
        actor=f"user:{cancel.user}",
        correlation=cancel.job_id,
        trace=cancel.traceparent,
    )


def _told(tell: Tell) -> Emission:
    return Emission(
        tell.data,
        tell.entity,
        tell.version,
        tenant=tell.tenant,
        actor=f"user:{tell.user}",
        correlation=tell.entity,
        trace=tell.traceparent,
    )


def _spec_json(spec: JobSpec) -> bytes:
    return spec.__pydantic_serializer__.to_json(spec, by_alias=True, exclude_defaults=True)
