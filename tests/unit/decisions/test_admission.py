"""Admission: which jobs may compete, which never, and how policies come into force."""

from __future__ import annotations

from typing import Any

import pytest

from berth.contracts.envelope import Fact, Order
from berth.contracts.events import (
    JobAdmitted,
    JobCancelled,
    JobCancelRequested,
    JobHeld,
    JobRefused,
    JobSubmitted,
    PolicyActivated,
    PolicyProposed,
    PolicyRejected,
)
from berth.decisions.admission import AdmissionCore
from tests.unit.decisions.builders import START, Driver, a_node, a_policy, a_spec, of_type


def submitted(name: str, **fields: Any) -> JobSubmitted:
    return JobSubmitted(job_id=name, spec=a_spec(name, **fields), submitted_at=START, submitted_by="user:u")


def proposed(document: dict[str, Any], number: int = 1) -> PolicyProposed:
    return PolicyProposed(proposal_id=f"p{number}", document=document, author="user:op", why="try")


def desk(**policy: Any) -> Driver:
    driver = Driver(AdmissionCore())
    driver.tell(a_node("n1"), a_node("n2"), a_node("m1", type="A100-40G", gpus=4), proposed(a_policy(**policy)))
    return driver


def refused(said: list[Fact | Order]) -> dict[str, dict[str, Any]]:
    return {reason.code.value: reason.facts for fact in of_type(said, JobRefused) for reason in fact.reasons}


def test_jobs_are_held_until_a_policy_is_in_force() -> None:
    driver = Driver(AdmissionCore())
    assert [fact.reasons[0].code for fact in of_type(driver.tell(submitted("a")), JobHeld)] == ["no_policy"]
    driver.tell(submitted("b"), JobCancelRequested(job_id="b", requested_by="user:u"))
    said = driver.restarted().tell(proposed(a_policy()))
    assert [fact.job_id for fact in of_type(said, JobAdmitted)] == ["a"]


def test_admitted_job_keeps_its_specification_and_order_of_types() -> None:
    said = desk().tell(submitted("a", types=["A100-40G", "H100-80G"]), submitted("b"))
    assert [fact.spec.types for fact in of_type(said, JobAdmitted)] == [("A100-40G", "H100-80G"), ()]


@pytest.mark.parametrize(
    ("fields", "code", "facts"),
    [
        ({"tenant": "nobody"}, "unknown_tenant", {"tenant": "nobody"}),
        ({"types": ["B300-288G"]}, "unknown_card_type", {"field": "types", "card_type": "B300-288G"}),
        ({"gpus": 65}, "over_limit", {"field": "gpus", "asked": 65, "limit": 64}),
        ({"workers": 9, "gpus": 0}, "over_limit", {"field": "workers", "asked": 9, "limit": 8}),
        ({"priority": 101}, "over_limit", {"field": "priority", "asked": 101, "limit": 100}),
        ({"name": "x" * 21}, "over_limit", {"field": "name", "asked": 21, "limit": 20}),
        ({"gpus": 16, "types": ["H100-80G"]}, "never_fits", {"needed": 16, "installed": 16, "largest_on_one_node": 8}),
        ({"workers": 3, "gpus": 8}, "never_fits", {"needed": 24}),
    ],
)
def test_what_can_never_start_is_refused_with_numbers(fields: dict[str, Any], code: str, facts: dict[str, Any]) -> None:
    limits = {"gpus_per_job": 64, "workers_per_job": 8, "priority_max": 100, "name_length": 20}
    said = desk(defaults={"limits": limits, "never_fits": "refuse"}).tell(submitted(fields.pop("name", "a"), **fields))
    found = refused(said)
    assert code in found
    assert facts.items() <= found[code].items()


def test_request_above_what_the_tenant_could_ever_hold_is_refused_with_its_ceiling() -> None:
    tenants = {"lab": {"quota": {"H100-80G": 4}, "cohort": "c"}, "big": {"quota": {"H100-80G": 8}, "cohort": "c"}}
    driver = desk(tenants=tenants, defaults={"never_fits": "refuse"})
    assert refused(driver.tell(submitted("a", workers=4, gpus=4, types=["H100-80G"])))["quota_full"]["quota"] == 12
    assert of_type(driver.tell(submitted("b", workers=3, gpus=4, types=["H100-80G"])), JobAdmitted)


def test_lost_and_cordoned_nodes_still_count_as_installed() -> None:
    driver = desk(defaults={"never_fits": "refuse"})
    driver.tell(a_node("n1", version=2, cordoned=True), a_node("n2", version=2, bad=range(8)))
    assert of_type(driver.tell(submitted("a", workers=2, gpus=8)), JobAdmitted)


def test_never_fits_waits_where_the_policy_does_not_refuse() -> None:
    assert of_type(desk().tell(submitted("a", workers=9, gpus=8)), JobAdmitted)


def test_cancel_that_came_first_ends_the_job_at_once() -> None:
    driver = desk()
    driver.tell(JobCancelRequested(job_id="a", requested_by="user:u"))
    said = driver.restarted().tell(submitted("a"))
    assert [fact.requested_by for fact in of_type(said, JobCancelled)] == ["user:u"]
    assert of_type(said, JobAdmitted) == []


def test_policy_versions_grow_and_a_wrong_one_changes_nothing() -> None:
    driver = desk()
    wrong = {"tenants": {"lab": {"quota": {"H100-80G": -1}}}, "defaults": {"queue": {"discipline": "maybe"}}}
    said = of_type(driver.tell(proposed(wrong, 2)), PolicyRejected)
    assert [p["path"] for p in said[0].problems] == ["tenants.lab.quota.H100-80G", "defaults.queue.discipline"]
    assert driver.core.policy_version == 1
    again = driver.restarted()
    activated = of_type(again.tell(proposed(a_policy(description="new"), 3)), PolicyActivated)
    assert [(fact.policy_version, fact.author, fact.why) for fact in activated] == [(2, "user:op", "try")]
    assert activated[0].document["description"] == "new"


def test_guarantees_above_the_installed_cards_are_refused() -> None:
    line = {"name": "floor", "class": "inference", "reserved": {"H100-80G": 17}}
    said = of_type(desk().tell(proposed(a_policy(protection=[line]), 2)), PolicyRejected)
    assert said[0].problems[0]["path"] == "protection.0.reserved.H100-80G"
