"""Who holds what: the allocation ledger. GPUs and quota move together here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from berth.contracts.requests import Holding, LedgerAnswer
from berth.decisions.placement.fleet import Fleet
from berth.decisions.placement.jobs import Held, Job
from berth.decisions.quota.book import QuotaBook

if TYPE_CHECKING:
    from berth.decisions.placement.claim import Amount


class Ledger:
    """The fleet's cards and the tenants' quota, taken and given back in one step."""

    def __init__(self) -> None:
        """Everything free."""
        self.fleet = Fleet()
        self.quota = QuotaBook()
        self.placed: dict[str, Job] = {}
        self.dirty_types: set[str] = set()

    def take(self, job: Job, held: Iterable[Held]) -> None:
        """Give cards and quota to a job.

        Raises:
            ValueError: a card is somebody else's.
        """
        for entry in held:
            self.fleet.take(entry.node, entry.gpus, job.id)
            self.quota.use(job.claim.tenant, entry.card_type, entry.amount)
            job.held.append(entry)
        self.placed[job.id] = job

    def release(self, job: Job, workers: Iterable[int] | None = None) -> Amount:
        """Take everything (or what these workers hold) back; returns the GPUs that came free. Once only."""
        chosen = set(workers) if workers is not None else None
        kept: list[Held] = []
        freed: Amount = 0
        for entry in job.held:
            if chosen is not None and entry.worker not in chosen:
                kept.append(entry)
                continue
            self.fleet.release(entry.node, entry.gpus, job.id)
            self.quota.use(job.claim.tenant, entry.card_type, -entry.amount)
            self.dirty_types.add(entry.card_type)
            freed += entry.amount
        job.held = kept
        if not kept:
            self.placed.pop(job.id, None)
        return freed

    def answer(self, node_name: str | None, state_version: int) -> LedgerAnswer:
        """Which cards are held, by whom; `node_name` None: on all nodes."""
        holdings = [
            Holding(
                node=held.node,
                gpu=gpu,
                job_id=job.id,
                attempt=job.attempt,
                fence=job.fence,
                worker=held.worker,
                tenant=job.claim.tenant,
            )
            for job in self.placed.values()
            for held in job.held
            if node_name is None or held.node == node_name
            for gpu in held.gpus
        ]
        holdings.sort(key=lambda holding: (holding.node, holding.gpu, holding.job_id))
        return LedgerAnswer(holdings=tuple(holdings), state_version=state_version)
