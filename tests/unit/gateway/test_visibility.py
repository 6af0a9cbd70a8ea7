"""Outsiders get numbers, not names."""

from __future__ import annotations

from services.gateway.visibility import data_for, jobs_named_in, reason_for

REASON = {
    "code": "no_free_gpus",
    "facts": {"needed": 8, "free": 0, "card_type": "H100-80G", "tenant": "team-b", "holder": "falcon-x"},
    "blocked_by": ["j-theirs", "j-mine"],
    "remedy": "wait for j-theirs to end",
}


def test_names_of_others_are_hidden_in_facts_blockers_and_remedy() -> None:
    shown = reason_for(REASON, own_jobs={"j-mine"}, tenant="team-a")
    assert shown["facts"] == {"needed": 8, "free": 0, "card_type": "H100-80G"}
    assert shown["blocked_by"] == ["j-mine"]
    assert shown["remedy"]
    assert not any(name in str(shown) for name in ("j-theirs", "team-b", "falcon-x"))


def test_a_remedy_that_names_nobody_stays() -> None:
    reason = REASON | {"remedy": "ask for fewer GPUs"}
    assert reason_for(reason, own_jobs=set(), tenant="team-a")["remedy"] == "ask for fewer GPUs"


def test_the_own_tenant_may_be_named() -> None:
    assert reason_for(REASON, own_jobs=set(), tenant="team-b")["facts"]["tenant"] == "team-b"


def test_reasons_are_filtered_wherever_they_stand() -> None:
    data = {
        "job_id": "j-mine",
        "by": "j-theirs",
        "cause": REASON,
        "receipt": {"reasons": [REASON]},
        "victims": [{"job_id": "j-theirs"}],
        "attempts": [{"attempt": 1, "cause": REASON}],
    }
    shown = data_for(data, own_jobs={"j-mine"}, tenant="team-a")
    assert "j-theirs" not in str(shown)
    assert "team-b" not in str(shown)
    assert shown["attempts"][0]["attempt"] == 1
    assert jobs_named_in(data) == {"j-theirs", "j-mine"}


def test_an_own_preemptor_is_shown() -> None:
    assert data_for({"by": "j-mine"}, own_jobs={"j-mine"}, tenant="team-a") == {"by": "j-mine"}


def test_a_specification_is_the_tenants_own_and_stays_whole() -> None:
    spec = {"name": "x", "labels": {"code": "1"}, "env": {"code": "y", "facts": "z"}}
    assert data_for({"spec": spec}, own_jobs=set(), tenant="team-a") == {"spec": spec}
