"""`ReconcileNode`: the first command of a session says what may go on."""

from __future__ import annotations

from berth.contracts.commands import ReconcileNode
from berth.contracts.envelope import Envelope
from berth.telemetry.logs import get_logger
from services.node_agent.deps import Deps
from services.node_agent.handlers.refusals import refuse
from services.node_agent.handlers.stop import stop_worker
from services.node_agent.node import Node
from services.node_agent.rules import refuse_session
from services.node_agent.workers import NOT_KEPT

log = get_logger("node_agent")


def on_reconcile_node(event: Envelope[ReconcileNode], node: Node, deps: Deps, trace: str) -> None:
    """Stop what the platform does not count on any more; from now on launches are taken.

    Only the first of a session, and only of what was there when it began: one that comes again (the bus forgets
    acknowledgements when it is killed) does not know of what was launched since.
    """
    order = event.data
    if reason := refuse_session(node.view, order, deps.clock.now()):
        refuse(event, node, reason, deps, trace=trace)
        return
    if node.view.is_reconciled:
        return
    kept = {(keep.job_id, keep.attempt, keep.worker, keep.fence) for keep in order.keep}
    stopped = 0
    for worker in node.live():
        named = (worker.job_id, worker.attempt, worker.worker, worker.fence)
        if worker.is_live and worker.epoch != order.epoch and named not in kept:
            stopped += 1
            grace = min(worker.grace_seconds, deps.settings.lease_grace_seconds)
            stop_worker(node, worker, deps, grace_seconds=grace, reason=NOT_KEPT)
    node.view.is_reconciled = True
    log.info("reconciled", node=node.name, epoch=order.epoch, kept=len(kept), stopped=stopped)
