"""What a turn looks at: ledger, policy and clock, and what earlier turns of the same pass have laid claim to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime

from berth.contracts.base import JobClass
from berth.decisions.placement.claim import Amount, Claim
from berth.decisions.placement.fleet import Ints
from berth.decisions.placement.jobs import MICROSECONDS, Held, Job, micros
from berth.decisions.placement.ledger import Ledger
from berth.decisions.policy.document import Policy
from berth.decisions.queueing.waiting import WaitingSet
from berth.decisions.quota.keep import Keep, Keeper

ENDLESS = 1 << 62
"""The end of work without a time limit."""


@dataclass(slots=True)
class Shadow:
    """A planned start: from `start` (microseconds) on the job needs room, `spare` is what others may hold then by row."""

    job_id: str
    start: int
    spare: Ints


@dataclass(slots=True)
class Plan:
    """Room that is being made for a job. held: where it will run (empty for parts of cards); victims: who leaves for it,
    with the workers concerned (None: all). needs: GPUs by card type."""

    job_id: str
    tenant: str
    job_class: JobClass
    held: list[Held]
    needs: dict[str, Amount]
    victims: dict[str, tuple[int, ...] | None]
    attempts: dict[str, int]


@dataclass(slots=True)
class Scene:
    """One pass's view. shadows: planned starts by card type. heads: who may not be overtaken (strict), by card type and,
    where only the tenant's own limit is in the way, by card type and tenant."""

    books: Ledger
    policy: Policy
    keeper: Keeper
    waiting: WaitingSet
    plans: dict[str, Plan]
    now: datetime
    shadows: dict[str, list[Shadow]] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    tenant_heads: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def micros(self) -> int:
        """The clock, in microseconds."""
        return micros(self.now)

    def ends(self, claim: Claim) -> int:
        """When a job that started now would be over at the latest."""
        return ENDLESS if claim.time_limit is None else self.micros + claim.time_limit * MICROSECONDS

    def end_of(self, job: Job) -> int:
        """When a running job is over at the latest; one that was told to stop: now."""
        if job.is_leaving:
            return self.micros
        if job.claim.time_limit is None:
            return ENDLESS
        return max(job.since + job.claim.time_limit * MICROSECONDS, self.micros)

    def running(self, card_type: str) -> Iterable[Job]:
        """Jobs that hold cards of a type."""
        for members in self.books.crews.get(card_type, {}).values():
            yield from members.values()

    def unfilled(self, keep: Keep, card_type: str) -> Amount:
        """How much of what is kept its owners do not have (or have promised) yet."""
        have = self.books.held_by(card_type, tenant=keep.tenant, job_class=keep.job_class)
        for plan in self.plans.values():
            if keep.covers(plan.tenant, plan.job_class):
                have += plan.needs.get(card_type, 0)
        left = max(keep.reserved - have, 0)
        return min(left, self.wanted(keep, card_type)) if keep.lends else left

    def wanted(self, keep: Keep, card_type: str) -> Amount:
        """GPUs of a card type that waiting owners ask for."""
        total: Amount = 0
        for shape, groups in self.waiting.shapes(card_type):
            for claim, group in groups.items():
                if keep.covers(claim.tenant, claim.job_class):
                    total += shape.gpus * len(group.jobs)
        return total

    def kept_from(self, claim: Claim, card_type: str) -> list[tuple[Keep, Amount]]:
        """What must stay free of a card type when this job starts, by whom it is kept for (the most for each owner)."""
        most: dict[tuple[object, object], tuple[Keep, Amount]] = {}
        for keep in self.keeper.active(card_type, self.now):
            if not keep.covers(claim.tenant, claim.job_class):
                left = self.unfilled(keep, card_type)
                owner = (keep.job_class, keep.tenant)
                if left and (owner not in most or most[owner][1] < left):
                    most[owner] = (keep, left)
        return list(most.values())
