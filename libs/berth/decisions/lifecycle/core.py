"""The lifecycle core: which rule answers which event, timers, and what is told and stored at the end of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, ClassVar

from berth.contracts.envelope import Envelope, Fact
from berth.contracts.events import (
    ActivityReported,
    CommandRefused,
    GpuOut,
    JobAdmitted,
    JobCancelled,
    JobCancelRequested,
    JobExtendRequested,
    JobPlaced,
    JobRerunRequested,
    NodeBack,
    NodeLost,
    NodeRegistered,
    NodeSuspect,
    PolicyActivated,
    PreemptionPlanned,
    WorkerExited,
    WorkerReleased,
    WorkerStarted,
)
from berth.contracts.jobs import JobState
from berth.contracts.reasons import Code, because
from berth.decisions.core import Core, Settled
from berth.decisions.lifecycle import idle, nodes, reports
from berth.decisions.lifecycle.attempts import (
    LAUNCH_SILENCE_SECONDS,
    dismiss,
    end_if_over,
    launch,
    move,
    send_stops,
    stop,
)
from berth.decisions.lifecycle.book import Book
from berth.decisions.lifecycle.model import JobRun, StopKind, Worker
from berth.decisions.lifecycle.states import JobTrigger, WorkerPhase

RULE_CAUSES = {"reclaim": Code.RECLAIM, "quota_cut": Code.QUOTA_CUT}
Handler = Callable[["LifecycleCore", Envelope[Any]], None]


class LifecycleCore(Core):
    """Runs attempts: launches what was placed, stops what must go, retries or ends the job."""

    NAME: ClassVar[str] = "lifecycle"
    CONSUMES: ClassVar[tuple[type[Fact], ...]]

    def __init__(self) -> None:
        self._book = Book()

    # ------------------------------------------------------------------------------------------------------- Core
    def apply(self, event: Envelope[Any], *, now: datetime) -> None:
        """Take in one new event."""
        handler = _HANDLERS.get(type(event.data))
        if handler is not None:
            self._book.begin(now, event.id)
            handler(self, event)
            self._book.count()

    def settle(self, *, now: datetime) -> Settled:
        """Fire timers and hand over what this batch led to."""
        book = self._book
        book.begin(now)
        fired = 0
        while (run := book.due()) is not None:
            fired += 1
            self._on_time(run)
        book.prune()
        emissions = book.out.drain()
        return Settled(emissions, book.records(), fired)

    def next_timer(self) -> datetime | None:
        """When the first timer is due."""
        return self._book.next_timer()

    def restore(self, records: Iterable[tuple[str, str, Any]], *, now: datetime) -> None:
        """Rebuild the state."""
        self._book.restore(records)

    @property
    def policy_version(self) -> int:
        """Version of the policy in force here."""
        return self._book.policy_version

    def job(self, job_id: str) -> JobRun | None:
        """What is known of a job that was placed; to be read only."""
        return self._book.jobs.get(job_id)

    # ----------------------------------------------------------------------------------------------------- events
    def _on_admitted(self, event: Envelope[JobAdmitted]) -> None:
        book, data = self._book, event.data
        book.know(event, data.job_id, data.spec)
        run = book.jobs.get(data.job_id)
        if run is not None and run.has_attempt:  # it was placed before we knew what it is
            book.adopt(run)
            launch(book, run, [w for w in run.workers if w.phase is WorkerPhase.ASSIGNED])
            end_if_over(book, run)

    def _on_placed(self, event: Envelope[JobPlaced]) -> None:
        book, data = self._book, event.data
        run = book.run_of(data.job_id)
        if run.state.is_final or data.attempt < run.attempt or data.fence <= run.fence:
            book.ignore(run, "JobPlaced", data.attempt, f"attempt {run.attempt} with fence {run.fence} is newer")
            return
        joins = run.has_attempt and data.attempt == run.attempt
        if run.has_attempt and not joins:
            raise ValueError(f"attempt {data.attempt} of {data.job_id} was placed while attempt {run.attempt} lives")
        if not run.has_attempt and data.attempt == run.attempt:
            book.ignore(run, "JobPlaced", data.attempt, "that attempt has ended")
            return
        run.attempt, run.fence = data.attempt, data.fence
        workers = [
            Worker(
                number=a.worker,
                node=a.node,
                fence=data.fence,
                gpus=a.gpus,
                card_type=a.card_type,
                role=a.role,
                gpu_milli=a.gpu_milli,
                memory_mib=a.memory_mib,
                slice=a.slice,
            )
            for a in data.assignments
        ]
        if not joins:
            move(run, JobTrigger.PLACED)
            run.workers = sorted(workers, key=lambda worker: worker.number)
        else:
            for worker in workers:
                run.put(worker)
        for worker in workers:
            book.place(run, worker.node)
        book.mark(run)
        self._begin(run, workers)

    def _begin(self, run: JobRun, workers: list[Worker]) -> None:
        book = self._book
        if run.stop is not None:  # it joined an attempt that is being stopped: it is never started
            for worker in workers:
                nodes.never_started(book, run, worker)
            return
        if run.cancelled_by is not None:
            stop(book, run, StopKind.CANCEL, because(Code.CANCELLED, by=run.cancelled_by), by=run.cancelled_by)
            return
        for name in sorted({w.node for w in workers if (n := book.node(w.node)) is not None and n.is_lost}):
            nodes.lost_on(book, run, name)
        launch(book, run, workers)

    def _on_cancel_requested(self, event: Envelope[JobCancelRequested]) -> None:
        book, data = self._book, event.data
        run = book.jobs.get(data.job_id)
        if run is None:
            book.remember_cancel(data.job_id, data.requested_by)
        elif not run.state.is_final and run.cancelled_by is None:
            run.cancelled_by = data.requested_by
            book.mark(run)
            cause = because(Code.CANCELLED, by=data.requested_by, why=data.why or None)
            stop(book, run, StopKind.CANCEL, cause, by=data.requested_by)

    def _on_cancelled(self, event: Envelope[JobCancelled]) -> None:
        """Another service held the job when it was cancelled; only forgetting is left to do."""
        book, job_id = self._book, event.data.job_id
        run = book.jobs.get(job_id)
        if run is None:
            book.forget_unplaced(job_id)
        elif run.state is JobState.WAITING:
            move(run, JobTrigger.CANCEL)
            book.bury(run)

    def _on_preemption(self, event: Envelope[PreemptionPlanned]) -> None:
        book, plan = self._book, event.data
        for victim in plan.victims:
            run = book.jobs.get(victim.job_id)
            if run is None or not run.has_attempt or run.attempt != victim.attempt or run.stop is not None:
                continue
            cause = because(
                RULE_CAUSES.get(plan.rule, Code.PREEMPTED),
                rule=plan.rule,
                plan=plan.plan_id,
                preemptor=plan.preemptor or None,
                preemptor_tenant=plan.preemptor_tenant or None,
            )
            spec = book.specs.get(run.job_id)
            asked = spec.stop_grace if spec is not None else None
            grace = plan.grace_seconds if asked is None else min(asked, plan.grace_seconds)
            if victim.workers is None:
                stop(book, run, StopKind.PREEMPT, cause, by=plan.preemptor, grace_seconds=grace)
            else:
                leaving = [w for w in run.workers if w.number in victim.workers and not w.is_over and w.leaves is None]
                dismiss(book, run, leaving, cause, by=plan.preemptor, grace_seconds=grace)

    def _on_policy(self, event: Envelope[PolicyActivated]) -> None:
        if event.data.policy_version > self._book.policy_version:
            self._book.store_policy(event.data.policy_version, event.data.document)
            for run in self._book.jobs.values():
                self._set_wake(run)

    # ----------------------------------------------------------------------------------------------------- timers
    def _on_time(self, run: JobRun) -> None:
        """Do what is due for a job, and set its next timer."""
        book = self._book
        if not run.has_attempt:
            return
        limit = self._time_limit_at(run)
        if limit is not None and limit <= book.now:
            spec = book.specs[run.job_id]
            stop(book, run, StopKind.TIME_LIMIT, because(Code.TIME_LIMIT, limit_seconds=spec.time_limit))
        if run.grace_until is not None and run.grace_until <= book.now:
            nodes.grace_over(book, run)
        idle.judge_idle(book, run)
        idle.judge_lifetime(book, run)
        self._send_again(run)
        self._set_wake(run)

    def _set_wake(self, run: JobRun) -> None:
        """Look at the job again when the first thing of it falls due."""
        book = self._book
        if not run.has_attempt:
            return
        dues = [run.grace_until, *idle.idle_dues(book, run), *idle.lifetime_dues(book, run)]
        dues += [self._time_limit_at(run), *(w.launch_again_at for w in run.workers if _waits_to_launch(w))]
        dues += [w.stop_again_at for w in run.workers if w.is_live]
        coming = [due for due in dues if due is not None]
        if coming:
            book.wake(run, max(min(coming), book.after(1)))

    def _send_again(self, run: JobRun) -> None:
        """Repeat commands that nobody has answered in time. A silent node gets them when it registers or is heard."""
        book = self._book
        unheard = [w for w in run.workers if _waits_to_launch(w) and _is_due(w.launch_again_at, book.now)]
        for worker in unheard:
            worker.launch_again_at = book.after(LAUNCH_SILENCE_SECONDS)
        if run.stop is None and unheard:
            launch(book, run, [w for w in unheard if w.leaves is None and self._is_heard(w)])
        undone = [w for w in run.workers if w.is_live and _is_due(w.stop_again_at, book.now)]
        for worker in undone:
            worker.stop_again_at = book.after(LAUNCH_SILENCE_SECONDS)
        heard = [w for w in undone if self._is_heard(w)]
        if heard:
            send_stops(book, run, heard)

    def _is_heard(self, worker: Worker) -> bool:
        node = self._book.node(worker.node)
        return node is not None and not node.is_silent

    def _time_limit_at(self, run: JobRun) -> datetime | None:
        spec = self._book.specs.get(run.job_id)
        if spec is None or spec.time_limit is None or run.running_since is None or run.stop is not None:
            return None
        return run.running_since + timedelta(seconds=spec.time_limit)


def _waits_to_launch(worker: Worker) -> bool:
    return worker.phase in (WorkerPhase.ASSIGNED, WorkerPhase.LAUNCHING) and worker.launch_again_at is not None


def _is_due(at: datetime | None, now: datetime) -> bool:
    return at is not None and at <= now


_HANDLERS: dict[type[Fact], Handler] = {
    JobAdmitted: LifecycleCore._on_admitted,
    JobPlaced: LifecycleCore._on_placed,
    JobCancelRequested: LifecycleCore._on_cancel_requested,
    JobCancelled: LifecycleCore._on_cancelled,
    PreemptionPlanned: LifecycleCore._on_preemption,
    PolicyActivated: LifecycleCore._on_policy,
    JobExtendRequested: lambda core, event: idle.on_extend_requested(core._book, event.data),
    JobRerunRequested: lambda core, event: nodes.rerun(core._book, event.data),
    ActivityReported: lambda core, event: idle.on_activity(core._book, event.data),
    WorkerStarted: lambda core, event: reports.on_started(core._book, event.data),
    WorkerExited: lambda core, event: reports.on_exited(core._book, event.data),
    WorkerReleased: lambda core, event: reports.on_released(core._book, event.data),
    CommandRefused: lambda core, event: reports.on_refused(core._book, event.data),
    NodeRegistered: lambda core, event: nodes.on_registered(core._book, event.data),
    NodeSuspect: lambda core, event: nodes.on_suspect(core._book, event.data),
    NodeBack: lambda core, event: nodes.on_back(core._book, event.data),
    NodeLost: lambda core, event: nodes.on_lost(core._book, event.data),
    GpuOut: lambda core, event: nodes.on_gpu_out(core._book, event.data),
}
LifecycleCore.CONSUMES = tuple(_HANDLERS)
