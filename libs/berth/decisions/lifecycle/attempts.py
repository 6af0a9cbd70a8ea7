"""An attempt from placement to its end: launch, stop, and what the job comes to when nobody holds a card any more."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any, assert_never

from berth.contracts.commands import StopWorkers
from berth.contracts.events import (
    AttemptEnded,
    AttemptOutcome,
    JobCancelled,
    JobFailed,
    JobReclaimed,
    JobRequeued,
    JobRunning,
    JobStopping,
    JobSucceeded,
)
from berth.contracts.jobs import JobSpec, JobState
from berth.contracts.reasons import Code, Reason, because
from berth.decisions.lifecycle.book import Book
from berth.decisions.lifecycle.launch import launch_order
from berth.decisions.lifecycle.model import JobRun, Stop, StopKind, Worker, by_node
from berth.decisions.lifecycle.retry import FREE_STARTS, Retry, after_node_fault, after_own_failure
from berth.decisions.lifecycle.states import JOB_TRANSITIONS, JobTrigger, WorkerPhase, WorkerTrigger, advance
from berth.decisions.policy.document import RecoverySettings

LAUNCH_EXPIRES_SECONDS = 60
LAUNCH_SILENCE_SECONDS = 90
"""A launch of which nothing is heard for so long is sent again: the fence makes the second one harmless."""
STOP_SLACK_SECONDS = 30
"""After notice and grace a stop that is not done yet is sent again."""
MESSAGE_LENGTH = 4096

NODE_FAULTS = frozenset(
    {
        Code.NODE_LOST,
        Code.WORKER_LOST,
        Code.GPU_FAULT,
        Code.START_REFUSED,
        Code.COMMAND_REFUSED,
        Code.GPU_BUSY,
        Code.OLD_FENCE,
    }
)
"""Ends that are not the program's doing."""


OWN_ERRNOS = frozenset(
    {
        errno.ENOENT,
        errno.EACCES,
        errno.ENOEXEC,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.E2BIG,
        errno.ENAMETOOLONG,
        errno.ELOOP,
    }
)
"""Errors of a start that the job's own command or folder brought about: another node would say the same."""


def is_node_fault(cause: Reason) -> bool:
    """Whether an end was not the program's doing."""
    if cause.code is Code.START_REFUSED and cause.facts.get("errno") in OWN_ERRNOS:
        return False
    return cause.code in NODE_FAULTS


def reason_json(reason: Reason) -> dict[str, Any]:
    """A reason as it is stored."""
    return reason.model_dump(mode="json", exclude_defaults=True)


def move(run: JobRun, trigger: JobTrigger) -> None:
    """Go where `trigger` leads."""
    run.state = advance(JOB_TRANSITIONS, run.state, trigger)


# ------------------------------------------------------------------------------------------------------------ launching
def launch(book: Book, run: JobRun, workers: Sequence[Worker]) -> None:
    """Send the workers of the job that certainly do not run to their nodes, one command per node and fence.

    Nothing is sent to a node that has not registered or is lost; its registration or loss leads on.
    """
    spec = book.specs.get(run.job_id)
    if spec is None or run.stop is not None:
        return
    for name, here in by_node(w for w in workers if w.phase in (WorkerPhase.ASSIGNED, WorkerPhase.LAUNCHING)):
        node = book.node(name)
        if node is None or node.is_lost or not node.epoch:
            continue
        again_at = book.after(LAUNCH_SILENCE_SECONDS)
        for fence in sorted({worker.fence for worker in here}):
            group = [worker for worker in here if worker.fence == fence]
            order = launch_order(
                run,
                spec,
                group,
                epoch=node.epoch,
                addresses={n: book.nodes[n].address for n in {run.workers[0].node} if n in book.nodes},
                grace_seconds=book.grace_seconds(run.job_id),
                expires_at=book.after(LAUNCH_EXPIRES_SECONDS),
            )
            number = book.order(node, order, run)
            for worker in group:
                worker.launch, worker.launch_again_at = number, again_at
                worker.move(WorkerTrigger.SEND)
            book.wake(run, again_at)
    book.mark(run)


def started(book: Book, run: JobRun) -> None:
    """Tell that the job runs, once all its workers have started."""
    if run.state is not JobState.STARTING or not all(worker.has_started for worker in run.workers):
        return
    move(run, JobTrigger.ALL_STARTED)
    run.unstarted = 0
    run.running_since = book.now
    run.first_started_at = run.first_started_at or book.now
    book.emit(run, JobRunning(job_id=run.job_id, attempt=run.attempt, started_at=book.now))
    spec = book.specs.get(run.job_id)
    if spec is not None and spec.time_limit is not None:
        book.wake(run, book.after(spec.time_limit))
    if spec is not None and book.settings(run.job_id).lifetime.max is not None:
        book.wake(run, book.now)  # looked at in this batch: it may have outlived its lifetime while it waited


# ------------------------------------------------------------------------------------------------------------- stopping
def stop(
    book: Book, run: JobRun, kind: StopKind, cause: Reason, *, by: str = "", grace_seconds: int | None = None
) -> None:
    """Stop all of the attempt. One that is stopping already goes on as it began."""
    if not run.has_attempt or run.stop is not None:
        return
    grace = book.grace_seconds(run.job_id) if grace_seconds is None else grace_seconds
    run.stop = Stop(kind, reason_json(cause), by, book.now, grace)
    for worker in run.workers:
        if worker.phase is WorkerPhase.ASSIGNED:
            worker.move(WorkerTrigger.LOSE)
    live = [worker for worker in run.workers if worker.is_live]
    if live:
        move(run, JobTrigger.STOP)
        book.emit(
            run,
            JobStopping(
                job_id=run.job_id,
                attempt=run.attempt,
                cause=cause,
                by=by,
                grace_seconds=grace,
                receipt=book.receipt(run, f"stop|{cause.code}"),
            ),
            actor=by,
        )
        send_stops(book, run, live)
    book.mark(run)
    end_if_over(book, run)


def send_stops(book: Book, run: JobRun, workers: Sequence[Worker]) -> None:
    """Order the workers to stop, one command per node and fence, under the node's epoch of now."""
    order = run.stop
    grace = order.grace_seconds if order else book.grace_seconds(run.job_id)
    again_at = book.after(grace + STOP_SLACK_SECONDS)
    for name, here in by_node(workers):
        node = book.node(name)
        for worker in here:
            worker.stop_again_at = again_at
        if node is None or node.is_lost:
            continue
        for fence in sorted({worker.fence for worker in here}):
            group = [worker for worker in here if worker.fence == fence]
            number = book.order(
                node,
                StopWorkers(
                    node=name,
                    epoch=node.epoch,
                    expires_at=again_at,
                    job_id=run.job_id,
                    attempt=run.attempt,
                    fence=fence,
                    workers=tuple(worker.number for worker in group),
                    grace_seconds=grace,
                    cause=str((order.cause if order else group[0].leaves or {}).get("code", "")),
                ),
                run,
            )
            for worker in group:
                worker.stop = number
    book.wake(run, again_at)
    book.mark(run)


# --------------------------------------------------------------------------------------------------------------- ending
def worker_over(book: Book, run: JobRun, worker: Worker) -> None:
    """Draw what follows from one worker holding no card any more."""
    if not any(w.node == worker.node and not w.is_over for w in run.workers):
        book.vacate(run, worker.node)
    book.mark(run)
    spec = book.specs.get(run.job_id)
    leaves = worker.leaves is not None and (run.workers[0] is not worker or len(run.workers) > 1)
    if spec is not None and run.stop is None and (leaves or not spec.gang) and not _all_over(run, spec):
        outcome, cause = _outcome_of(worker)
        if outcome is AttemptOutcome.NEVER_STARTED:
            run.unstarted += 1
            if run.unstarted > FREE_STARTS:  # it would be placed and refused for ever; the job is tried again later
                outcome = AttemptOutcome.FAILED
        _tell_ended(book, run, outcome, cause, worker=worker, workers=(worker.number,))
        if leaves:
            run.workers.remove(worker)
            started(book, run)
        return
    end_if_over(book, run)


def dismiss(book: Book, run: JobRun, workers: Sequence[Worker], cause: Reason, *, by: str, grace_seconds: int) -> None:
    """Stop some workers; the rest goes on."""
    for worker in workers:
        worker.leaves = reason_json(cause)
    book.emit(
        run,
        JobStopping(
            job_id=run.job_id,
            attempt=run.attempt,
            cause=cause,
            by=by,
            grace_seconds=grace_seconds,
            workers=tuple(worker.number for worker in workers),
            receipt=book.receipt(run, f"dismiss|{cause.code}|" + ",".join(str(w.number) for w in workers)),
        ),
        actor=by,
    )
    for worker in workers:
        if worker.phase is WorkerPhase.ASSIGNED:
            worker.move(WorkerTrigger.LOSE)
    send_stops(book, run, [worker for worker in workers if worker.is_live])
    for worker in [worker for worker in workers if worker.is_over]:
        worker_over(book, run, worker)


def end_if_over(book: Book, run: JobRun) -> None:
    """End the attempt, and the job or not, once no worker holds a card."""
    spec = book.specs.get(run.job_id)
    if not run.has_attempt or spec is None or not _all_over(run, spec):
        return
    for worker in run.workers:
        book.vacate(run, worker.node)
    outcome, cause = _outcome(run)
    worst = _speaker(run)
    if not any(worker.has_started for worker in run.workers):
        run.unstarted += 1
    if outcome is AttemptOutcome.PREEMPTED and cause is not None:
        cause = _full_record(book, run, cause, worst)
    _tell_ended(book, run, outcome, cause, worker=worst)
    _conclude(book, run, spec, outcome, cause, message=worst.message if worst else "")


def _full_record(book: Book, run: JobRun, cause: Reason, worker: Worker | None) -> Reason:
    """All that the record of a preemption has to hold: once per job, whatever its last words were."""
    gpus = sum(len(w.gpus) * w.gpu_milli for w in run.workers) / 1000
    facts = {
        **cause.facts,
        "victim_tenant": run.tenant,
        "gpus": int(gpus) if gpus == int(gpus) else gpus,
        "notice_at": run.stop.at.isoformat() if run.stop else None,
        "stopped_at": book.now.isoformat(),
        "last_message": worker.message if worker else "",
    }
    return cause.model_copy(update={"facts": facts})


def _speaker(run: JobRun) -> Worker | None:
    """The worker whose exit code and last words stand for the attempt: the first that failed, not one stopped for it."""
    if run.stop is not None and run.stop.kind in (StopKind.FAILURE, StopKind.FAULT):
        number = run.stop.cause.get("facts", {}).get("worker")
        first = run.worker(number) if isinstance(number, int) else None
        if first is not None:
            return first
    return next((w for w in run.workers if w.has_failed), None) or next(iter(run.workers), None)


def _all_over(run: JobRun, spec: JobSpec) -> bool:
    """Independent workers may still be waiting for their place: the job has ended when all it asked for have been."""
    if not all(worker.is_over for worker in run.workers):
        return False
    return run.stop is not None or spec.gang or len(run.workers) >= spec.total_workers


def _outcome_of(worker: Worker) -> tuple[AttemptOutcome, Reason | None]:
    if worker.has_succeeded:
        return AttemptOutcome.SUCCEEDED, None
    if worker.leaves is not None:
        why = Reason.model_validate(worker.leaves)
        return (AttemptOutcome.LOST if is_node_fault(why) else AttemptOutcome.PREEMPTED), why
    cause = Reason.model_validate(worker.reason) if worker.reason else None
    if worker.is_lost:
        return AttemptOutcome.LOST, cause or because(Code.WORKER_LOST, worker=worker.number, node=worker.node)
    if not worker.has_started and (cause is None or is_node_fault(cause)):
        return AttemptOutcome.NEVER_STARTED, cause or because(Code.COMMAND_REFUSED, worker=worker.number)
    return AttemptOutcome.FAILED, cause or because(
        Code.PROGRAM_FAILED,
        worker=worker.number,
        node=worker.node,
        exit_code=worker.exit_code,
        signal=worker.signal,
    )


def _outcome(run: JobRun) -> tuple[AttemptOutcome, Reason | None]:
    """How the attempt ended. The order to stop decides, unless all programs had ended well by themselves."""
    order = run.stop
    cause = Reason.model_validate(order.cause) if order else None
    if run.cancelled_by is not None and order is not None:
        return AttemptOutcome.CANCELLED, because(Code.CANCELLED, by=run.cancelled_by)
    if order is None or order.kind is StopKind.FAILURE:
        ends = [_outcome_of(worker) for worker in run.workers]
        for wanted in (
            AttemptOutcome.FAILED,
            AttemptOutcome.NEVER_STARTED,
            AttemptOutcome.LOST,
            AttemptOutcome.PREEMPTED,
        ):
            for outcome, why in ends:
                if outcome is wanted:
                    return (outcome, cause) if order else (outcome, why)
        return AttemptOutcome.SUCCEEDED, None
    match order.kind:
        case StopKind.CANCEL:
            return AttemptOutcome.CANCELLED, cause
        case StopKind.TIME_LIMIT:
            return AttemptOutcome.FAILED, cause
        case StopKind.RECLAIM:
            return AttemptOutcome.RECLAIMED, cause
        case StopKind.PREEMPT | StopKind.FAULT:
            if run.workers and all(worker.has_succeeded for worker in run.workers):
                return AttemptOutcome.SUCCEEDED, None
            if order.kind is StopKind.PREEMPT:
                return AttemptOutcome.PREEMPTED, cause
            has_run = any(worker.has_started for worker in run.workers)
            return (AttemptOutcome.LOST if has_run else AttemptOutcome.NEVER_STARTED), cause
        case _ as never:
            assert_never(never)


def _tell_ended(
    book: Book,
    run: JobRun,
    outcome: AttemptOutcome,
    cause: Reason | None,
    *,
    worker: Worker | None,
    workers: tuple[int, ...] | None = None,
) -> None:
    book.emit(
        run,
        AttemptEnded(
            job_id=run.job_id,
            attempt=run.attempt,
            fence=worker.fence if workers and worker else run.fence,
            outcome=outcome,
            cause=cause,
            exit_code=worker.exit_code if worker else None,
            message=worker.message if worker else "",
            ended_at=book.now,
            workers=workers,
        ),
    )


def _conclude(
    book: Book, run: JobRun, spec: JobSpec, outcome: AttemptOutcome, cause: Reason | None, *, message: str
) -> None:
    """Turn the end of the attempt into the end of the job or its return to the queue."""
    ids = {"job_id": run.job_id, "attempt": run.attempt, "ended_at": book.now}
    rules = book.settings(run.job_id).recovery
    if run.cancelled_by is not None and outcome is not AttemptOutcome.SUCCEEDED:
        move(run, JobTrigger.CANCEL)
        book.emit(run, JobCancelled(**ids, requested_by=run.cancelled_by), actor=run.cancelled_by)
        book.bury(run)
        return
    match outcome:
        case AttemptOutcome.SUCCEEDED:
            move(run, JobTrigger.SUCCEED)
            book.emit(run, JobSucceeded(**ids))
            book.bury(run)
        case AttemptOutcome.CANCELLED:
            move(run, JobTrigger.CANCEL)
            book.emit(run, JobCancelled(**ids, requested_by=run.cancelled_by or ""))
            book.bury(run)
        case AttemptOutcome.RECLAIMED:
            move(run, JobTrigger.RECLAIM)
            why = cause or because(Code.RECLAIM)
            book.emit(run, JobReclaimed(**ids, cause=why, evidence=dict(why.facts)))
            book.bury(run)
        case AttemptOutcome.PREEMPTED:
            _requeue(book, run, cause or because(Code.PREEMPTED), Retry(run.charged, 0))
        case AttemptOutcome.FAILED | AttemptOutcome.LOST | AttemptOutcome.NEVER_STARTED:
            why = cause or because(Code.PROGRAM_FAILED)
            retry = _retry(run, spec, outcome, why, rules=rules)
            if retry is None:
                move(run, JobTrigger.FAIL)
                book.emit(run, JobFailed(**ids, cause=why, message=message))
                book.bury(run)
            else:
                _requeue(book, run, why, retry)
        case _ as never:
            assert_never(never)


def _retry(
    run: JobRun, spec: JobSpec, outcome: AttemptOutcome, cause: Reason, *, rules: RecoverySettings
) -> Retry | None:
    if cause.code is Code.TIME_LIMIT:
        return None
    if outcome is AttemptOutcome.FAILED and not is_node_fault(cause):
        return after_own_failure(spec, rules, charged=run.charged)
    return after_node_fault(spec, rules, charged=run.charged, unstarted=run.unstarted)


def _requeue(book: Book, run: JobRun, cause: Reason, retry: Retry) -> None:
    move(run, JobTrigger.REQUEUE)
    run.charged = retry.charged
    run.workers, run.stop, run.running_since, run.wake = [], None, None, None
    run.grace_until = run.evidence = None
    run.stale = run.stale[-8:]
    book.emit(
        run,
        JobRequeued(
            job_id=run.job_id,
            after_attempt=run.attempt,
            not_before=book.after(retry.pause_seconds),
            cause=cause,
            charged=run.charged,
        ),
    )
