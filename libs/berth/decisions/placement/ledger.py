"""Who holds what: the allocation ledger. GPUs and quota move together here and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from berth.contracts.base import JobClass
from berth.contracts.requests import Holding, LedgerAnswer
from berth.decisions.placement.claim import Amount
from berth.decisions.placement.fleet import Fleet
from berth.decisions.placement.jobs import ALL, Held, Job
from berth.decisions.quota.book import QuotaBook

Crew = tuple[str, JobClass, int]
"""Tenant, class and priority: running jobs are kept by it, so that victims are found without looking at all."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Some workers of a job, looked at as if they were gone. workers None: all."""

    job: Job
    workers: frozenset[int] | None = None


class Ledger:
    """The fleet's cards and the tenants' quota, taken and given back in one step."""

    def __init__(self) -> None:
        """Everything free."""
        self.fleet = Fleet()
        self.quota = QuotaBook()
        self.placed: dict[str, Job] = {}
        self.crews: dict[str, dict[Crew, dict[str, Job]]] = {}
        self.class_held: dict[tuple[str, str, JobClass], Amount] = {}
        self.dirty_types: set[str] = set()
        self.dirty_tenants: dict[str, None] = {}
        self.held_for: dict[str, str] = {}
        """Cards kept for a job that others make room for: UUID -> that job."""
        self.promised: dict[str, int] = {}
        """How many of these there are, by card type."""
        self.on_hold: dict[str, int] = {}
        """Of those the ones that nobody holds any more, by card type."""

    # ---------------------------------------------------------------------------------------------- take and release
    def take(self, job: Job, held: Iterable[Held]) -> None:
        """Give cards and quota to a job.

        Raises:
            ValueError: a card is somebody else's.
        """
        for entry in held:
            self._take_cards(job, entry)
            self._count(job, entry, 1)
            job.held.append(entry)
            self.dirty_types.add(entry.card_type)
        self.placed[job.id] = job
        self.dirty_tenants[job.claim.tenant] = None

    def _take_cards(self, job: Job, entry: Held) -> None:
        if entry.part is not None:
            self.fleet.take_part(entry.node, entry.gpus[0], f"{job.id}/{entry.worker}", entry.part)
        else:
            self.fleet.take(entry.node, entry.gpus, job.id)

    def _free_cards(self, job: Job, entry: Held) -> None:
        if entry.part is not None:
            self.fleet.release_part(entry.node, entry.gpus[0], f"{job.id}/{entry.worker}")
        else:
            self.fleet.release(entry.node, entry.gpus, job.id)

    def _count(self, job: Job, entry: Held, sign: int) -> None:
        amount = entry.amount * sign
        claim = job.claim
        standing = self.quota.of(claim.tenant, entry.card_type)
        standing.used += amount
        self.quota.changed()
        if job.leaves(entry.worker):
            standing.leaving += amount
        self.quota.use_memory(claim.tenant, entry.memory_mib * sign)
        key = (entry.card_type, claim.tenant, claim.job_class)
        self.class_held[key] = self.class_held.get(key, 0) + amount
        crews = self.crews.setdefault(entry.card_type, {})
        crew = (claim.tenant, claim.job_class, claim.priority)
        if sign > 0:
            crews.setdefault(crew, {})[job.id] = job

    def _leave_crews(self, job: Job, card_type: str) -> None:
        crews = self.crews.get(card_type, {})
        crew = (job.claim.tenant, job.claim.job_class, job.claim.priority)
        members = crews.get(crew)
        if members is not None:
            members.pop(job.id, None)
            if not members:
                del crews[crew]

    def release(self, job: Job, workers: Iterable[int] | None = None) -> Amount:
        """Take everything (or what these workers hold) back; returns the GPUs that came free. Once only.

        Cards that are kept for another job go to it, not to the free ones.
        """
        chosen = set(workers) if workers is not None else None
        kept: list[Held] = []
        freed: Amount = 0
        gone_types: set[str] = set()
        for entry in job.held:
            if chosen is not None and entry.worker not in chosen:
                kept.append(entry)
                continue
            self._free_cards(job, entry)
            self._count(job, entry, -1)
            self._keep_promises(entry)
            self.dirty_types.add(entry.card_type)
            gone_types.add(entry.card_type)
            freed += entry.amount
        job.held = kept
        for card_type in gone_types - {entry.card_type for entry in kept}:
            self._leave_crews(job, card_type)
        if not kept:
            self.placed.pop(job.id, None)
        self.dirty_tenants[job.claim.tenant] = None
        return freed

    def mark_leaving(self, job: Job, workers: Iterable[int] | None) -> None:
        """Note that a job (or some of its workers) was told to stop: what it holds is coming free."""
        before = job.leaving
        after = before | ({ALL} if workers is None else set(workers))
        for entry in job.held:
            was = ALL in before or entry.worker in before
            if not was and (ALL in after or entry.worker in after):
                self.quota.of(job.claim.tenant, entry.card_type).leaving += entry.amount
                self.quota.changed()
                self.dirty_types.add(entry.card_type)
        job.leaving = frozenset(after)

    # ------------------------------------------------------------------------------------------------------- holds
    def hold(self, job_id: str, held: Iterable[Held]) -> None:
        """Keep cards for a job: free ones from now on, others as soon as they are given back."""
        for entry in held:
            for uuid in entry.gpus:
                if uuid not in self.held_for:
                    self.promised[entry.card_type] = self.promised.get(entry.card_type, 0) + 1
                self.held_for[uuid] = job_id
            self._keep_promises(entry)

    def _keep_promises(self, entry: Held) -> None:
        if not self.held_for:
            return
        node = self.fleet.nodes[entry.node]
        for uuid in entry.gpus:
            job_id = self.held_for.get(uuid)
            card = node.by_uuid.get(uuid)
            if job_id is not None and card is not None and not card.owner and not card.parts:
                self.fleet.take(entry.node, (uuid,), f"hold:{job_id}")
                self.on_hold[entry.card_type] = self.on_hold.get(entry.card_type, 0) + 1

    def unhold(self, job_id: str, held: Iterable[Held]) -> None:
        """Stop keeping cards for a job; those nobody holds are free again."""
        for entry in held:
            for uuid in entry.gpus:
                if self.held_for.get(uuid) == job_id:
                    del self.held_for[uuid]
                    self.promised[entry.card_type] -= 1
                node = self.fleet.nodes.get(entry.node)
                card = node.by_uuid.get(uuid) if node else None
                if card is not None and card.owner == f"hold:{job_id}":
                    self.fleet.release(entry.node, (uuid,), f"hold:{job_id}")
                    self.on_hold[entry.card_type] -= 1
            self.dirty_types.add(entry.card_type)

    # ------------------------------------------------------------------------------------------------------ what-if
    @contextmanager
    def without(self, taken: Sequence[Taken]) -> Iterator[None]:
        """Look at the ledger as if these were gone; everything is as before afterwards.

        Cards that are kept for some other job stay out of reach.
        """
        version = self.quota.version
        out: list[tuple[Job, Held]] = []
        for piece in taken:
            for entry in piece.job.held:
                if piece.workers is None or entry.worker in piece.workers:
                    out.append((piece.job, entry))
        for job, entry in out:
            if not any(uuid in self.held_for for uuid in entry.gpus):
                self._free_cards(job, entry)
            self._count(job, entry, -1)
        try:
            yield
        finally:
            for job, entry in reversed(out):
                if not any(uuid in self.held_for for uuid in entry.gpus):
                    self._take_cards(job, entry)
                self._count(job, entry, 1)
            self.quota.version = version

    # ----------------------------------------------------------------------------------------------------- questions
    def held_by(self, card_type: str, *, tenant: str | None = None, job_class: JobClass | None = None) -> Amount:
        """GPUs of a card type that jobs of a tenant and a class hold; None: of any."""
        return sum(
            amount
            for (kind, who, which), amount in self.class_held.items()
            if kind == card_type and tenant in (None, who) and job_class in (None, which)
        )

    def answer(self, node_name: str | None, state_version: int) -> LedgerAnswer:
        """Which cards are held, by whom; `node_name` None: on all nodes."""
        holdings = [
            Holding(
                node=held.node,
                gpu=gpu,
                job_id=job.id,
                attempt=job.attempt,
                fence=held.fence or job.fence,
                worker=held.worker,
                tenant=job.claim.tenant,
                gpu_milli=1000 if held.part is None else int(held.amount * 1000),
            )
            for job in self.placed.values()
            for held in job.held
            if node_name is None or held.node == node_name
            for gpu in held.gpus
        ]
        holdings.sort(key=lambda holding: (holding.node, holding.gpu, holding.job_id, holding.worker))
        return LedgerAnswer(holdings=tuple(holdings), state_version=state_version)
