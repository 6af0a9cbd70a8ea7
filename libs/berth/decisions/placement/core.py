"""Placement: the one commit point, where a job takes GPUs and quota together.

All events at hand are applied, then one pass looks at what could have a new answer: groups of equal claims that are new
or that something was freed for. Every other waiting job keeps the answer it had, so the cost of a pass follows what
changed. What a pass decides depends on recorded state only: a core rebuilt from its records decides the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from typing import Any, ClassVar

from berth.contracts.envelope import Envelope, Fact
from berth.contracts.events import (
    AdmissionWithdrawn,
    AllocationReleased,
    AttemptEnded,
    AttemptOutcome,
    JobAdmitted,
    JobCancelled,
    JobCancelRequested,
    JobFailed,
    JobPlaced,
    JobReclaimed,
    JobRequeued,
    JobRunning,
    JobStopping,
    JobWaiting,
    NodeChanged,
    PolicyActivated,
    Receipt,
)
from berth.contracts.reasons import Code, Reason, because
from berth.contracts.requests import JobExplained, LedgerAnswer, QuotaAnswer
from berth.decisions.core import DECISIONS_VERSION, Core, Outbox, Record, Settled
from berth.decisions.explain.waits import explain_job, quota_answer
from berth.decisions.placement.claim import Claim, claim_of, plain
from berth.decisions.placement.jobs import MICROSECONDS, Job, Phase, job_from_json, micros, moment
from berth.decisions.placement.ledger import Ledger
from berth.decisions.placement.turn import Turn, could_fit, take_turn, to_assignments
from berth.decisions.policy.document import Policy
from berth.decisions.queueing.waiting import Group, WaitingSet

CANCELS_KEPT = timedelta(days=7)
"""How long a cancel request for an unknown job is kept: as long as the stream could still bring that job."""

START_COUNTS_AS_PLACED = MICROSECONDS
"""A start so soon after its placement is not recorded of its own: most are, and each record costs a write."""

TOLD_PER_GROUP = 16
"""Jobs of one group that are told at once when the reasons of the whole group change."""

_FINAL_OUTCOMES = frozenset({AttemptOutcome.SUCCEEDED, AttemptOutcome.CANCELLED, AttemptOutcome.RECLAIMED})


class PlacementCore(Core):
    """Allocation ledger, waiting set and the pass over them."""

    NAME: ClassVar[str] = "placement"
    CONSUMES: ClassVar[tuple[type[Fact], ...]] = (
        AdmissionWithdrawn,
        AttemptEnded,
        JobAdmitted,
        JobCancelRequested,
        JobCancelled,
        JobFailed,
        JobReclaimed,
        JobRequeued,
        JobRunning,
        JobStopping,
        NodeChanged,
        PolicyActivated,
    )

    def __init__(self) -> None:
        """Empty: no nodes, no policy, nobody waits."""
        self.books = Ledger()
        self.waiting = WaitingSet()
        self.jobs: dict[str, Job] = {}
        self.policy = Policy()
        self.state_version = 0
        self._policy_version = 0
        self._fence = 0
        self._claims: dict[Claim, Claim] = {}
        self._cancels: dict[str, tuple[int, str]] = {}
        self._resting: list[tuple[int, str]] = []
        self._fresh: dict[str, Job] = {}
        self._out = Outbox()
        self._touched: dict[str, None] = {}
        self._records: dict[tuple[str, str], Any] = {}
        self._timers = 0
        self._cause = ""
        self._now = datetime.fromtimestamp(0, UTC)
        self._handlers: dict[type[Fact], Callable[[Envelope[Any], datetime], None]] = {
            AdmissionWithdrawn: self._on_withdrawn,
            AttemptEnded: self._on_attempt_ended,
            JobAdmitted: self._on_admitted,
            JobCancelRequested: self._on_cancel_requested,
            JobCancelled: self._on_over,
            JobFailed: self._on_over,
            JobReclaimed: self._on_over,
            JobRequeued: self._on_requeued,
            JobRunning: self._on_running,
            JobStopping: self._on_stopping,
            NodeChanged: self._on_node_changed,
            PolicyActivated: self._on_policy,
        }

    @property
    def policy_version(self) -> int:
        """Version of the policy in force; 0: none yet."""
        return self._policy_version

    def apply(self, event: Envelope[Any], *, now: datetime) -> None:
        """Take in one event."""
        handler = self._handlers.get(type(event.data))
        if handler is None:
            return
        self._cause, self._now = event.id, now
        handler(event, now)
        self.state_version += 1

    # ------------------------------------------------------------------------------------------------ events
    def _on_admitted(self, event: Envelope[Any], now: datetime) -> None:
        data: JobAdmitted = event.data
        claim = claim_of(data.spec)
        claim = self._claims.setdefault(claim, claim)
        job = self.jobs.get(data.job_id)
        if job is not None:
            if job.phase is not Phase.WITHDRAWN:
                return
            job.claim, job.phase = claim, Phase.WAITING
        else:
            job = Job(data.job_id, claim, micros(data.submitted_at), trace=event.traceparent)
            self.jobs[job.id] = job
        job.cause = event.id
        self._compete(job)

    def _compete(self, job: Job) -> None:
        """Let a job wait, or end it where a cancel request has come before it."""
        self._touched[job.id] = None
        cancel = self._cancels.get(job.id)
        if cancel is not None:
            self._cancel(job, cancel[1])
            return
        job.phase, job.not_before = Phase.WAITING, 0
        self.waiting.add(job.claim, job.submitted, job.id)
        self._fresh[job.id] = job

    def _cancel(self, job: Job, requested_by: str) -> None:
        self._emit(job, JobCancelled(job_id=job.id, attempt=job.attempt, requested_by=requested_by, ended_at=self._now))
        self._forget(job)

    def _forget(self, job: Job) -> None:
        """Drop a job that is over; nothing of it stays."""
        self.waiting.remove(job.claim, job.submitted, job.id)
        self._fresh.pop(job.id, None)
        self.jobs.pop(job.id, None)
        self._touched[job.id] = None
        self._drop_cancel(job.id)

    def _drop_cancel(self, job_id: str) -> None:
        if self._cancels.pop(job_id, None) is not None:
            self._records["cancel", job_id] = None

    def _on_cancel_requested(self, event: Envelope[Any], now: datetime) -> None:
        data: JobCancelRequested = event.data
        job = self.jobs.get(data.job_id)
        if job is not None and job.phase in (Phase.WAITING, Phase.RESTING, Phase.WITHDRAWN):
            job.cause = event.id
            self._cancel(job, data.requested_by)
            return
        self._cancels[data.job_id] = (micros(now), data.requested_by)
        self._records["cancel", data.job_id] = [micros(now), data.requested_by]

    def _on_over(self, event: Envelope[Any], now: datetime) -> None:
        job = self.jobs.get(event.data.job_id)
        self._drop_cancel(event.data.job_id)
        if job is not None and job.phase is not Phase.PLACED:
            self._forget(job)

    def _on_withdrawn(self, event: Envelope[Any], now: datetime) -> None:
        job = self.jobs.get(event.data.job_id)
        if job is not None and job.phase in (Phase.WAITING, Phase.RESTING):
            self.waiting.remove(job.claim, job.submitted, job.id)
            self._fresh.pop(job.id, None)
            job.phase = Phase.WITHDRAWN
            self._touched[job.id] = None

    def _on_requeued(self, event: Envelope[Any], now: datetime) -> None:
        data: JobRequeued = event.data
        job = self.jobs.get(data.job_id)
        if job is None or job.attempt != data.after_attempt:
            return
        if job.phase is Phase.PLACED:
            # Told before the release it rests on; kept until the cards are free.
            job.not_before = max(micros(data.not_before), 1)
            self._touched[job.id] = None
        elif job.phase is Phase.BETWEEN:
            job.cause = event.id
            self._come_back(job, micros(data.not_before), now)

    def _come_back(self, job: Job, not_before: int, now: datetime) -> None:
        if job.id in self._cancels or not_before <= micros(now):
            self._compete(job)
            return
        job.phase, job.not_before = Phase.RESTING, not_before
        heapq.heappush(self._resting, (not_before, job.id))
        self._touched[job.id] = None
        self._tell(job, (because(Code.BACKOFF, until=moment(not_before).isoformat()),))

    def _on_attempt_ended(self, event: Envelope[Any], now: datetime) -> None:
        data: AttemptEnded = event.data
        job = self.jobs.get(data.job_id)
        if job is None or job.phase is not Phase.PLACED or (job.attempt, job.fence) != (data.attempt, data.fence):
            return
        job.cause = event.id
        freed = self.books.release(job, data.workers)
        self._emit(
            job,
            AllocationReleased(
                job_id=job.id, attempt=job.attempt, fence=job.fence, workers=data.workers, gpus=plain(freed)
            ),
        )
        self._touched[job.id] = None
        if job.held:
            return
        job.started_at, job.placed_at, job.is_stopping, job.told = 0, 0, False, None
        if data.outcome in _FINAL_OUTCOMES:
            self._forget(job)
            return
        job.phase, requeued = Phase.BETWEEN, job.not_before
        job.not_before = 0
        if requeued:
            self._come_back(job, requeued, now)

    def _on_running(self, event: Envelope[Any], now: datetime) -> None:
        job = self.jobs.get(event.data.job_id)
        if job is None or job.phase is not Phase.PLACED or job.attempt != event.data.attempt:
            return
        started = micros(event.data.started_at)
        if started - job.since > START_COUNTS_AS_PLACED:
            job.started_at = started
            self._touched[job.id] = None

    def _on_stopping(self, event: Envelope[Any], now: datetime) -> None:
        data: JobStopping = event.data
        job = self.jobs.get(data.job_id)
        if job is not None and job.phase is Phase.PLACED and job.attempt == data.attempt and data.workers is None:
            job.is_stopping = True
            self._touched[job.id] = None

    def _on_node_changed(self, event: Envelope[Any], now: datetime) -> None:
        data: NodeChanged = event.data
        if self.books.fleet.change(data):
            self._records["node", data.node] = data.model_dump(mode="json", exclude_defaults=True)
            self.books.dirty_types.update(self.books.fleet.nodes[data.node].rows)

    def _on_policy(self, event: Envelope[Any], now: datetime) -> None:
        data: PolicyActivated = event.data
        if data.policy_version <= self._policy_version:
            return
        self._set_policy(data.policy_version, data.document)
        self._records["policy", "active"] = {"version": data.policy_version, "document": data.document}
        self.waiting.wake_all()

    def _set_policy(self, version: int, document: dict[str, Any]) -> None:
        self.policy = Policy.from_document(document)
        self._policy_version = version
        self.books.quota.set_policy(self.policy)

    # ------------------------------------------------------------------------------------------------ the pass
    def settle(self, *, now: datetime) -> Settled:
        """Fire timers, then give every group that is awake its turn."""
        self._now = now
        self._fire(now)
        self._pass()
        timers, self._timers, self._cause = self._timers, 0, ""
        return Settled(self._out.drain(), self._drain_records(), timers)

    def _fire(self, now: datetime) -> None:
        due = micros(now)
        while self._resting and self._resting[0][0] <= due:
            at, job_id = heapq.heappop(self._resting)
            job = self.jobs.get(job_id)
            if job is not None and job.phase is Phase.RESTING and job.not_before == at:
                self._timers += 1
                self._compete(job)
        old = due - CANCELS_KEPT // timedelta(microseconds=1)
        while self._cancels:
            job_id, (at, _) = next(iter(self._cancels.items()))
            if at > old:
                break
            if job_id in self.jobs:
                by = self._cancels.pop(job_id)[1]
                self._cancels[job_id] = (due, by)
                self._records["cancel", job_id] = [due, by]
                continue
            self._drop_cancel(job_id)

    def next_timer(self) -> datetime | None:
        """When the first resting job may compete again."""
        while self._resting:
            at, job_id = self._resting[0]
            job = self.jobs.get(job_id)
            if job is not None and job.phase is Phase.RESTING and job.not_before == at:
                return moment(at)
            heapq.heappop(self._resting)
        return None

    def _pass(self) -> None:
        if self._policy_version == 0:
            return
        self._wake_by_room()
        heap = [(self._order(group), group) for group in self.waiting.awake.values()]
        heapq.heapify(heap)
        self.waiting.awake = {}
        while heap:
            _, group = heapq.heappop(heap)
            turn = take_turn(group.claim, self.books, self.policy)
            if turn.held is None:
                self._defer(group, turn)
                continue
            self._place(self.jobs[group.head[1]], turn)
            if group.jobs:
                heapq.heappush(heap, (self._order(group), group))
        self._tell_fresh()
        self.waiting.awake = {}

    def _wake_by_room(self) -> None:
        """Something was freed or changed: wake those it may be enough for."""
        for card_type in sorted(self.books.dirty_types):
            for shape, groups in self.waiting.shapes(card_type):
                if could_fit(shape, self.books, self.policy):
                    self.waiting.wake(groups.values())
        self.books.dirty_types = set()

    def _order(self, group: Group) -> tuple[int, int, str]:
        submitted, job_id = group.head
        return (-group.claim.priority, submitted, job_id)

    def _place(self, job: Job, turn: Turn) -> None:
        assert turn.held is not None
        self.waiting.remove(job.claim, job.submitted, job.id)
        self._fresh.pop(job.id, None)
        self._fence += 1
        job.phase, job.attempt, job.fence = Phase.PLACED, job.attempt + 1, self._fence
        job.placed_at, job.started_at, job.told, job.is_stopping = micros(self._now), 0, None, False
        self.books.take(job, turn.held)
        self._touched[job.id] = None
        assignments = to_assignments(turn.held)
        inputs = ";".join(f"{h.worker}@{h.node}:{','.join(h.gpus)}" for h in turn.held)
        receipt = Receipt(
            policy_version=self._policy_version,
            state_version=self.state_version,
            decisions_version=DECISIONS_VERSION,
            candidates=tuple(turn.candidates),
            filtered=turn.filtered,
            digest=self._digest(f"{job.id}/{job.attempt}/{job.fence}|{inputs}"),
        )
        self._emit(
            job,
            JobPlaced(job_id=job.id, attempt=job.attempt, fence=job.fence, assignments=assignments, receipt=receipt),
        )

    def _defer(self, group: Group, turn: Turn) -> None:
        """Keep the answer, and tell the first jobs of the group where its codes have changed."""
        group.reasons = tuple(turn.reasons)
        for _, job_id in group.jobs[:TOLD_PER_GROUP]:
            self._tell(self.jobs[job_id], group.reasons)

    def _tell_fresh(self) -> None:
        """Every job that began to wait in this batch is told why."""
        for job in self._fresh.values():
            group = self.waiting.group(job.claim)
            if group is None:
                continue
            if not group.reasons:
                group.reasons = tuple(take_turn(job.claim, self.books, self.policy).reasons)
            self._tell(job, group.reasons)
        self._fresh = {}

    def _tell(self, job: Job, reasons: tuple[Reason, ...]) -> None:
        codes = tuple(sorted({reason.code for reason in reasons}))
        if job.told == codes:
            return
        job.told = codes
        self._touched[job.id] = None
        receipt = Receipt(
            policy_version=self._policy_version,
            state_version=self.state_version,
            decisions_version=DECISIONS_VERSION,
            digest=self._digest(f"{job.id}/{job.attempt}|{','.join(codes)}"),
        )
        self._emit(job, JobWaiting(job_id=job.id, reasons=reasons, attempt=job.attempt, receipt=receipt))

    def _digest(self, text: str) -> str:
        head = f"{self._policy_version}.{self.state_version}.{DECISIONS_VERSION}|"
        return blake2b((head + text).encode(), digest_size=8).hexdigest()

    def _emit(self, job: Job, data: Fact) -> None:
        self._out.emit(
            data,
            job.id,
            tenant=job.claim.tenant,
            actor="service:placement",
            cause=job.cause or self._cause,
            trace=job.trace,
        )

    # ------------------------------------------------------------------------------------------------ records
    def _drain_records(self) -> list[Record]:
        if not self._touched and not self._records:
            return []
        records = [Record(kind, key, body) for (kind, key), body in self._records.items()]
        for job_id in self._touched:
            job = self.jobs.get(job_id)
            if job is None:
                self._out.counters.pop(job_id, None)
                records.append(Record("job", job_id, None))
            else:
                job.cause = ""
                records.append(Record("job", job_id, job.to_json(self._out.counters.get(job_id, 0))))
        records.append(Record("meta", "counters", {"fence": self._fence, "state_version": self.state_version}))
        self._touched, self._records = {}, {}
        if len(self._claims) > 2 * len(self.jobs) + 1000:
            self._claims = {job.claim: job.claim for job in self.jobs.values()}
        return records

    def restore(self, records: Iterable[tuple[str, str, Any]], *, now: datetime) -> None:
        """Rebuild nodes first, then policy, jobs and the ledger they make up."""
        by_kind: dict[str, list[tuple[str, Any]]] = {}
        for kind, key, body in records:
            by_kind.setdefault(kind, []).append((key, body))
        for _, body in sorted(by_kind.get("node", ())):
            self.books.fleet.change(NodeChanged.model_validate(body))
        for _, body in by_kind.get("policy", ()):
            self._set_policy(body["version"], body["document"])
        for _, body in by_kind.get("meta", ()):
            self._fence, self.state_version = body["fence"], body["state_version"]
        for job_id, body in sorted(by_kind.get("job", ()), key=lambda entry: entry[0]):
            self._restore_job(job_id, body)
        cancels = [(body[0], job_id, body[1]) for job_id, body in by_kind.get("cancel", ())]
        self._cancels = {job_id: (at, by) for at, job_id, by in sorted(cancels)}
        self.waiting.awake = {}
        self.books.dirty_types = set()

    def _restore_job(self, job_id: str, body: dict[str, Any]) -> None:
        job = job_from_json(job_id, body, self._claims)
        self.jobs[job_id] = job
        self._out.counters[job_id] = body["n"]
        if job.phase is Phase.WAITING:
            self.waiting.add(job.claim, job.submitted, job_id)
        elif job.phase is Phase.RESTING:
            heapq.heappush(self._resting, (job.not_before, job_id))
        held, job.held = job.held, []
        if held:
            self.books.take(job, held)

    # ---------------------------------------------------------------------------------------------- questions
    def explain(self, job_id: str, now: datetime) -> JobExplained:
        """Why a job waits, now."""
        return explain_job(self, job_id, now)

    def quota(self, tenant: str | None = None, now: datetime | None = None) -> QuotaAnswer:
        """Who holds what; `tenant` None: every tenant."""
        return quota_answer(self, tenant, now)

    def ledger(self, node: str | None = None) -> LedgerAnswer:
        """Which cards are held, by whom."""
        return self.books.answer(node, self.state_version)
