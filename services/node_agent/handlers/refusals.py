"""Saying no to a command."""

from __future__ import annotations

from berth.contracts.commands import LaunchWorkers, ReconcileNode, StopWorkers
from berth.contracts.envelope import Envelope
from berth.contracts.events import CommandRefused
from berth.contracts.reasons import Reason
from berth.telemetry.logs import get_logger
from services.node_agent.deps import Deps
from services.node_agent.node import Node

log = get_logger("node_agent")


def refuse(
    event: Envelope[LaunchWorkers] | Envelope[StopWorkers] | Envelope[ReconcileNode],
    node: Node,
    reason: Reason,
    deps: Deps,
    *,
    trace: str,
) -> None:
    """Tell that `event` was not carried out, and why."""
    order = event.data
    job_id, attempt, fence, workers = "", 0, 0, tuple[int, ...]()
    if isinstance(order, LaunchWorkers):
        workers = tuple(plan.worker for plan in order.workers)
        node.note_refused(event.id, order.expires_at.timestamp(), reason)
    elif isinstance(order, StopWorkers):
        workers = order.workers or ()
    if not isinstance(order, ReconcileNode):
        job_id, attempt, fence = order.job_id, order.attempt, order.fence
    log.warning("command refused", command=event.id, node=node.name, code=str(reason.code), job=job_id)
    if deps.metrics is not None:
        deps.metrics.refused.labels(str(reason.code)).inc()
    deps.reporter.tell(
        CommandRefused(
            command_id=event.id,
            command=order.VERB,
            node=node.name,
            epoch=node.view.epoch,
            job_id=job_id,
            attempt=attempt,
            fence=fence,
            workers=workers,
            reason=reason,
        ),
        entity=job_id or node.name,
        event_id=f"{event.id}.CommandRefused",
        time=deps.clock.now(),
        tenant=event.tenant,
        correlation=event.correlationid,
        cause=event.id,
        trace=trace,
    )
