"""Whether a policy document makes sense: every fault at once, each with its path and a remedy.

Problems refuse a document; warnings do not: they name what is allowed but hardly meant. The checks of single parts stand
in `check_tenants`, `check_classes`, `check_lines` and `check_pool`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from berth.decisions.policy import check_classes, check_lines, check_pool, check_tenants
from berth.decisions.policy.document import Policy
from berth.decisions.policy.problem import Problem

__all__ = ["SHORTEST_LOST_AFTER", "Problem", "check", "warnings"]

SHORTEST_LOST_AFTER = 60
"""Seconds. A node that is cut off must have stopped its work, grace included, before it is called lost."""

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
    "datetime_from_date_parsing": "write a time with its zone, for example 2026-03-02T09:00:00+08:00",
    "datetime_parsing": "write a time with its zone, for example 2026-03-02T09:00:00+08:00",
    "string_too_short": "write a name",
    "string_type": "write text, in quotes where it looks like a number",
}


def check(
    document: object,
    *,
    installed: Mapping[str, int] | None = None,
    shortest_lost_after: int = SHORTEST_LOST_AFTER,
) -> list[Problem]:
    """Every fault of a document; empty where it may be activated.

    Args:
        document: as proposed, not yet validated; anything that JSON or YAML can hold.
        installed: cards of each type ever registered in the pool; None or empty: not known, nothing is compared with it.
        shortest_lost_after: seconds below which `lost_after` leaves a node no time to stop its own work. Lower only
            where clocks run faster than work does, as in tests.
    """
    policy, faults = read(document)
    if policy is None:
        return faults
    found = [
        *check_tenants.problems(policy),
        *check_classes.problems(policy, shortest_lost_after=shortest_lost_after),
        *check_lines.problems(policy),
        *check_pool.problems(policy),
    ]
    if installed:
        found += check_lines.beyond_installed(policy, installed)
        found += check_pool.beyond_installed(policy, installed)
    return sorted(found, key=lambda problem: (problem.path, problem.fault))


def warnings(
    document: object, *, installed: Mapping[str, int] | None = None, now: datetime | None = None
) -> list[Problem]:
    """What is allowed but hardly meant; empty too where the document has faults of form.

    now: reservations that are over by then are named; None: not looked at.
    """
    policy, _ = read(document)
    if policy is None:
        return []
    found = [
        *check_tenants.doubts(policy),
        *check_classes.doubts(policy),
        *check_lines.doubts(policy),
        *check_pool.doubts(policy, now=now),
    ]
    if installed:
        found += check_tenants.beyond_installed(policy, installed)
    return sorted(found, key=lambda problem: (problem.path, problem.fault))


def read(document: object) -> tuple[Policy | None, list[Problem]]:
    """The policy of a document, or every fault of its form."""
    if not isinstance(document, Mapping):
        kind = "nothing" if document is None else type(document).__name__
        return None, [Problem("(document)", f"a policy is a mapping, not {kind}", "write name: value pairs")]
    try:
        return Policy.from_document(document), []
    except ValidationError as wrong:
        return None, list(_from_pydantic(wrong))


def _from_pydantic(wrong: ValidationError) -> Iterator[Problem]:
    errors: list[Any] = wrong.errors(include_url=False, include_context=False, include_input=False)
    for error in errors:
        path = ".".join(str(part) for part in error["loc"] if part != "[key]") or "(document)"
        kind, fault = error["type"], error["msg"]
        if kind == "value_error":
            fault, _, remedy = fault.removeprefix("Value error, ").partition("; ")
            yield Problem(path, fault, remedy or "mend the value")
        else:
            fault = fault.removeprefix("Input should be ").removeprefix("Value should have ")
            yield Problem(path, _words(kind, fault), _REMEDIES.get(kind, "mend the value"))


def _words(kind: str, fault: str) -> str:
    if kind == "extra_forbidden":
        return "no such key"
    if kind == "missing":
        return "is missing"
    return f"should be {fault}" if fault[:1].islower() or fault[:1] in "'\"" else fault
