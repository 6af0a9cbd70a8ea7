"""Every service may publish what it owns: a fact that the bus refuses stops its service."""

from __future__ import annotations

import pytest

from berth.bus.permissions import AGENT_REPORTS, SERVICE_PUBLISH
from berth.contracts import subjects
from berth.contracts.envelope import Fact, registered

OWNED = sorted(
    (owner, fact.TYPE, subjects.event("default", fact, "e-1"))
    for fact in registered().values()
    if issubclass(fact, Fact)
    for owner in fact.OWNERS
    if owner in SERVICE_PUBLISH or owner == "node_agent"
)


def matches(pattern: str, subject: str) -> bool:
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1]
    return len(wanted) == len(given) and all(w in {"*", g} for w, g in zip(wanted, given, strict=True))


@pytest.mark.parametrize(("owner", "type_", "subject"), OWNED, ids=[f"{owner}-{type_}" for owner, type_, _ in OWNED])
def test_owners_may_publish_their_facts(owner: str, type_: str, subject: str) -> None:
    allowed = AGENT_REPORTS if owner == "node_agent" else SERVICE_PUBLISH[owner]
    assert any(matches(pattern, subject) for pattern in allowed), f"{owner} may not publish {subject}"
