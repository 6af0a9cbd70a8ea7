"""What a node accepts: the last line of defence against running anything twice.

Pure functions over a node's view. Each returns None to accept, or the reason to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from berth.contracts.commands import LaunchWorkers, ReconcileNode, StopWorkers
from berth.contracts.reasons import Code, Reason, because
from services.node_agent.workers import Worker

WHOLE_CARD_MILLI = 1000

Ordered = LaunchWorkers | StopWorkers | ReconcileNode


@dataclass(slots=True)
class GpuFence:
    """Newest fences a card has seen: of whoever had it alone, and of whoever had any of it."""

    exclusive: int = 0
    any: int = 0


@dataclass(slots=True)
class NodeView:
    """What judging needs to know of a node."""

    name: str
    epoch: int = 0
    """0: no session."""
    is_reconciled: bool = False
    gpu_uuids: frozenset[str] = frozenset()
    job_fences: dict[str, int] = field(default_factory=dict)
    """Job -> newest fence of a launch that was accepted."""
    stopped_fences: dict[str, int] = field(default_factory=dict)
    """Job -> newest fence that was told to stop, whether it was known or not: it may not start any more."""
    gpu_fences: dict[str, GpuFence] = field(default_factory=dict)

    def remember_launch(self, order: LaunchWorkers) -> None:
        """Note the fences of an accepted launch."""
        self.job_fences[order.job_id] = max(order.fence, self.job_fences.get(order.job_id, 0))
        for plan in order.workers:
            for gpu in plan.gpus:
                self.remember_gpu(gpu, order.fence, is_exclusive=plan.gpu_milli >= WHOLE_CARD_MILLI)

    def remember_gpu(self, gpu: str, fence: int, *, is_exclusive: bool) -> None:
        seen = self.gpu_fences.setdefault(gpu, GpuFence())
        seen.any = max(seen.any, fence)
        if is_exclusive:
            seen.exclusive = max(seen.exclusive, fence)


def refuse_session(node: NodeView, order: Ordered, now: datetime) -> Reason | None:
    """Whether `order` belongs to the session the node is in. `now` is the platform's clock, never the node's own."""
    if order.epoch != node.epoch:
        return because(Code.WRONG_EPOCH, epoch=order.epoch, current=node.epoch)
    if now >= order.expires_at:
        return because(Code.EXPIRED, expired_at=order.expires_at.isoformat(), late_seconds=_late(order, now))
    return None


def refuse_launch(
    node: NodeView, order: LaunchWorkers, now: datetime, *, live: Iterable[Worker], unclean: Mapping[str, int]
) -> Reason | None:
    """Whether these workers may start now.

    Args:
        live: workers that may hold cards.
        unclean: card -> MiB in use by nobody known.
    """
    if reason := refuse_session(node, order, now):
        return reason
    if not node.is_reconciled:
        return because(Code.NOT_RECONCILED, epoch=node.epoch)
    newest = node.job_fences.get(order.job_id, 0)
    if order.fence < newest:
        return because(Code.OLD_FENCE, fence=order.fence, newest=newest)
    if order.fence <= node.stopped_fences.get(order.job_id, -1):
        return because(Code.OLD_FENCE, fence=order.fence, stopped=node.stopped_fences[order.job_id])
    wanted = {gpu: plan.gpu_milli >= WHOLE_CARD_MILLI for plan in order.workers for gpu in plan.gpus}
    return _refuse_cards(node, order, wanted) or _refuse_busy(order, wanted, live, unclean)


def _refuse_cards(node: NodeView, order: LaunchWorkers, wanted: Mapping[str, bool]) -> Reason | None:
    for gpu, is_exclusive in wanted.items():
        if gpu not in node.gpu_uuids:
            return because(Code.UNSUPPORTED, gpu=gpu, error="no such card on this node")
        seen = node.gpu_fences.get(gpu)
        newest = 0 if seen is None else (seen.any if is_exclusive else seen.exclusive)
        if order.fence < newest:
            return because(Code.OLD_FENCE, gpu=gpu, fence=order.fence, newest=newest)
    return None


def _refuse_busy(
    order: LaunchWorkers, wanted: Mapping[str, bool], live: Iterable[Worker], unclean: Mapping[str, int]
) -> Reason | None:
    for worker in live:
        for gpu in worker.gpus:
            if gpu in wanted and (wanted[gpu] or worker.is_exclusive):
                return because(Code.GPU_BUSY, gpu=gpu, held_by=worker.job_id, attempt=worker.attempt)
    for gpu in wanted:
        if gpu in unclean:
            return because(Code.GPU_BUSY, gpu=gpu, memory_used_mib=unclean[gpu])
    return None


def _late(order: Ordered, now: datetime) -> float:
    return round((now - order.expires_at).total_seconds(), 3)
