"""`StopWorkers`: end programs, and keep those from starting that have not yet."""

from __future__ import annotations

from berth.contracts.commands import StopWorkers
from berth.contracts.envelope import Envelope
from berth.contracts.reasons import Code, because
from services.node_agent.deps import Deps
from services.node_agent.handlers.ends import tell_again
from services.node_agent.handlers.refusals import refuse
from services.node_agent.node import Node
from services.node_agent.rules import refuse_session
from services.node_agent.workers import Phase, Worker


def on_stop_workers(event: Envelope[StopWorkers], node: Node, deps: Deps, trace: str) -> None:
    """Begin to stop. A later command can only shorten the grace; what has ended is told again to who asks anew.

    An attempt nobody knows here is refused as unknown, and may not start later either: its launch may still come.
    """
    order = event.data
    if reason := refuse_session(node.view, order, deps.clock.now()):
        refuse(event, node, reason, deps, trace=trace)
        return
    if node.is_repeated(event.id, order.expires_at.timestamp()):
        return
    if order.workers is None:
        fences = node.view.stopped_fences
        fences[order.job_id] = max(order.fence, fences.get(order.job_id, 0))
    known = [
        worker
        for worker in node.workers_of_attempt(order.job_id, order.attempt)
        if order.workers is None or worker.worker in order.workers
    ]
    if not known:
        refuse(event, node, because(Code.UNKNOWN_WORKER, attempt=order.attempt), deps, trace=trace)
    for worker in known:
        stop_worker(node, worker, deps, grace_seconds=order.grace_seconds, reason=order.cause or "stopped")


def stop_worker(node: Node, worker: Worker, deps: Deps, *, grace_seconds: float, reason: str) -> None:
    """Begin to stop one worker, in whatever phase it is."""
    if worker.phase is Phase.ACCEPTED:
        before = worker.stop_grace_seconds
        worker.stop_grace_seconds = grace_seconds if before is None else min(before, grace_seconds)
        worker.stop_reason = worker.stop_reason or reason
    elif worker.phase is Phase.RUNNING:
        deps.runtime.stop(worker.key, node.name, grace_seconds=grace_seconds, reason=reason)
    else:
        tell_again(node, worker, deps)
