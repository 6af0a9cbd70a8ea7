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
    PolicyApproved,
    PolicyHeld,
    PolicyProposed,
    PolicyRejected,
    PolicyWithdrawn,
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


# ---------------------------------------------------------------------------------------------------------- approval
APPROVED = {"approval": {"required_for": "protection"}}
LINE = {"name": "reserve", "class": "inference", "reserved": {"H100-80G": 4}}


def a_proposal(number: int, *, author: str = "ann", **policy: Any) -> PolicyProposed:
    return PolicyProposed(proposal_id=f"p{number}", document=a_policy(**policy), author=author, why="try")


def test_a_guarded_change_is_held_until_another_operator_approves_it() -> None:
    driver = desk(**APPROVED)
    said = driver.tell(a_proposal(2, protection=[LINE], **APPROVED))
    assert [(held.proposal_id, held.author, held.based_on) for held in of_type(said, PolicyHeld)] == [("p2", "ann", 1)]
    assert of_type(said, PolicyActivated) == []
    again = driver.restarted()
    assert again.tell(PolicyApproved(proposal_id="p2", approver="ann")) == [], "nobody approves their own"
    [activated] = of_type(again.tell(PolicyApproved(proposal_id="p2", approver="bob")), PolicyActivated)
    assert (activated.policy_version, activated.author, activated.approver) == (2, "ann", "bob")
    kept = again.store["version", "0000000002"]
    assert (kept["author"], kept["approver"], kept["why"]) == ("ann", "bob", "try")
    assert again.tell(PolicyApproved(proposal_id="p2", approver="eve")) == []
    assert len(set(again.ids)) == len(again.ids)


def test_other_changes_need_no_approval_unless_all_do() -> None:
    driver = desk(**APPROVED)
    assert of_type(driver.tell(a_proposal(2, description="x", **APPROVED)), PolicyActivated)
    lifted = driver.tell(a_proposal(3))
    assert of_type(lifted, PolicyHeld), "one operator cannot lift the rule alone"
    strict = desk(approval={"required_for": "all"})
    assert of_type(strict.tell(a_proposal(2, description="x", approval={"required_for": "all"})), PolicyHeld)


def test_a_held_proposal_falls_when_another_version_comes_first() -> None:
    driver = desk(**APPROVED)
    driver.tell(a_proposal(2, protection=[LINE], **APPROVED))
    said = driver.tell(a_proposal(3, author="bob", description="x", **APPROVED))
    [rejected] = of_type(said, PolicyRejected)
    assert rejected.proposal_id == "p2" and "version 2" in rejected.problems[0]["fault"]
    assert driver.tell(PolicyApproved(proposal_id="p2", approver="bob")) == []


def test_a_held_proposal_can_be_turned_down() -> None:
    driver = desk(**APPROVED)
    driver.tell(a_proposal(2, protection=[LINE], **APPROVED))
    [rejected] = of_type(
        driver.tell(PolicyWithdrawn(proposal_id="p2", withdrawn_by="bob", why="too much")), PolicyRejected
    )
    assert "bob" in rejected.problems[0]["fault"] and "too much" in rejected.problems[0]["fault"]
    assert ("proposal", "p2") not in driver.store


def test_a_proposal_made_from_an_older_version_is_refused() -> None:
    driver = desk()
    driver.tell(a_proposal(2, description="x"))
    stale = a_proposal(3, description="y").model_copy(update={"based_on": 1})
    [rejected] = of_type(driver.tell(stale), PolicyRejected)
    assert rejected.problems[0]["path"] == "(document)"
    assert driver.core.policy_version == 2
    fresh = a_proposal(4, description="y").model_copy(update={"based_on": 2})
    assert of_type(driver.tell(fresh), PolicyActivated)


def test_every_version_is_kept() -> None:
    driver = desk()
    driver.tell(a_proposal(2, description="x"), a_proposal(3, author="bob", description="y"))
    kept = {key: body["author"] for (kind, key), body in driver.store.items() if kind == "version"}
    assert kept == {"0000000001": "user:op", "0000000002": "ann", "0000000003": "bob"}
