"""What agents say of workers and commands. Anything not about the newest fence of a live worker changes nothing."""

from __future__ import annotations

from berth.contracts.events import CommandRefused, StartFailed, WorkerExited, WorkerReleased, WorkerStarted
from berth.contracts.reasons import Code, Reason, because
from berth.decisions.lifecycle.attempts import (
    MESSAGE_LENGTH,
    is_node_fault,
    reason_json,
    started,
    stop,
    worker_over,
)
from berth.decisions.lifecycle.book import Book
from berth.decisions.lifecycle.model import JobRun, StopKind, Worker
from berth.decisions.lifecycle.nodes import reconcile
from berth.decisions.lifecycle.states import WorkerPhase, WorkerTrigger

ASK_AGAIN_SECONDS = 1
"""Pause before a refused command is sent again: a node that refuses everything must not be hammered."""


def on_started(book: Book, event: WorkerStarted) -> None:
    """A worker's program runs."""
    found = _addressed(book, event)
    if found is None:
        return
    run, worker = found
    if worker.phase not in (WorkerPhase.ASSIGNED, WorkerPhase.LAUNCHING):
        if not worker.has_started:
            worker.has_started = True
            book.mark(run)
            started(book, run)
            return
        book.ignore(run, "WorkerStarted", event.attempt, f"worker {worker.number} is {worker.phase}")
        return
    worker.move(WorkerTrigger.START)
    worker.has_started = True
    book.mark(run)
    started(book, run)


def on_exited(book: Book, event: WorkerExited) -> None:
    """A worker's program ended, or never began."""
    found = _addressed(book, event)
    if found is None:
        return
    run, worker = found
    if worker.phase in (WorkerPhase.EXITED, WorkerPhase.OVER):
        book.ignore(run, "WorkerExited", event.attempt, f"worker {worker.number} is {worker.phase}")
        return
    worker.move(WorkerTrigger.EXIT)
    code = event.reason.code if event.reason else None
    worker.exit_code, worker.signal = event.exit_code, event.signal
    worker.reason = reason_json(event.reason) if event.reason else None
    worker.message = event.message[-MESSAGE_LENGTH:]
    worker.is_lost = code in (Code.WORKER_LOST, Code.NODE_LOST)
    if worker.is_cut_off and worker.has_failed:  # its node stopped it, the program is not to blame
        worker.is_lost = True
        worker.reason = reason_json(because(Code.NODE_LOST, node=worker.node))
    worker.has_started = worker.has_started or code not in (Code.START_REFUSED, Code.GPU_BUSY)
    book.mark(run)
    _tell_start_failed(book, run, worker)
    started(book, run)
    _member_failed(book, run, worker)
    if worker.is_over and run.has_attempt:
        worker_over(book, run, worker)


def on_released(book: Book, event: WorkerReleased) -> None:
    """No process of a worker holds a card."""
    found = _addressed(book, event)
    if found is None:
        return
    run, worker = found
    if worker.phase in (WorkerPhase.RELEASED, WorkerPhase.OVER):
        book.ignore(run, "WorkerReleased", event.attempt, f"worker {worker.number} is {worker.phase}")
        return
    worker.move(WorkerTrigger.RELEASE)
    book.mark(run)
    if worker.is_over:
        worker_over(book, run, worker)


def on_refused(book: Book, event: CommandRefused) -> None:
    """A node did not carry out a command. Refusals of anything but the newest command to a worker are history."""
    run = book.jobs.get(event.job_id)
    if run is None or not run.has_attempt:
        return
    _, _, rest = event.command_id.partition(f"{event.node}.")
    number, _, verb = rest.partition(".")
    if not number.isdigit():
        return
    refused = [
        worker
        for worker in list(run.workers)
        if worker.node == event.node
        and (worker.launch if verb == "LaunchWorkers" else worker.stop) == int(number)
        and (not event.workers or worker.number in event.workers)
    ]
    if event.reason.code is Code.NOT_RECONCILED and refused:
        node = book.node(event.node)
        if node is not None and node.epoch == event.epoch:
            reconcile(book, node)
    for worker in refused:
        if not run.has_attempt:
            return
        if verb == "LaunchWorkers":
            _launch_refused(book, run, worker, event.reason)
        else:
            _stop_refused(book, run, worker, event.reason)


def _launch_refused(book: Book, run: JobRun, worker: Worker, reason: Reason) -> None:
    if worker.phase is not WorkerPhase.LAUNCHING:
        return
    worker.move(WorkerTrigger.REFUSE)
    book.mark(run)
    if run.stop is not None or worker.leaves is not None:
        worker.move(WorkerTrigger.LOSE)
        worker_over(book, run, worker)
    elif reason.code in (Code.EXPIRED, Code.NOT_RECONCILED, Code.WRONG_EPOCH):
        worker.launch_again_at = book.after(ASK_AGAIN_SECONDS if reason.code is not Code.WRONG_EPOCH else 60)
        book.wake(run, worker.launch_again_at)
    else:
        worker.move(WorkerTrigger.LOSE)
        worker.reason = reason_json(reason)
        _tell_start_failed(book, run, worker)
        _member_failed(book, run, worker)
        if run.has_attempt:
            worker_over(book, run, worker)


def _stop_refused(book: Book, run: JobRun, worker: Worker, reason: Reason) -> None:
    if not worker.is_live:
        return
    if reason.code in (Code.UNKNOWN_WORKER, Code.OLD_FENCE):
        worker.move(WorkerTrigger.LOSE)
        worker.is_lost = worker.has_started
        worker_over(book, run, worker)
    elif reason.code in (Code.EXPIRED, Code.NOT_RECONCILED):
        worker.stop_again_at = book.after(ASK_AGAIN_SECONDS)
        book.wake(run, worker.stop_again_at)
        book.mark(run)


def _tell_start_failed(book: Book, run: JobRun, worker: Worker) -> None:
    reason = Reason.model_validate(worker.reason) if worker.reason else None
    if reason is not None and reason.code is Code.START_REFUSED and is_node_fault(reason):
        told = StartFailed(
            job_id=run.job_id, attempt=run.attempt, node=worker.node, worker=worker.number, reason=reason
        )
        book.emit(run, told)


def _member_failed(book: Book, run: JobRun, worker: Worker) -> None:
    """A gang that lost a member by failure is stopped; independent workers go on."""
    spec = book.specs.get(run.job_id)
    if not worker.has_failed or worker.leaves is not None or run.stop is not None or spec is None or not spec.gang:
        return
    cause = Reason.model_validate(worker.reason) if worker.reason else _program_failed(worker)
    stop(book, run, StopKind.FAULT if is_node_fault(cause) else StopKind.FAILURE, cause)


def _program_failed(worker: Worker) -> Reason:
    return because(
        Code.PROGRAM_FAILED,
        worker=worker.number,
        node=worker.node,
        exit_code=worker.exit_code,
        signal=worker.signal,
    )


def _addressed(book: Book, event: WorkerStarted | WorkerExited | WorkerReleased) -> tuple[JobRun, Worker] | None:
    """The live worker that a report is about; None, and noted, where it is late."""
    run = book.jobs.get(event.job_id)
    if run is None:
        return None
    worker = run.worker(event.worker) if run.has_attempt and event.attempt == run.attempt else None
    if worker is None or worker.fence != event.fence or worker.node != event.node:
        why = f"attempt {event.attempt} is settled" if worker is None else f"fence {event.fence} is not the newest"
        book.ignore(run, type(event).__name__, event.attempt, why)
        return None
    return run, worker
