"""Placement: order, quota, gangs, card types, backoff, cancel, nodes, restart."""

from __future__ import annotations

import pytest

from berth.contracts.events import AllocationReleased, AttemptEnded, AttemptOutcome, JobCancelled, JobPlaced, JobWaiting
from berth.contracts.nodes import NodeState
from tests.unit.decisions.builders import Pool, a_node, a_policy, of_type, placed, told_waiting


def test_gang_takes_all_its_gpus_or_none() -> None:
    pool = Pool(a_node("n1"), a_node("n2"))
    assert placed(pool.submit("a", workers=2, gpus=4)) == ["a"]
    assert told_waiting(pool.submit("b", workers=2, gpus=8)) == {"b": ["no_free_gpus"]}
    assert pool.used() == 8
    assert pool.why("b")["no_free_gpus"] == {
        "needed": 16,
        "free": 8,
        "largest_on_one_node": 8,
        "card_type": "H100-80G",
    }


def test_fullest_node_that_fits_is_filled_first() -> None:
    pool = Pool(a_node("n1"), a_node("n2"), a_node("n3"))
    for name, gpus, where in [("a", 6, "n1"), ("b", 3, "n2"), ("c", 2, "n1"), ("d", 5, "n2"), ("e", 1, "n3")]:
        pool.submit(name, gpus=gpus)
        assert pool.nodes_of(name) == [where]


def test_spread_takes_the_emptiest_node() -> None:
    policy = a_policy(defaults={"placement": {"strategy": "spread"}})
    pool = Pool(a_node("n1"), a_node("n2"), policy=policy)
    pool.submit("a", gpus=1)
    pool.submit("b", workers=2, gpus=2)
    assert pool.nodes_of("a") == ["n1"]
    assert pool.nodes_of("b") == ["n1", "n2"]


def test_free_but_scattered_gpus_are_called_fragmented() -> None:
    pool = Pool(a_node("n1"), a_node("n2"))
    pool.submit("x", workers=2, gpus=4)
    pool.submit("y", gpus=4)
    pool.end("x")
    pool.submit("z", gpus=4)
    assert told_waiting(pool.submit("a", gpus=8)) == {}
    pool.submit("v", gpus=5)
    assert told_waiting(pool.submit("b", gpus=8)) == {"b": ["no_free_gpus"]}
    pool.cancel("b")
    scattered = Pool(a_node("n1"), a_node("n2"))
    scattered.submit("x", gpus=5)
    scattered.submit("y", gpus=4)
    assert told_waiting(scattered.submit("a", gpus=6)) == {"a": ["fragmented"]}
    assert scattered.why("a")["fragmented"]["largest_on_one_node"] == 4


def test_higher_priority_is_served_first_then_first_submission_which_a_stop_does_not_change() -> None:
    pool = Pool(a_node("n1"))
    pool.submit("first", gpus=8)
    pool.after(minutes=1)
    pool.submit("low", gpus=8, priority=10)
    pool.after(minutes=1)
    pool.submit("later", gpus=8)
    pool.submit("high", gpus=8, priority=90)
    assert pool.core.explain("low", pool.now).place == 3
    assert placed(pool.end("first", AttemptOutcome.FAILED)) == ["high"]
    pool.requeue("first")
    assert placed(pool.end("high")) == ["first"]
    assert placed(pool.end("first")) == ["later"]
    assert placed(pool.end("later")) == ["low"]


def test_quota_is_reached_exactly_and_never_passed() -> None:
    pool = Pool(a_node("n1"), policy=a_policy(tenants={"lab": {"quota": {"H100-80G": 4}}}))
    pool.submit("a", gpus=3)
    assert told_waiting(pool.submit("b", gpus=2)) == {"b": ["quota_full"]}
    assert pool.why("b")["quota_full"]["quota"] == 4
    assert placed(pool.submit("c", gpus=1)) == ["c"]
    assert pool.used() == 4
    assert placed(pool.end("a")) == ["b"]


def test_all_blockers_are_given_with_numbers() -> None:
    pool = Pool(
        a_node("n1", gpus=4), a_node("n2", gpus=4), policy=a_policy(tenants={"lab": {"quota": {"H100-80G": 6}}})
    )
    pool.submit("a", gpus=3)
    assert set(pool.why("a")) == set()
    pool.submit("b", workers=1, gpus=8)
    assert set(pool.why("b")) == {"quota_full", "no_free_gpus", "never_fits"}
    assert pool.core.explain("b", pool.now).reasons[0].blocked_by == ("a",)


def test_later_card_type_is_taken_when_the_first_is_full() -> None:
    pool = Pool(a_node("n1"), a_node("m1", type="A100-40G", gpus=4))
    pool.submit("a", gpus=8, types=["H100-80G"])
    pool.submit("b", gpus=4, types=["H100-80G", "A100-40G"])
    assert pool.nodes_of("b") == ["m1"]
    said = pool.submit("c", gpus=1, types=["H100-80G", "A100-40G", "V100-16G"])
    assert told_waiting(said) == {"c": ["no_free_gpus", "no_free_gpus", "type_unavailable"]}


def test_roles_of_different_size_start_together() -> None:
    pool = Pool(a_node("n1"), a_node("n2", gpus=2))
    roles = [{"name": "head", "workers": 1, "gpus": 2}, {"name": "body", "workers": 2, "gpus": 4}]
    said = of_type(pool.submit("a", roles=roles), JobPlaced)
    assert [(a.worker, a.role, a.node, len(a.gpus)) for a in said[0].assignments] == [
        (0, "head", "n2", 2),
        (1, "body", "n1", 4),
        (2, "body", "n1", 4),
    ]


def test_job_in_backoff_holds_nothing_and_competes_when_its_time_has_come() -> None:
    pool = Pool(a_node("n1"))
    pool.submit("a", gpus=8)
    pool.submit("b", gpus=8)
    assert placed(pool.end("a", AttemptOutcome.FAILED)) == ["b"]
    assert told_waiting(pool.requeue("a", seconds=60)) == {"a": ["backoff"]}
    assert "backoff" in pool.why("a")
    pool.end("b")
    assert placed(pool.after(seconds=59)) == []
    assert placed(pool.after(seconds=1)) == ["a"]
    assert pool.core.jobs["a"].attempt == 2


def test_release_is_told_once_and_stale_ends_change_nothing() -> None:
    pool = Pool(a_node("n1"))
    pool.submit("a", gpus=4)
    job = pool.core.jobs["a"]
    old = AttemptEnded(
        job_id="a", attempt=1, fence=job.fence, outcome=AttemptOutcome.FAILED, ended_at=pool.now, workers=None
    )
    assert [fact.gpus for fact in of_type(pool.tell(old), AllocationReleased)] == [4]
    assert pool.tell(old) == []
    pool.requeue("a")
    assert pool.core.jobs["a"].fence == job.fence == 2
    assert pool.tell(old) == []
    assert pool.used() == 4


def test_requeue_told_before_the_release_waits_for_it() -> None:
    pool = Pool(a_node("n1"))
    pool.submit("a", gpus=8)
    assert pool.requeue("a") == []
    assert placed(pool.end("a", AttemptOutcome.PREEMPTED)) == ["a"]


def test_cancel_ends_a_waiting_job_and_sticks_to_one_that_is_not_known_yet() -> None:
    pool = Pool(a_node("n1"))
    pool.submit("a", gpus=8)
    pool.submit("b", gpus=8)
    assert [fact.job_id for fact in of_type(pool.cancel("b"), JobCancelled)] == ["b"]
    assert pool.cancel("c") == []
    assert [fact.job_id for fact in of_type(pool.submit("c"), JobCancelled)] == ["c"]
    assert pool.cancel("a") == []
    pool.end("a", AttemptOutcome.FAILED)
    assert [fact.job_id for fact in of_type(pool.requeue("a"), JobCancelled)] == ["a"]
    assert not {"job", "cancel", "plan"} & {kind for kind, _ in pool.store}


def test_old_cancel_of_an_unknown_job_is_dropped() -> None:
    pool = Pool()
    pool.cancel("never-came")
    assert ("cancel", "never-came") in pool.store
    pool.after(days=8)
    assert ("cancel", "never-came") not in pool.store


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        (a_node("n1", version=2, state=NodeState.SUSPECT), "node_unhealthy"),
        (a_node("n1", version=2, state=NodeState.LOST), "node_unhealthy"),
        (a_node("n1", version=2, cordoned=True), "node_unhealthy"),
        (a_node("n1", version=2, bad=range(8)), "node_unhealthy"),
    ],
)
def test_node_out_of_service_keeps_its_work_and_gets_none(changed: object, code: str) -> None:
    pool = Pool(a_node("n1"))
    pool.submit("a", gpus=4)
    assert pool.tell(changed) == []  # type: ignore[arg-type]
    assert pool.used() == 4
    said = pool.submit("b", gpus=4)
    assert code in told_waiting(said)["b"]
    assert placed(pool.end("a")) == []
    assert placed(pool.tell(a_node("n1", version=3))) == ["b"]


def test_older_news_of_a_node_is_ignored() -> None:
    pool = Pool(a_node("n1", version=5))
    pool.tell(a_node("n1", version=4, state=NodeState.LOST))
    assert placed(pool.submit("a", gpus=8)) == ["a"]


def test_waiting_is_told_again_only_when_the_codes_change() -> None:
    pool = Pool(a_node("n1", gpus=4), a_node("n2", gpus=4))
    pool.submit("a", gpus=1)
    pool.submit("b", gpus=2)
    pool.submit("big", workers=2, gpus=4)
    assert of_type(pool.end("a"), JobWaiting) == []
    assert of_type(pool.submit("c", gpus=1), JobWaiting) == []


def test_nothing_is_placed_before_a_policy_is_in_force() -> None:
    pool = Pool.__new__(Pool)
    from berth.decisions.placement.core import PlacementCore
    from tests.unit.decisions.builders import Driver

    Driver.__init__(pool, PlacementCore())
    pool.tell(a_node("n1"))
    assert placed(pool.submit("a", gpus=1)) == []
    assert placed(pool.set_policy(a_policy())) == ["a"]


def test_restart_goes_on_with_the_same_numbers() -> None:
    pool = Pool(a_node("n1"))
    pool.submit("a", gpus=8)
    pool.submit("b", gpus=4)
    pool.cancel("x")
    again = pool.restarted()
    there = Pool.__new__(Pool)
    there.__dict__ = again.__dict__
    assert placed(there.end("a")) == ["b"]
    assert there.core.jobs["b"].fence == 2
    assert there.ids == ["a.2.AllocationReleased", "b.2.JobPlaced"]
    assert of_type(there.submit("x"), JobCancelled)


def test_receipt_names_versions_and_candidates() -> None:
    pool = Pool(*(a_node(f"n{i}") for i in range(1, 6)))
    receipt = of_type(pool.submit("a", gpus=4), JobPlaced)[0].receipt
    assert (receipt.policy_version, receipt.state_version) == (1, 7)
    assert [c["node"] for c in receipt.candidates] == ["n1", "n2", "n3"]
    assert len(receipt.digest) == 16
