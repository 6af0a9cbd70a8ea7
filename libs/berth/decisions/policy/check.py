"""Whether a policy document makes sense: every fault at once, each with its path and a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from berth.decisions.policy.document import Policy, ProtectionLine


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault. path: dotted, from the top of the document."""

    path: str
    fault: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        """The shape that events and answers carry."""
        return {"path": self.path, "fault": self.fault, "remedy": self.remedy}


_REMEDIES = {
    "extra_forbidden": "remove it, or look for a misspelt key; `berth policy schema` lists all keys",
    "missing": "add it",
    "greater_than_equal": "use a larger number",
    "greater_than": "use a larger number",
    "less_than_equal": "use a smaller number",
    "int_type": "write a whole number without quotes",
    "int_from_float": "write a whole number",
    "literal_error": "use one of the listed words",
    "enum": "use one of the listed words",
    "bool_type": "write true or false",
    "bool_parsing": "write true or false",
    "string_pattern_mismatch": "write it in the form shown",
    "tuple_type": "write a list",
    "dict_type": "write a mapping",
    "model_type": "write a mapping",
    "finite_number": "use a finite number",
}


def check(document: Mapping[str, Any], *, installed: Mapping[str, int] | None = None) -> list[Problem]:
    """Every fault of a document; empty where it may be activated.

    Args:
        document: as proposed, not yet validated.
        installed: cards of each type ever registered in the pool; None: not known, guarantees are not compared.
    """
    try:
        policy = Policy.from_document(document)
    except ValidationError as wrong:
        return [_from_pydantic(error) for error in wrong.errors(include_url=False, include_context=False)]
    found = [
        *_tenants(policy),
        *_classes(policy),
        *_lines(policy),
        *_reservations(policy),
        *_health(policy),
    ]
    if installed:
        found += _guarantees(policy, installed)
    return sorted(found, key=lambda problem: problem.path)


def _from_pydantic(error: Any) -> Problem:
    path = ".".join(str(part) for part in error["loc"] if part != "[key]") or "(document)"
    kind = error["type"]
    fault = error["msg"]
    if kind == "value_error":
        fault, _, remedy = fault.removeprefix("Value error, ").partition("; ")
        return Problem(path, fault, remedy or "mend the value")
    return Problem(path, fault, _REMEDIES.get(kind, "mend the value"))


def _tenants(policy: Policy) -> Iterator[Problem]:
    known = policy.card_types
    for name, tenant in policy.tenants.items():
        for field in ("quota", "borrow_limit", "lend_limit"):
            for card_type in getattr(tenant, field):
                if known and card_type not in known:
                    yield Problem(
                        f"tenants.{name}.{field}.{card_type}",
                        f"card type {card_type} is not under card_types",
                        f"add it to card_types or use one of {', '.join(sorted(known))}",
                    )
        for card_type, limit in tenant.lend_limit.items():
            owned = tenant.quota.get(card_type)
            if owned is not None and limit > owned:
                yield Problem(
                    f"tenants.{name}.lend_limit.{card_type}",
                    f"lends {limit:g} but owns {owned:g}",
                    f"lower it to {owned:g} or raise the quota",
                )
        for user, times in Counter(user.name for user in tenant.users).items():
            if times > 1:
                yield Problem(f"tenants.{name}.users", f"user {user} is listed {times} times", "list each user once")
    for name, cohort in policy.cohorts.items():
        for card_type in cohort.shared:
            if known and card_type not in known:
                yield Problem(
                    f"cohorts.{name}.shared.{card_type}",
                    f"card type {card_type} is not under card_types",
                    f"add it to card_types or use one of {', '.join(sorted(known))}",
                )


_OF_THE_POOL = ("suspect_after", "lost_after", "quarantine")


def _classes(policy: Policy) -> Iterator[Problem]:
    recovery = policy.defaults.recovery
    if recovery.lost_after and recovery.suspect_after and recovery.lost_after < recovery.suspect_after:
        yield Problem(
            "defaults.recovery.lost_after",
            f"a node would be lost after {recovery.lost_after}s, before it is suspect after {recovery.suspect_after}s",
            "make lost_after at least suspect_after",
        )
    for where, settings in [("defaults", policy.defaults)] + [(f"classes.{c}", s) for c, s in policy.classes.items()]:
        backoff = settings.recovery.backoff
        if backoff.max is not None and backoff.max < backoff.first:
            yield Problem(
                f"{where}.recovery.backoff.max",
                f"the longest pause {backoff.max}s is shorter than the first {backoff.first}s",
                "make max at least first",
            )
        if settings.idle.timeout is not None and settings.idle.warn_before > settings.idle.timeout:
            yield Problem(
                f"{where}.idle.warn_before",
                f"warns {settings.idle.warn_before}s before a timeout of only {settings.idle.timeout}s",
                "make warn_before at most timeout",
            )
        if settings.lifetime.max is not None and settings.lifetime.warn_before > settings.lifetime.max:
            yield Problem(
                f"{where}.lifetime.warn_before",
                f"warns {settings.lifetime.warn_before}s before an end after only {settings.lifetime.max}s",
                "make warn_before at most max",
            )
        order = settings.preemption.victim_order
        if len(set(order)) != len(order):
            yield Problem(f"{where}.preemption.victim_order", "names a criterion twice", "name each criterion once")
    for job_class, settings in policy.classes.items():
        for field in _OF_THE_POOL:
            if field in settings.recovery.model_fields_set:
                yield Problem(
                    f"classes.{job_class}.recovery.{field}",
                    "belongs to nodes, which all classes share",
                    f"set it under defaults.recovery.{field}",
                )
    for job_class, times in Counter(policy.class_order).items():
        if times > 1:
            yield Problem("class_order", f"class {job_class} is listed {times} times", "list each class once")


def _lines(policy: Policy) -> Iterator[Problem]:
    for index, line in enumerate(policy.protection):
        where = f"protection.{index}"
        if line.job_class is None and line.tenant is None:
            yield Problem(where, f"line {line.name} says for no one what it keeps", "add class or tenant")
        if line.tenant is not None and line.tenant not in policy.tenants:
            yield Problem(f"{where}.tenant", f"tenant {line.tenant} is not under tenants", "add the tenant or mend it")
        for field in ("reserved", "floor"):
            for card_type in getattr(line, field):
                if policy.card_types and card_type not in policy.card_types:
                    yield Problem(
                        f"{where}.{field}.{card_type}",
                        f"card type {card_type} is not under card_types",
                        f"add it to card_types or use one of {', '.join(sorted(policy.card_types))}",
                    )
        if line.job_class is not None and line.job_class in line.may_preempt:
            yield Problem(f"{where}.may_preempt", f"class {line.job_class} would preempt itself", "name other classes")
        yield from _windows(line, where)
    for name, times in Counter(line.name for line in policy.protection).items():
        if times > 1:
            yield Problem("protection", f"{times} lines are called {name}", "give each line its own name")


def _windows(line: ProtectionLine, where: str) -> Iterator[Problem]:
    for number, window in enumerate(line.windows):
        here = f"{where}.windows.{number}"
        if not window.days:
            yield Problem(f"{here}.days", "lists no day, so it never opens", "list days or leave days out")
        if window.from_ == window.to:
            yield Problem(
                here,
                f"begins and ends at {window.to}, so it never opens",
                'write from: "00:00", to: "24:00" for a whole day',
            )
        if window.from_ == "24:00":
            yield Problem(f"{here}.from", "no day has a minute after 24:00", 'write "00:00"')


def _reservations(policy: Policy) -> Iterator[Problem]:
    for index, reservation in enumerate(policy.reservations):
        where = f"reservations.{index}"
        if reservation.to <= reservation.from_:
            yield Problem(f"{where}.to", "ends before it begins", "make to later than from")
        if reservation.tenant not in policy.tenants:
            yield Problem(
                f"{where}.tenant", f"tenant {reservation.tenant} is not under tenants", "add the tenant or mend it"
            )
        for card_type in reservation.gpus:
            if policy.card_types and card_type not in policy.card_types:
                yield Problem(
                    f"{where}.gpus.{card_type}",
                    f"card type {card_type} is not under card_types",
                    f"add it to card_types or use one of {', '.join(sorted(policy.card_types))}",
                )
    for name, times in Counter(reservation.name for reservation in policy.reservations).items():
        if times > 1:
            yield Problem("reservations", f"{times} reservations are called {name}", "give each its own name")


def _health(policy: Policy) -> Iterator[Problem]:
    both = sorted(set(policy.health.fatal_xids) & set(policy.health.harmless_xids))
    if both:
        yield Problem(
            "health",
            f"fault codes {', '.join(map(str, both))} are both fatal and harmless",
            "leave each in one of the lists",
        )


def _guarantees(policy: Policy, installed: Mapping[str, int]) -> Iterator[Problem]:
    """Lines whose windows differ may share cards; only those that always hold are added up."""
    always: Counter[str] = Counter()
    for index, line in enumerate(policy.protection):
        for card_type, count in line.reserved.items():
            have = installed.get(card_type, 0)
            if not line.windows:
                always[card_type] += count
            if count > have or (not line.windows and always[card_type] > have):
                total = count if line.windows else always[card_type]
                yield Problem(
                    f"protection.{index}.reserved.{card_type}",
                    f"guarantees come to {total} {card_type}, {have} are installed",
                    f"lower it to {max(have - (total - count), 0)} or add nodes first",
                )
    for index, reservation in enumerate(policy.reservations):
        for card_type, count in reservation.gpus.items():
            have = installed.get(card_type, 0)
            if count > have:
                yield Problem(
                    f"reservations.{index}.gpus.{card_type}",
                    f"reserves {count} {card_type}, {have} are installed",
                    f"lower it to {have} or add nodes first",
                )


def warnings(document: Mapping[str, Any], *, installed: Mapping[str, int] | None = None) -> list[Problem]:
    """What is allowed but hardly meant; empty too where the document has faults that `check` lists."""
    try:
        policy = Policy.from_document(document)
    except ValidationError:
        return []
    found = [*_unused_knobs(policy), *_line_conflicts(policy)]
    if installed:
        for name, tenant in policy.tenants.items():
            for card_type, quota in tenant.quota.items():
                if quota > installed.get(card_type, 0):
                    found.append(
                        Problem(
                            f"tenants.{name}.quota.{card_type}",
                            f"quota {quota:g} can never be used, {installed.get(card_type, 0)} are installed",
                            "lower it or add nodes",
                        )
                    )
    return sorted(found, key=lambda problem: problem.path)


def _unused_knobs(policy: Policy) -> Iterator[Problem]:
    for name, tenant in policy.tenants.items():
        if tenant.cohort is None:
            for field in ("borrow_limit", "lend_limit"):
                if getattr(tenant, field):
                    yield Problem(
                        f"tenants.{name}.{field}", "has no effect without a cohort", "name a cohort or remove it"
                    )
    members = {tenant.cohort for tenant in policy.tenants.values()}
    for name in policy.cohorts:
        if name not in members:
            yield Problem(f"cohorts.{name}", "no tenant is a member", "add the cohort to a tenant or remove it")
    if policy.class_order:
        for job_class in policy.classes:
            if job_class not in policy.class_order:
                yield Problem("class_order", f"class {job_class} has no place in the order", "add it to class_order")


def _line_conflicts(policy: Policy) -> Iterator[Problem]:
    rank = policy.class_rank
    for index, line in enumerate(policy.protection):
        for lower in line.may_preempt:
            if _outranks(rank, lower, line):
                yield Problem(
                    f"protection.{index}.may_preempt",
                    f"{lower} stands above {line.job_class} in class_order, so this never applies",
                    f"remove {lower} or change class_order",
                )


def _outranks(rank: Mapping[Any, int], other: str, line: ProtectionLine) -> bool:
    mine = rank.get(line.job_class)
    theirs = rank.get(other)
    return mine is not None and theirs is not None and theirs < mine
