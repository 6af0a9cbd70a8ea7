"""The smallest placement that is honest: whole cards, first fit, one writer. For tests of everything around it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from berth.contracts.envelope import Envelope, Fact
from berth.contracts.events import (
    AllocationReleased,
    Assignment,
    AttemptEnded,
    JobAdmitted,
    JobCancelled,
    JobCancelRequested,
    JobPlaced,
    JobRequeued,
    NodeChanged,
)
from berth.contracts.jobs import JobSpec
from berth.contracts.nodes import GpuHealthState, NodeState
from berth.decisions.core import Core, Outbox, Settled


@dataclass
class Waiting:
    spec: JobSpec
    attempt: int = 0
    not_before: datetime | None = None
    is_waiting: bool = True


@dataclass
class FirstFit(Core):
    """Keeps its whole state in memory; it is never restarted."""

    NAME: ClassVar[str] = "placement"
    CONSUMES: ClassVar[tuple[type[Fact], ...]] = (
        JobAdmitted,
        JobRequeued,
        AttemptEnded,
        NodeChanged,
        JobCancelRequested,
    )
    jobs: dict[str, Waiting] = field(default_factory=dict)
    nodes: dict[str, NodeChanged] = field(default_factory=dict)
    held: dict[tuple[str, str], str] = field(default_factory=dict)
    cancels: dict[str, str] = field(default_factory=dict)
    released: list[tuple[str, int]] = field(default_factory=list)
    fence: int = 0
    now: datetime | None = None
    out: Outbox = field(default_factory=Outbox)

    def apply(self, event: Envelope[Any], *, now: datetime) -> None:
        data = event.data
        if isinstance(data, JobAdmitted):
            self.jobs.setdefault(data.job_id, Waiting(data.spec))
        elif isinstance(data, NodeChanged):
            self.nodes[data.node] = data
        elif isinstance(data, JobCancelRequested):
            self.cancels.setdefault(data.job_id, data.requested_by)
        elif isinstance(data, JobRequeued):
            job = self.jobs[data.job_id]
            job.is_waiting, job.not_before = True, data.not_before
        elif isinstance(data, AttemptEnded) and data.workers is None:
            self.held = {card: job for card, job in self.held.items() if job != data.job_id}
            self.released.append((data.job_id, data.attempt))
            self._tell(AllocationReleased(job_id=data.job_id, attempt=data.attempt, fence=data.fence))

    def settle(self, *, now: datetime) -> Settled:
        self.now = now
        for job_id, job in sorted(self.jobs.items()):
            if not job.is_waiting:
                continue
            if job_id in self.cancels:
                job.is_waiting = False
                self._tell(JobCancelled(job_id=job_id, requested_by=self.cancels[job_id], ended_at=now))
            elif job.not_before is None or job.not_before <= now:
                self._place(job_id, job)
        return Settled(self.out.drain())

    def _place(self, job_id: str, job: Waiting) -> None:
        free = [
            (node.node, gpu.uuid)
            for node in self.nodes.values()
            for gpu in node.gpus
            if node.state is NodeState.READY
            and gpu.health is GpuHealthState.HEALTHY
            and (node.node, gpu.uuid) not in self.held
        ]
        each, assignments = job.spec.whole_gpus_per_worker, []
        for worker in range(job.spec.total_workers):
            names = sorted({node for node, _ in free})
            mine = next((c for n in names if len(c := [x for x in free if x[0] == n]) >= each), None)
            if mine is None:
                return
            chosen = mine[:each]
            free = [card for card in free if card not in chosen]
            assignments.append(Assignment(worker=worker, node=chosen[0][0], gpus=tuple(gpu for _, gpu in chosen)))
        self.fence += 1
        job.attempt += 1
        job.is_waiting = False
        self.held |= {(a.node, gpu): job_id for a in assignments for gpu in a.gpus}
        self._tell(JobPlaced(job_id=job_id, attempt=job.attempt, fence=self.fence, assignments=tuple(assignments)))

    def _tell(self, fact: Any) -> None:
        self.out.emit(fact, fact.job_id)

    def next_timer(self) -> datetime | None:
        times = [j.not_before for j in self.jobs.values() if j.is_waiting and j.not_before is not None]
        return min((time for time in times if self.now is None or time > self.now), default=None)

    def restore(self, records: Iterable[tuple[str, str, Any]], *, now: datetime) -> None:
        raise NotImplementedError

    @property
    def policy_version(self) -> int:
        return 0
