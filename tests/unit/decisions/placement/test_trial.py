"""What a policy would do, told before it is in force: by the very code that would do it, and without a trace."""

from __future__ import annotations

from typing import Any

import pytest

from berth.contracts.events import JobPlaced, PreemptionPlanned
from berth.contracts.requests import PolicyEffects
from berth.decisions.placement import trial
from tests.unit.decisions.builders import Pool, a_node, a_policy, of_type

H100 = "H100-80G"


def a_pool(**policy: Any) -> Pool:
    pool = Pool(a_node("n1"), a_node("n2"), policy=a_policy(**({"tenants": {"lab": {"quota": {H100: 16}}}} | policy)))
    pool.after(hours=1)
    return pool


def effects(pool: Pool, **policy: Any) -> PolicyEffects:
    records = [(kind, key, body) for (kind, key), body in pool.store.items()]
    return trial.policy_effects(records, a_policy(**policy), pool.now)


def quota(amount: float, **more: Any) -> dict[str, Any]:
    return {"tenants": {"lab": {"quota": {H100: amount}}}, **more}


def test_a_cut_that_drains_names_what_is_over_and_who_runs() -> None:
    pool = a_pool()
    pool.submit("a", gpus=8)
    pool.after(minutes=1)
    pool.submit("b", gpus=4)
    found = effects(pool, **quota(8))
    [cut] = found.cuts
    assert (cut.tenant, cut.card_type, cut.held, cut.may_hold, cut.over) == ("lab", H100, 12, 8, 4)
    assert (cut.stopped, cut.draining, [job.job_id for job in cut.jobs]) == (0, 4, ["b", "a"])
    assert found.stops == ()


def test_a_cut_that_preempts_names_the_jobs_it_would_stop() -> None:
    pool = a_pool()
    for name in ("a", "b", "c"):
        pool.after(minutes=1)
        pool.submit(name, gpus=4)
    document = quota(8, defaults={"quota_cut": "preempt"})
    found = effects(pool, **document)
    assert [(job.job_id, job.rule, job.gpus) for job in found.stops] == [("c", "quota_cut", 4)]
    assert (found.cuts[0].stopped, found.cuts[0].draining) == (4, 0)
    said = pool.set_policy(a_policy(**document))
    assert [v.job_id for plan in of_type(said, PreemptionPlanned) for v in plan.victims] == ["c"]


def test_waiting_jobs_that_could_never_start_are_named_with_numbers() -> None:
    pool = a_pool()
    pool.submit("filler", gpus=8, workers=2)
    pool.submit("big", gpus=8, workers=2)
    pool.submit("small", gpus=4)
    found = effects(pool, **quota(12))
    assert [(entry.job.job_id, entry.reasons[0].code, entry.reasons[0].facts["quota"]) for entry in found.never] == [
        ("big", "quota_full", 12)
    ]
    removed = effects(pool, tenants={"other": {}})
    assert {entry.reasons[0].code for entry in removed.never} == {"unknown_tenant"}


def test_what_would_start_at_once_is_named() -> None:
    pool = a_pool(tenants={"lab": {"quota": {H100: 4}}})
    pool.submit("a", gpus=4)
    pool.submit("b", gpus=4)
    assert [job.job_id for job in effects(pool, **quota(8)).starts] == ["b"]
    assert of_type(pool.set_policy(a_policy(**quota(8))), JobPlaced)[0].job_id == "b"


def test_lines_that_are_new_changed_or_gone_are_told_with_when_they_hold() -> None:
    zone = {"zone": "UTC", "to": "20:00"}
    day = {"name": "day", "class": "inference", "reserved": {H100: 4}, "windows": [{"from": "08:00", **zone}]}
    night = {"name": "night", "class": "inference", "reserved": {H100: 1}}
    pool = a_pool(protection=[day, night])
    late = day | {"windows": [{"from": "10:00", **zone}]}
    found = {line.name: line for line in effects(pool, protection=[late, day | {"name": "new"}]).lines}
    assert {name: (line.change, line.was_open, line.is_open) for name, line in found.items()} == {
        "day": ("changed", True, False),
        "night": ("removed", True, False),
        "new": ("new", False, True),
    }
    assert found["day"].next_change is not None and found["day"].next_change.hour == 10
    assert found["night"].next_change is None


def test_nothing_is_told_of_a_document_that_changes_nothing() -> None:
    pool = a_pool()
    pool.submit("a", gpus=8)
    pool.submit("b", gpus=16)
    found = effects(pool, **quota(16))
    assert (found.cuts, found.stops, found.starts, found.never, found.lines) == ((), (), (), (), ())


def test_a_pool_too_large_for_a_trial_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "TRIED_UP_TO", 0)
    pool = a_pool()
    pool.submit("a", gpus=8)
    found = effects(pool, **quota(4, defaults={"quota_cut": "preempt"}))
    assert not found.is_tried and found.stops == () and found.cuts[0].over == 4
