"""An upper bound on what could be made free for a claim, quick enough to ask for every claim in a pass."""

from __future__ import annotations

from berth.decisions.placement.claim import Amount, Claim, Unit
from berth.decisions.placement.scene import Scene
from berth.decisions.placement.turn import options


class Potential:
    """Sums over running work, made once for each card type and state of the ledger."""

    def __init__(self, scene: Scene) -> None:
        """For one pass."""
        self._scene = scene
        self._version = -1
        self._by_crew: dict[str, list[tuple[int, str, Amount]]] = {}
        self._memo: dict[tuple[str, str, str, int], Amount] = {}

    def could_do(self, claim: Claim) -> bool:
        """Whether free, leaving and preemptible cards together could be enough on some type; never no wrongly."""
        if claim.shape.unit is not Unit.WHOLE or claim.shape.mix_types:
            return True
        version = self._scene.books.quota.version
        if version != self._version:
            self._version, self._by_crew, self._memo = version, {}, {}
        shape = claim.shape
        least = shape.gpus
        if not shape.is_gang or shape.min_workers is not None:
            least = min(kind.gpus for kind in shape.kinds) * (shape.min_workers or 1)
        for card_type in options(shape, self._scene.books.fleet, self._scene.policy):
            pool = self._scene.books.fleet.pools.get(card_type)
            if pool is None or pool.free_total + self._room(claim, card_type) < least:
                continue
            ceiling = self._scene.books.quota.ceiling(claim.tenant, card_type)
            if ceiling is None or self._stays(claim, card_type) + least <= ceiling:
                return True
        return False

    def _stays(self, claim: Claim, card_type: str) -> Amount:
        """What the tenant itself will go on holding whoever is stopped for the claim."""
        standing = self._scene.books.quota.of(claim.tenant, card_type)
        if self._scene.policy.for_class(claim.job_class).preemption.by_priority == "off":
            return standing.used - standing.leaving if not self._scene.policy.protection else 0
        key = (card_type, claim.tenant, "stays", claim.priority)
        known = self._memo.get(key)
        if known is None:
            lower = sum(
                amount
                for priority, tenant, amount in self._crews(card_type)
                if tenant == claim.tenant and priority < claim.priority
            )
            known = self._memo[key] = standing.used - standing.leaving - lower
        return known if not self._scene.policy.protection else 0

    def _room(self, claim: Claim, card_type: str) -> Amount:
        key = (card_type, claim.tenant, claim.job_class.value, claim.priority)
        known = self._memo.get(key)
        if known is None:
            known = self._memo[key] = self._sum(claim, card_type)
        return known

    def _sum(self, claim: Claim, card_type: str) -> Amount:
        scene = self._scene
        settings = scene.policy.for_class(claim.job_class).preemption
        books = scene.books
        leaving: Amount = sum(standing.leaving for _, _, standing in books.quota.used_on(card_type))
        # What leaves for others is theirs.
        total = max(leaving - books.promised.get(card_type, 0) + books.on_hold.get(card_type, 0), 0)
        if settings.by_priority != "off":
            own_only = settings.by_priority == "same_tenant"
            total += sum(
                amount
                for priority, tenant, amount in self._crews(card_type)
                if priority < claim.priority and (not own_only or tenant == claim.tenant)
            )
        mine = scene.books.quota.of(claim.tenant, card_type)
        if mine.cohort is not None and (settings.reclaim != "off" or settings.fair != "off"):
            for other in scene.books.quota.members(mine.cohort):
                standing = scene.books.quota.of(other, card_type)
                if other != claim.tenant:
                    total += standing.used if settings.fair != "off" else standing.borrowed
        for line in scene.policy.protection:
            if line.job_class in (None, claim.job_class) and line.tenant in (None, claim.tenant):
                if line.when_unmet == "preempt_lower_class":
                    total += scene.books.held_by(card_type)
                total += sum(scene.books.held_by(card_type, job_class=other) for other in line.may_preempt)
        return total

    def _crews(self, card_type: str) -> list[tuple[int, str, Amount]]:
        known = self._by_crew.get(card_type)
        if known is None:
            known = self._by_crew[card_type] = [
                (
                    priority,
                    tenant,
                    sum(entry.amount for job in jobs.values() for entry in job.held if entry.card_type == card_type),
                )
                for (tenant, _, priority), jobs in self._scene.books.crews.get(card_type, {}).items()
            ]
        return known
