"""Placement: the one commit point, where a job takes GPUs and quota together.

All events at hand are applied, then one pass looks at what could have a new answer: groups of equal claims that are new
or that something was freed for. Every other waiting job keeps the answer it had, so the cost of a pass follows what
changed. What a pass decides depends on recorded state only: a core rebuilt from its records decides the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
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
    JobReclaimed,
    JobRequeued,
    JobRunning,
    JobStopping,
    NodeChanged,
    PolicyActivated,
)
from berth.contracts.reasons import Code, because
from berth.contracts.requests import JobExplained, LedgerAnswer, QuotaAnswer
from berth.decisions.core import Core, Settled
from berth.decisions.explain.waits import explain_job, free_on_node, quota_answer
from berth.decisions.placement.claim import claim_of, plain
from berth.decisions.placement.jobs import MICROSECONDS, Job, Phase, job_from_json, micros, moment
from berth.decisions.placement.ledger import Ledger
from berth.decisions.placement.round import Round
from berth.decisions.placement.state import State
from berth.decisions.placement.turn import Turn
from berth.decisions.policy.document import Policy
from berth.decisions.queueing.planned import plans_from
from berth.decisions.queueing.waiting import WaitingSet

CANCELS_KEPT = timedelta(days=7)
"""How long a cancel request for an unknown job is kept: as long as the stream could still bring that job."""

START_COUNTS_AS_PLACED = MICROSECONDS
"""A start so soon after its placement is not recorded of its own: most are, and each record costs a write."""

_FINAL_OUTCOMES = frozenset({AttemptOutcome.SUCCEEDED, AttemptOutcome.CANCELLED, AttemptOutcome.RECLAIMED})
_LOST_OUTCOMES = frozenset({AttemptOutcome.LOST, AttemptOutcome.NEVER_STARTED})
_WAITING_PHASES = frozenset({Phase.WAITING, Phase.RESTING, Phase.WITHDRAWN})


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
        self.state = State()
        self._cancels: dict[str, tuple[int, str]] = {}
        self._wakes: list[tuple[int, str]] = []
        self._rule_wake = 0
        self._boundary: datetime | None = None
        self._timers = 0
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
        return self.state.policy_version

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self.state.policy

    @property
    def books(self) -> Ledger:
        """The allocation ledger."""
        return self.state.books

    @property
    def waiting(self) -> WaitingSet:
        """The waiting jobs that nobody makes room for."""
        return self.state.waiting

    @property
    def jobs(self) -> dict[str, Job]:
        """All jobs that are not over."""
        return self.state.jobs

    @property
    def state_version(self) -> int:
        """Events applied so far."""
        return self.state.state_version

    def apply(self, event: Envelope[Any], *, now: datetime) -> None:
        """Take in one event."""
        handler = self._handlers.get(type(event.data))
        if handler is None:
            return
        self.state.cause, self.state.now = event.id, now
        handler(event, now)
        self.state.state_version += 1
        self.state.touch_meta()  # receipts name the version: a core that is rebuilt goes on counting where it was

    # ---------------------------------------------------------------------------------------- coming into the queue
    def _on_admitted(self, event: Envelope[Any], now: datetime) -> None:
        data: JobAdmitted = event.data
        claim = self.state.claim(claim_of(data.spec))
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
        self.state.touch(job)
        cancel = self._cancels.get(job.id)
        if cancel is not None:
            self._cancel(job, cancel[1])
            return
        job.phase, job.not_before = Phase.WAITING, 0
        self.waiting.add(job.claim, job.submitted, job.id)
        self.state.fresh[job.id] = job
        self._plan_wake(job)

    def _plan_wake(self, job: Job) -> None:
        """A job that waits for long enough gets a planned start: be there when it has."""
        since = plans_from(self.policy.for_class(job.claim.job_class), job.submitted)
        if since is not None and since > micros(self.state.now):
            heapq.heappush(self._wakes, (since, job.id))

    def _on_requeued(self, event: Envelope[Any], now: datetime) -> None:
        data: JobRequeued = event.data
        job = self.jobs.get(data.job_id)
        if job is None or job.attempt != data.after_attempt:
            return
        if job.phase is Phase.PLACED:
            # Told before the release it rests on; kept until the cards are free.
            job.not_before = max(micros(data.not_before), 1)
            self.state.touch(job)
        elif job.phase is Phase.BETWEEN:
            job.cause = event.id
            self._come_back(job, micros(data.not_before), now)

    def _come_back(self, job: Job, not_before: int, now: datetime) -> None:
        if job.id in self._cancels or not_before <= micros(now):
            self._compete(job)
            return
        job.phase, job.not_before = Phase.RESTING, not_before
        heapq.heappush(self._wakes, (not_before, job.id))
        self.state.touch(job)
        self.state.tell_waiting(job, (because(Code.BACKOFF, until=moment(not_before).isoformat()),))

    # ---------------------------------------------------------------------------------------------- leaving for good
    def _on_cancel_requested(self, event: Envelope[Any], now: datetime) -> None:
        data: JobCancelRequested = event.data
        job = self.jobs.get(data.job_id)
        if job is not None and job.phase in _WAITING_PHASES:
            job.cause = event.id
            self._cancel(job, data.requested_by)
            return
        if job is not None:
            self._want_no_more(job)
        self._cancels[data.job_id] = (micros(now), data.requested_by)
        self.state.record("cancel", data.job_id, [micros(now), data.requested_by])

    def _cancel(self, job: Job, requested_by: str) -> None:
        self.state.emit(
            job,
            JobCancelled(job_id=job.id, attempt=job.attempt, requested_by=requested_by, ended_at=self.state.now),
        )
        self._forget(job)

    def _forget(self, job: Job) -> None:
        """Drop a job that is over; nothing of it stays."""
        self._stop_waiting(job)
        self.state.short.pop(job.id, None)
        self.jobs.pop(job.id, None)
        self.state.touch(job)
        self._drop_cancel(job.id)

    def _stop_waiting(self, job: Job) -> None:
        """Take a job out of the queue, with the room that is held for it."""
        if job.phase is Phase.WAITING or job.missing:
            # Others may have stood behind it, or off what was kept because it wanted it.
            self.books.dirty_types.update(job.claim.shape.types or self.books.fleet.pools)
        self.waiting.remove(job.claim, job.submitted, job.id)
        self.state.fresh.pop(job.id, None)
        self.state.drop_plan(job.id)

    def _want_no_more(self, job: Job) -> None:
        """A running job gets no more workers."""
        if job.missing:
            self._stop_waiting(job)
            job.missing = ()
            self.state.short.pop(job.id, None)
            self.state.touch(job)

    def _drop_cancel(self, job_id: str) -> None:
        if self._cancels.pop(job_id, None) is not None:
            self.state.record("cancel", job_id, None)

    def _on_over(self, event: Envelope[Any], now: datetime) -> None:
        job = self.jobs.get(event.data.job_id)
        self._drop_cancel(event.data.job_id)
        if job is not None and not job.held:
            self._forget(job)

    def _on_withdrawn(self, event: Envelope[Any], now: datetime) -> None:
        job = self.jobs.get(event.data.job_id)
        if job is not None and job.phase in (Phase.WAITING, Phase.RESTING):
            self._stop_waiting(job)
            job.phase = Phase.WITHDRAWN
            self.state.touch(job)

    # ------------------------------------------------------------------------------------------------------ attempts
    def _on_attempt_ended(self, event: Envelope[Any], now: datetime) -> None:
        data: AttemptEnded = event.data
        job = self.jobs.get(data.job_id)
        if job is None or job.phase is not Phase.PLACED or job.attempt != data.attempt:
            return
        if data.workers is not None:
            self._workers_ended(job, data, event.id)
            return
        job.cause = event.id
        self._want_no_more(job)
        freed = self.books.release(job)
        self.state.emit(job, AllocationReleased(job_id=job.id, attempt=job.attempt, fence=job.fence, gpus=plain(freed)))
        self.state.touch(job)
        self.state.short.pop(job.id, None)
        job.started_at, job.placed_at, job.leaving, job.told = 0, 0, frozenset(), None
        if data.outcome in _FINAL_OUTCOMES:
            self._forget(job)
            return
        job.phase, requeued = Phase.BETWEEN, job.not_before
        job.not_before = 0
        if requeued:
            self._come_back(job, requeued, now)

    def _workers_ended(self, job: Job, data: AttemptEnded, cause: str) -> None:
        """Some workers are gone, the rest goes on; whether they come again depends on why they went."""
        gone = tuple(
            held.worker for held in job.held if held.worker in (data.workers or ()) and held.fence <= data.fence
        )
        if not gone:
            return
        job.cause = cause
        freed = self.books.release(job, gone)
        job.leaving = job.leaving - set(gone)
        self.state.emit(
            job,
            AllocationReleased(job_id=job.id, attempt=job.attempt, fence=data.fence, workers=gone, gpus=plain(freed)),
        )
        self.state.touch(job)
        shape = job.claim.shape
        if job.is_leaving or job.id in self._cancels:
            return
        if not shape.is_gang:
            if data.outcome is AttemptOutcome.PREEMPTED or data.outcome in _LOST_OUTCOMES:
                job.missing = tuple(sorted({*job.missing, *gone}))
                self.waiting.wake([self.waiting.add(job.claim, job.submitted, job.id)])
        elif shape.min_workers is None and data.outcome in _LOST_OUTCOMES:
            job.missing = tuple(sorted({*job.missing, *gone}))
            self.state.short[job.id] = job

    def _on_running(self, event: Envelope[Any], now: datetime) -> None:
        job = self.jobs.get(event.data.job_id)
        if job is None or job.phase is not Phase.PLACED or job.attempt != event.data.attempt:
            return
        started = micros(event.data.started_at)
        if started - job.placed_at > START_COUNTS_AS_PLACED and not job.started_at:
            job.started_at = started
            self.state.touch(job)

    def _on_stopping(self, event: Envelope[Any], now: datetime) -> None:
        data: JobStopping = event.data
        job = self.jobs.get(data.job_id)
        if job is None or job.phase is not Phase.PLACED or job.attempt != data.attempt:
            return
        before = job.leaving
        self.books.mark_leaving(job, data.workers)
        if data.workers is None:
            self._want_no_more(job)
        if job.leaving != before:
            self.state.touch(job)

    # ----------------------------------------------------------------------------------------------- nodes and policy
    def _on_node_changed(self, event: Envelope[Any], now: datetime) -> None:
        data: NodeChanged = event.data
        if self.books.fleet.change(data):
            self.state.record("node", data.node, data.model_dump(mode="json", exclude_defaults=True))
            self.books.dirty_types.update(self.books.fleet.nodes[data.node].rows)

    def _on_policy(self, event: Envelope[Any], now: datetime) -> None:
        data: PolicyActivated = event.data
        if data.policy_version <= self.policy_version:
            return
        for tenant in self.state.set_policy(data.policy_version, data.document, micros(now)):
            self.state.record_usage(tenant)
        self.state.record("policy", "active", {"version": data.policy_version, "document": data.document})
        self.state.cuts_due = True
        self.waiting.wake_all()
        self.books.dirty_types.update(self.books.fleet.pools)
        for job in self.jobs.values():
            if job.phase is Phase.WAITING:
                self._plan_wake(job)
        self._boundary = None

    # ------------------------------------------------------------------------------------------------ time and passes
    def settle(self, *, now: datetime) -> Settled:
        """Fire timers, then give everything that could have a new answer its turn."""
        self.state.now = now
        self._fire(now)
        self._pass()
        self._note_wakes()
        timers, self._timers, self.state.cause = self._timers, 0, ""
        return Settled(self.state.out.drain(), self.state.drain_records(), timers)

    def _pass(self) -> None:
        this = Round(self.state)
        this.run()
        self._rule_wake = this.rule_wake

    def _place(self, job: Job, turn: Turn) -> None:
        """Put a waiting job where a turn says; for shells that know places beforehand."""
        Round(self.state).start(job, turn)

    def _fire(self, now: datetime) -> None:
        due = micros(now)
        while self._wakes and self._wakes[0][0] <= due:
            at, job_id = heapq.heappop(self._wakes)
            job = self.jobs.get(job_id)
            if job is None:
                continue
            if job.phase is Phase.RESTING and job.not_before == at:
                self._timers += 1
                self._compete(job)
            elif job.phase is Phase.WAITING:
                group = self.waiting.group(job.claim)
                if group is not None:
                    self._timers += 1
                    self.waiting.wake([group])
        if self._boundary is None:
            self._boundary = self.state.keeper.next_change(now - timedelta(microseconds=1))
        while self._boundary is not None and self._boundary <= now:
            self._timers += 1
            self.waiting.wake_all()
            self.books.dirty_types.update(self.books.fleet.pools)
            self.state.touch_meta()
            self._boundary = self.state.keeper.next_change(now)
        if self._rule_wake and self._rule_wake <= due:
            self._timers += 1
        self._age_cancels(due)

    def _age_cancels(self, due: int) -> None:
        old = due - CANCELS_KEPT // timedelta(microseconds=1)
        while self._cancels:
            job_id, (at, by) = next(iter(self._cancels.items()))
            if at > old:
                return
            if job_id not in self.jobs:
                self._drop_cancel(job_id)
                continue
            del self._cancels[job_id]
            self._cancels[job_id] = (due, by)
            self.state.record("cancel", job_id, [due, by])

    def _note_wakes(self) -> None:
        """Rules that end by themselves: have the jobs they hold back tried again then."""
        for at, job_id in self.state.wakes:
            heapq.heappush(self._wakes, (at, job_id))
        self.state.wakes = []

    def next_timer(self) -> datetime | None:
        """When a job may compete again, a rule ends, or a window opens or closes."""
        while self._wakes and self.jobs.get(self._wakes[0][1]) is None:
            heapq.heappop(self._wakes)
        times = [moment(self._wakes[0][0])] if self._wakes else []
        if self.state.left is not None:
            times.append(self.state.now)
        if self._rule_wake:
            times.append(moment(self._rule_wake))
        if self._boundary is not None:
            times.append(self._boundary)
        return min(times, default=None)

    # ------------------------------------------------------------------------------------------------------- restore
    def restore(self, records: Iterable[tuple[str, str, Any]], *, now: datetime) -> None:
        """Rebuild nodes first, then policy, jobs and the ledger they make up, then the room that is held."""
        state = self.state
        by_kind: dict[str, list[tuple[str, Any]]] = {}
        for kind, key, body in records:
            by_kind.setdefault(kind, []).append((key, body))
        for entries in by_kind.values():
            entries.sort(key=lambda entry: entry[0])
        at = now
        for _, body in by_kind.get("meta", ()):
            state.fence, state.state_version, state.plan_number = body["fence"], body["state_version"], body["plan"]
            state.open_windows = list(body["open"])
            if body["left"] is not None:
                priority, share, submitted, job_id = body["left"][1]
                state.left = (list(body["left"][0]), (priority, share, submitted, job_id))
            state.out.counters.update(body["windows"])
            state.window_entities = dict.fromkeys(body["windows"])
            at = moment(body["at"])
        state.now = at
        for _, body in by_kind.get("node", ()):
            self.books.fleet.change(NodeChanged.model_validate(body))
        for tenant, body in by_kind.get("usage", ()):
            state.restore_usage(tenant, body)
        for line, body in by_kind.get("share", ()):
            state.restore_share(line, body)
        for _, body in by_kind.get("policy", ()):
            state.set_policy(body["version"], body["document"], micros(at))
        for uuid, body in by_kind.get("cut", ()):
            self.books.fleet.nodes[body["node"]].by_uuid[uuid].cut = dict(body["cut"])
        for job_id, body in by_kind.get("job", ()):
            self._restore_job(job_id, body)
        for job_id, body in by_kind.get("plan", ()):
            state.restore_plan(job_id, body)
        cancels = [(body[0], job_id, body[1]) for job_id, body in by_kind.get("cancel", ())]
        self._cancels = {job_id: (at_, by) for at_, job_id, by in sorted(cancels)}
        self.waiting.awake = {}
        self.books.dirty_types = set()
        self.books.dirty_tenants = {}
        state.fresh = {}
        self._boundary = state.keeper.next_change(at)
        self._rule_wake = micros(at) if state.keeper.clearings(at) else 0
        if state.keeps_order:
            self.waiting.wake_all()

    def _restore_job(self, job_id: str, body: dict[str, Any]) -> None:
        state = self.state
        job = job_from_json(job_id, body, state.claims)
        self.jobs[job_id] = job
        state.out.counters[job_id] = body["n"]
        if job.phase is Phase.WAITING:
            self.waiting.add(job.claim, job.submitted, job_id)
            self._plan_wake(job)
            if job.wake_at:
                heapq.heappush(self._wakes, (job.wake_at, job_id))
        elif job.phase is Phase.RESTING:
            heapq.heappush(self._wakes, (job.not_before, job_id))
        held, job.held = job.held, []
        if held:
            self.books.take(job, held)
        if job.missing and job.phase is Phase.PLACED:
            if job.claim.shape.is_gang:
                state.short[job_id] = job
            else:
                self.waiting.add(job.claim, job.submitted, job_id)

    # ----------------------------------------------------------------------------------------------------- questions
    def explain(self, job_id: str, now: datetime) -> JobExplained:
        """Why a job waits, now."""
        return explain_job(self.state, job_id, now)

    def quota(self, tenant: str | None = None, now: datetime | None = None) -> QuotaAnswer:
        """Who holds what; `tenant` None: every tenant."""
        return quota_answer(self.state, tenant, now)

    def ledger(self, node: str | None = None) -> LedgerAnswer:
        """Which cards are held, by whom."""
        return self.books.answer(node, self.state_version)

    def free_on(self, node: str, now: datetime) -> int:
        """Whole cards that a new job of no special claim could get on a node."""
        return free_on_node(self.state, node, now)
