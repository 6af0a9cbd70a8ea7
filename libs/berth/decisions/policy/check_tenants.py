"""Whether tenants, cohorts and their quotas make sense."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from berth.contracts.base import JobClass
from berth.decisions.policy.document import Policy, TenantSettings
from berth.decisions.policy.problem import Problem, repeated, unknown_types


def problems(policy: Policy) -> Iterator[Problem]:
    """What refuses a document."""
    for name, tenant in policy.tenants.items():
        where = f"tenants.{name}"
        for field in ("quota", "borrow_limit", "lend_limit"):
            yield from unknown_types(getattr(tenant, field), policy.card_types, f"{where}.{field}")
        for card_type, limit in tenant.lend_limit.items():
            owned = tenant.quota.get(card_type)
            if owned is not None and limit > owned:
                yield Problem(
                    f"{where}.lend_limit.{card_type}",
                    f"lends {limit:g} but owns {owned:g}",
                    f"lower it to {owned:g} or raise the quota",
                )
        for user, times in repeated(user.name for user in tenant.users):
            yield Problem(f"{where}.users", f"user {user} is listed {times} times", "list each user once")
    for name, cohort in policy.cohorts.items():
        yield from unknown_types(cohort.shared, policy.card_types, f"cohorts.{name}.shared")
    yield from _weightless(policy)


def _weightless(policy: Policy) -> Iterator[Problem]:
    """Fair order between tenants that all weigh nothing decides nothing."""
    fair = [c for c in JobClass if policy.for_class(c).fair_share.basis != "none"]
    if fair and len(policy.tenants) > 1 and all(tenant.weight == 0 for tenant in policy.tenants.values()):
        yield Problem(
            "tenants",
            f"every tenant has weight 0, so fair_share of {', '.join(fair)} orders nobody",
            "give at least one tenant a weight above 0, or set fair_share.basis to none",
        )


def doubts(policy: Policy) -> Iterator[Problem]:
    """What is allowed but hardly meant."""
    members: dict[str, list[str]] = {}
    for name, tenant in policy.tenants.items():
        if tenant.cohort is not None:
            members.setdefault(tenant.cohort, []).append(name)
        yield from _void(policy, name, tenant)
    for name, cohort in policy.cohorts.items():
        if name not in members:
            yield Problem(f"cohorts.{name}", "no tenant is a member", "add the cohort to a tenant or remove it")
        elif len(members[name]) == 1 and not any(cohort.shared.values()):
            yield Problem(
                f"cohorts.{name}",
                f"{members[name][0]} is its only member and nothing is shared, so nobody can borrow",
                "add another member or a shared amount",
            )
    for name, tenant in policy.tenants.items():
        if tenant.cohort is not None and len(members[tenant.cohort]) > 1:
            yield from _nothing_to_borrow(policy, name, tenant, members[tenant.cohort])


def _void(policy: Policy, name: str, tenant: TenantSettings) -> Iterator[Problem]:
    """Settings that another one makes void."""
    if tenant.cohort is None:
        for field in ("borrow_limit", "lend_limit"):
            if getattr(tenant, field):
                yield Problem(f"tenants.{name}.{field}", "has no effect without a cohort", "name a cohort or remove it")
    elif policy.cohorts and tenant.cohort not in policy.cohorts:
        yield Problem(
            f"tenants.{name}.cohort",
            f"cohort {tenant.cohort} is not under cohorts",
            f"add it there or use one of {', '.join(sorted(policy.cohorts))}",
        )
    for card_type in tenant.borrow_limit:
        if card_type not in tenant.quota:
            yield Problem(
                f"tenants.{name}.borrow_limit.{card_type}",
                f"has no effect: without a quota of {card_type} the tenant has no limit at all",
                "add a quota (0 where it owns none) or remove it",
            )


def _nothing_to_borrow(policy: Policy, name: str, tenant: TenantSettings, members: list[str]) -> Iterator[Problem]:
    cohort = policy.cohorts.get(tenant.cohort or "")
    for card_type, limit in tenant.borrow_limit.items():
        lent = cohort.shared.get(card_type, 0) if cohort is not None else 0
        for other in (policy.tenants[member] for member in members if member != name):
            owned = other.quota.get(card_type, 0)
            lent += min(other.lend_limit.get(card_type, owned), owned)
        if limit > lent:
            yield Problem(
                f"tenants.{name}.borrow_limit.{card_type}",
                f"borrows up to {limit:g} but the others of the cohort lend {lent:g} at most",
                f"lower it to {lent:g}, or let the others own or lend more",
            )


def beyond_installed(policy: Policy, installed: Mapping[str, int]) -> Iterator[Problem]:
    """Quotas that no one can reach."""
    for name, tenant in policy.tenants.items():
        for card_type, quota in tenant.quota.items():
            have = installed.get(card_type, 0)
            if quota > have:
                yield Problem(
                    f"tenants.{name}.quota.{card_type}",
                    f"quota {quota:g} can never be used, {have} are installed",
                    f"lower it to {have} or add nodes",
                )
