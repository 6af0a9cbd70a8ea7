"""What becomes of the work on a node that registers, falls silent, is heard again, is lost, or loses a card."""

from __future__ import annotations

from berth.contracts.commands import KeptWorker, ReconcileNode
from berth.contracts.events import (
    GpuOut,
    JobRerunRequested,
    JobRunning,
    JobUnknown,
    NodeBack,
    NodeLost,
    NodeRegistered,
    NodeSuspect,
)
from berth.contracts.jobs import JobSpec, JobState
from berth.contracts.nodes import WorkerReport
from berth.contracts.reasons import Code, Reason, because
from berth.decisions.lifecycle.attempts import (
    dismiss,
    end_if_over,
    launch,
    move,
    reason_json,
    send_stops,
    started,
    stop,
    worker_over,
)
from berth.decisions.lifecycle.book import Book
from berth.decisions.lifecycle.model import JobRun, Node, StopKind, Worker
from berth.decisions.lifecycle.states import JobTrigger, WorkerPhase, WorkerTrigger

RECONCILE_EXPIRES_SECONDS = 60


def on_registered(book: Book, event: NodeRegistered) -> None:
    """Take up a node's new session: what it reports and what we know decide which workers go on, start or are gone.

    The answer is a `ReconcileNode`, the first command of the epoch, then the launches and stops not done yet.
    """
    node = book.nodes.setdefault(event.node, Node(event.node))
    if event.epoch <= node.epoch:
        return
    node.epoch, node.address = event.epoch, event.description.address
    node.is_silent = node.is_lost = False
    book.mark_node(node)
    reported = {(r.job_id, r.fence, r.worker): r for r in event.workers}
    runs = book.runs_on(event.node)
    gone = {run.job_id: _compare(book, run, node, reported) for run in runs}
    reconcile(book, node)
    for run in runs:
        started(book, run)
        launch(book, run, [w for w in run.workers if w.node == node.node and w.phase is WorkerPhase.ASSIGNED])
        told = [w for w in run.workers if w.node == node.node and w.is_live and w.stop_again_at is not None]
        if told:
            send_stops(book, run, told)
        if not any(book.nodes[w.node].is_lost for w in run.workers if not w.is_over and w.node in book.nodes):
            run.grace_until = None
        _heard(book, run)
        _gone(book, run, gone[run.job_id])


def _compare(book: Book, run: JobRun, node: Node, reported: dict[tuple[str, int, int], WorkerReport]) -> list[Worker]:
    """Move the job's workers on the node to what its report says; returns those that are over by it."""
    over = []
    for worker in run.workers:
        if worker.node != node.node or worker.is_over:
            continue
        report = reported.get((run.job_id, worker.fence, worker.number))
        if report is not None:
            worker.is_cut_off = worker.is_cut_off and report.state != "running"
            if report.state == "running" and worker.phase in (WorkerPhase.ASSIGNED, WorkerPhase.LAUNCHING):
                worker.move(WorkerTrigger.START)
                worker.has_started = True
        elif worker.phase is WorkerPhase.LAUNCHING and run.stop is None and worker.leaves is None:
            worker.move(WorkerTrigger.REFUSE)
        elif worker.phase is WorkerPhase.EXITED:
            worker.move(WorkerTrigger.RELEASE)
            over.append(worker)
        elif worker.phase is not WorkerPhase.ASSIGNED:
            _lose(worker, because(Code.WORKER_LOST, worker=worker.number, node=node.node))
            over.append(worker)
    book.mark(run)
    return over


def reconcile(book: Book, node: Node) -> None:
    """Tell the node which workers go on; it stops all else."""
    keep = tuple(
        KeptWorker(job_id=run.job_id, attempt=run.attempt, fence=worker.fence, worker=worker.number)
        for run in book.runs_on(node.node)
        for worker in run.workers
        if worker.node == node.node and not worker.is_over
    )
    expires_at = book.after(RECONCILE_EXPIRES_SECONDS)
    book.order(node, ReconcileNode(node=node.node, epoch=node.epoch, expires_at=expires_at, keep=keep))


def on_suspect(book: Book, event: NodeSuspect) -> None:
    """Nobody knows how the jobs on the node fare; they stay as they are."""
    node = book.nodes.setdefault(event.node, Node(event.node))
    if event.epoch < node.epoch or node.is_lost:
        return
    node.is_silent = True
    book.mark_node(node)
    for run in book.runs_on(event.node):
        if run.state is JobState.RUNNING:
            move(run, JobTrigger.NODE_SILENT)
            book.emit(run, JobUnknown(job_id=run.job_id, attempt=run.attempt, node=event.node))


def on_back(book: Book, event: NodeBack) -> None:
    """The node is heard again in its old session."""
    node = book.nodes.get(event.node)
    if node is None or event.epoch < node.epoch or node.is_lost:
        return
    node.is_silent = False
    book.mark_node(node)
    for run in book.runs_on(event.node):
        _heard(book, run)


def on_lost(book: Book, event: NodeLost) -> None:
    """The node has certainly stopped its work: its workers are over, the rest of their gangs is stopped."""
    node = book.nodes.setdefault(event.node, Node(event.node, epoch=event.epoch))
    if event.epoch < node.epoch or node.is_lost:
        return
    node.is_silent = node.is_lost = True
    book.mark_node(node)
    for run in book.runs_on(event.node):
        if not _kept_for_grace(book, run, event.node):
            lost_on(book, run, event.node)


def _kept_for_grace(book: Book, run: JobRun, node: str) -> bool:
    """Whether the gang keeps its room for a while, in case the node comes back; the rest of it stays as it is."""
    spec = book.specs.get(run.job_id)
    grace = book.settings(run.job_id).recovery.gang_grace
    if spec is None or not grace or not spec.gang or len(run.workers) < 2 or run.stop is not None:
        return False
    if run.state is JobState.RUNNING:
        move(run, JobTrigger.NODE_SILENT)
        book.emit(run, JobUnknown(job_id=run.job_id, attempt=run.attempt, node=node))
    if run.state is not JobState.UNKNOWN or _may_shrink(run, spec, without=node):
        return False
    for worker in run.workers:
        worker.is_cut_off = worker.is_cut_off or worker.node == node
    if run.grace_until is None:
        run.grace_until = book.after(grace)
        book.wake(run, run.grace_until)
    book.mark(run)
    return True


def _may_shrink(run: JobRun, spec: JobSpec, *, without: str) -> bool:
    """Whether an elastic gang has enough workers left to go on."""
    left = [worker for worker in run.workers if worker.node != without and not worker.is_over]
    return spec.min_workers is not None and len(left) >= spec.min_workers


def grace_over(book: Book, run: JobRun) -> None:
    """The gang was short of a worker for too long: what is left of it is stopped, and it competes again."""
    run.grace_until = None
    for name in sorted({w.node for w in run.workers if (n := book.node(w.node)) is not None and n.is_lost}):
        lost_on(book, run, name)


def rerun(book: Book, event: JobRerunRequested) -> None:
    """Somebody wants all workers again: the attempt is stopped, at no charge, and the job competes as a whole."""
    run = book.jobs.get(event.job_id)
    if run is None or not run.has_attempt:
        return
    stop(book, run, StopKind.FAULT, because(Code.WORKER_LOST, rerun_by=event.requested_by), by=event.requested_by)
    for name in sorted({w.node for w in run.workers if (n := book.node(w.node)) is not None and n.is_lost}):
        lost_on(book, run, name)


def lost_on(book: Book, run: JobRun, node: str) -> None:
    """All workers of the job on a lost node are over."""
    over = [worker for worker in run.workers if worker.node == node and not worker.is_over]
    for worker in over:
        _lose(worker, because(Code.NODE_LOST, node=node))
    _gone(book, run, over)


def never_started(book: Book, run: JobRun, worker: Worker) -> None:
    """A worker that was placed and is not wanted any more, before any launch was sent."""
    worker.move(WorkerTrigger.LOSE)
    worker_over(book, run, worker)


def on_gpu_out(book: Book, event: GpuOut) -> None:
    """A card left the pool: whoever uses it is moved, at no charge."""
    for run in book.runs_on(event.node):
        hit = [w for w in run.workers if w.node == event.node and event.gpu in w.gpus and not w.is_over]
        spec = book.specs.get(run.job_id)
        if not hit or spec is None or not run.has_attempt or run.stop is not None:
            continue
        cause = because(Code.GPU_FAULT, **{**event.reason.facts, "node": event.node, "gpu": event.index})
        if spec.gang:
            stop(book, run, StopKind.FAULT, cause)
        else:
            dismiss(book, run, hit, cause, by="", grace_seconds=book.grace_seconds(run.job_id))


def _lose(worker: Worker, cause: Reason) -> None:
    if worker.phase is WorkerPhase.EXITED:
        # its end is told, only its release is not: the card is as gone as the rest of the node
        worker.move(WorkerTrigger.LOSE)
        return
    worker.is_lost = True
    worker.reason = reason_json(cause)
    worker.move(WorkerTrigger.LOSE)


def _gone(book: Book, run: JobRun, over: list[Worker]) -> None:
    """Draw what follows from workers that a node no longer has."""
    if not over or not run.has_attempt:
        return
    spec = book.specs.get(run.job_id)
    lost = next((worker for worker in over if worker.is_lost and worker.leaves is None), None)
    if lost is not None and spec is not None and run.stop is None and _may_shrink(run, spec, without=lost.node):
        for worker in over:
            worker.leaves = worker.reason  # an elastic gang goes on without them
    elif lost is not None and spec is not None and spec.gang and run.stop is None:
        stop(book, run, StopKind.FAULT, Reason.model_validate(lost.reason))
    for worker in over:
        if run.has_attempt and run.worker(worker.number) is worker:
            worker_over(book, run, worker)
    end_if_over(book, run)


def _heard(book: Book, run: JobRun) -> None:
    if run.state is not JobState.UNKNOWN or run.running_since is None:
        return
    if any(book.nodes[w.node].is_silent for w in run.workers if not w.is_over and w.node in book.nodes):
        return
    move(run, JobTrigger.NODE_HEARD)
    book.emit(run, JobRunning(job_id=run.job_id, attempt=run.attempt, started_at=run.running_since))
