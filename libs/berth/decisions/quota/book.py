"""What each tenant may hold and holds, per card type; cohorts lend and borrow.

Of each tenant's quota the part above its lend limit is its own at all times. What is lent, and what is shared, forms
the cohort's pot; use beyond the own part comes out of the pot. Reaching a limit exactly is allowed.
(The arithmetic is that of kubernetes-sigs/kueue `pkg/cache/scheduler/resource_node.go`, for one level of cohorts.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from berth.contracts.reasons import Code, Reason, because
from berth.decisions.placement.claim import Amount, exact, exact_ratio, plain
from berth.decisions.policy.document import Policy, TenantSettings


@dataclass(slots=True)
class Standing:
    """One tenant on one card type. quota None: no limit. own: never lent.

    used: held. leaving: of that, what was told to stop. claimed: promised to jobs that others make room for.
    """

    quota: Amount | None
    own: Amount = 0
    borrow_limit: Amount | None = None
    used: Amount = 0
    leaving: Amount = 0
    claimed: Amount = 0
    cohort: str | None = None

    @property
    def taken(self) -> Amount:
        """Held, or promised beyond what comes free: what is leaving still counts until it is gone."""
        return self.used + max(self.claimed - self.leaving, 0)

    @property
    def borrowed(self) -> Amount:
        """Held beyond the own quota."""
        return max(self.used - self.quota, 0) if self.quota is not None else 0


class QuotaBook:
    """Limits from the policy, use from the ledger."""

    def __init__(self) -> None:
        """Without a policy: nobody has a limit."""
        self._policy = Policy()
        self._standings: dict[tuple[str, str], Standing] = {}
        self._members: dict[str, list[str]] = {}
        self._pot: dict[tuple[str, str], Amount] = {}
        self._memory_mib: dict[str, int] = {}
        self._left: dict[tuple[str, str], tuple[int, Amount]] = {}
        self.version = 0
        """Another number for every state of the standings; whoever changes one calls `changed`."""
        self._last_version = 0

    def changed(self) -> None:
        """Say that a standing has changed."""
        self._last_version += 1
        self.version = self._last_version

    def set_policy(self, policy: Policy) -> None:
        """Take new limits; use stays as it is."""
        self._policy = policy
        self._members = {}
        self._pot = {}
        self.changed()
        for name, tenant in policy.tenants.items():
            if tenant.cohort is not None:
                self._members.setdefault(tenant.cohort, []).append(name)
        for (name, card_type), standing in self._standings.items():
            self._limit(standing, policy.tenants.get(name), card_type)

    def _limit(self, standing: Standing, tenant: TenantSettings | None, card_type: str) -> None:
        quota = tenant.quota.get(card_type) if tenant is not None else None
        if tenant is None and self._policy.tenants:
            quota = 0.0
        standing.quota = None if quota is None else exact(quota)
        standing.cohort = tenant.cohort if tenant is not None else None
        standing.borrow_limit, standing.own = None, standing.quota or 0
        if tenant is not None and standing.cohort is not None:
            limit = tenant.borrow_limit.get(card_type)
            standing.borrow_limit = None if limit is None else exact(limit)
            lends = tenant.lend_limit.get(card_type)
            lent = standing.own if lends is None else min(exact(lends), standing.own)
            standing.own = standing.own - lent

    def of(self, tenant: str, card_type: str) -> Standing:
        """A tenant's standing on a card type."""
        found = self._standings.get((tenant, card_type))
        if found is None:
            found = self._standings[tenant, card_type] = Standing(None)
            self._limit(found, self._policy.tenants.get(tenant), card_type)
        return found

    def use_memory(self, tenant: str, memory_mib: int) -> None:
        """Add to (or, negative, take from) the card memory that a tenant holds."""
        if memory_mib:
            self._memory_mib[tenant] = self._memory_mib.get(tenant, 0) + memory_mib

    def memory_gib(self, tenant: str) -> Amount:
        """Card memory that a tenant holds."""
        return exact_ratio(self._memory_mib.get(tenant, 0), 1024)

    def memory_blocker(self, tenant: str, memory_mib: int) -> Reason | None:
        """Why a tenant may not take so much card memory; None: it may."""
        settings = self._policy.tenants.get(tenant)
        if settings is None or settings.memory_quota_gib is None:
            return None
        quota = exact(settings.memory_quota_gib)
        used, needed = self.memory_gib(tenant), exact_ratio(memory_mib, 1024)
        if used + needed <= quota:
            return None
        return because(
            Code.QUOTA_FULL,
            remedy=_REMEDY,
            needed=plain(needed),
            quota=plain(quota),
            used=plain(used),
            free=plain(max(quota - used, 0)),
            unit="GiB",
            tenant=tenant,
        )

    def members(self, cohort: str) -> Iterable[str]:
        """Tenants of a cohort."""
        return self._members.get(cohort, ())

    def pot(self, cohort: str, card_type: str) -> Amount:
        """What the members of a cohort lend, and what is shared."""
        found = self._pot.get((cohort, card_type))
        if found is None:
            shared = self._policy.cohorts[cohort].shared.get(card_type, 0.0) if cohort in self._policy.cohorts else 0.0
            found = exact(shared)
            for member in self.members(cohort):
                standing = self.of(member, card_type)
                found += (standing.quota or 0) - standing.own
            self._pot[cohort, card_type] = found
        return found

    def pot_left(self, cohort: str, card_type: str) -> Amount:
        """What of the pot nobody uses, now and when all that leaves has left; negative after a cut."""
        known = self._left.get((cohort, card_type))
        if known is None or known[0] != self.version:
            known = self._left[cohort, card_type] = (self.version, self._pot_left(cohort, card_type))
        return known[1]

    def _pot_left(self, cohort: str, card_type: str) -> Amount:
        now: Amount = 0
        then: Amount = 0
        for member in self.members(cohort):
            standing = self.of(member, card_type)
            if standing.quota is not None:
                now += max(standing.used - standing.own, 0)
                then += max(standing.used - standing.leaving + standing.claimed - standing.own, 0)
        return self.pot(cohort, card_type) - max(now, then)

    def can_hold_more(self, tenant: str, card_type: str) -> Amount | None:
        """How much more a tenant may take now; None: no limit; negative after a cut."""
        standing = self.of(tenant, card_type)
        if standing.quota is None:
            return None
        if standing.cohort is None:
            return standing.quota - standing.taken
        room = max(standing.own - standing.taken, 0) + self.pot_left(standing.cohort, card_type)
        if standing.borrow_limit is not None:
            room = min(room, standing.quota + standing.borrow_limit - standing.taken)
        return room

    def excess(self, tenant: str, card_type: str) -> Amount:
        """What a tenant holds beyond its quota and what it may borrow, after all that leaves has left."""
        standing = self.of(tenant, card_type)
        if standing.quota is None:
            return 0
        held = standing.used - standing.leaving
        if standing.cohort is None:
            return max(held - standing.quota, 0)
        drawn: Amount = 0
        for member in self.members(standing.cohort):
            other = self.of(member, card_type)
            if other.quota is not None:
                drawn += max(other.used - other.leaving - other.own, 0)
        over = min(drawn - self.pot(standing.cohort, card_type), held - standing.quota)
        if standing.borrow_limit is not None:
            over = max(over, held - standing.quota - standing.borrow_limit)
        return max(over, 0)

    def can_borrow(self, tenant: str, card_type: str) -> Amount:
        """How much of `can_hold_more` goes beyond the own quota."""
        room = self.can_hold_more(tenant, card_type)
        standing = self.of(tenant, card_type)
        if room is None or standing.quota is None:
            return 0
        return max(room - max(standing.quota - standing.taken, 0), 0)

    def ceiling(self, tenant: str, card_type: str) -> Amount | None:
        """The most a tenant could ever hold, all others idle; None: no limit."""
        standing = self.of(tenant, card_type)
        if standing.quota is None:
            return None
        if standing.cohort is None:
            return standing.quota
        others = self.pot(standing.cohort, card_type) - (standing.quota - standing.own)
        most = standing.quota + others
        return most if standing.borrow_limit is None else min(most, standing.quota + standing.borrow_limit)

    def blocker(self, tenant: str, card_type: str, needed: Amount) -> Reason | None:
        """Why a tenant may not take `needed` now; None: it may."""
        room = self.can_hold_more(tenant, card_type)
        if room is None or needed <= room:
            return None
        standing = self.of(tenant, card_type)
        assert standing.quota is not None
        return because(
            self._quota_code(standing, card_type, needed),
            remedy=_REMEDY,
            needed=plain(needed),
            quota=plain(standing.quota),
            used=plain(standing.used),
            can_borrow=plain(self.can_borrow(tenant, card_type)),
            free=plain(max(room, 0)),
            card_type=card_type,
            tenant=tenant,
        )

    def _quota_code(self, standing: Standing, card_type: str, needed: Amount) -> Code:
        assert standing.quota is not None
        cohort = standing.cohort
        if cohort is None or standing.borrow_limit == 0:
            return Code.QUOTA_FULL
        if standing.borrow_limit is not None and standing.taken + needed > standing.quota + standing.borrow_limit:
            return Code.BORROW_LIMIT
        if len(list(self.members(cohort))) == 1 and not self.pot(cohort, card_type) - standing.quota + standing.own:
            return Code.QUOTA_FULL
        kept = sum(
            max(other.own - other.taken, 0)
            for member in self.members(cohort)
            if (other := self.of(member, card_type)) is not standing
        )
        room = max(standing.own - standing.taken, 0) + self.pot_left(cohort, card_type)
        return Code.LEND_LIMIT if kept and room + kept >= needed else Code.NOTHING_TO_BORROW

    def used_on(self, card_type: str) -> Iterable[tuple[str, str, Standing]]:
        """Standings on one card type, in no particular order."""
        return ((name, kind, standing) for (name, kind), standing in self._standings.items() if kind == card_type)

    def used_lines(self) -> Iterable[tuple[str, str, Standing]]:
        """All standings, in order of tenant and card type."""
        for tenant, card_type in sorted(self._standings):
            yield tenant, card_type, self._standings[tenant, card_type]


_REMEDY = "wait until the tenant's own jobs end, ask for less, or ask for more quota"
