"""What a node accepts and refuses."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from berth.contracts.commands import LaunchWorkers, ReconcileNode, WorkerPlan
from berth.contracts.reasons import Code
from services.node_agent.rules import NodeView, refuse_launch, refuse_session
from services.node_agent.workers import TRANSITIONS, InvalidTransitionError, Phase, Trigger, Worker, advance

NOW = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
CARDS = ("GPU-0", "GPU-1")


def a_node(**changes: Any) -> NodeView:
    values: dict[str, Any] = {"name": "n1", "epoch": 3, "is_reconciled": True, "gpu_uuids": frozenset(CARDS)}
    return NodeView(**(values | changes))


def a_launch(*cards: str, job: str = "j1", fence: int = 10, milli: int = 1000, **changes: Any) -> LaunchWorkers:
    values: dict[str, Any] = {
        "node": "n1",
        "epoch": 3,
        "expires_at": NOW + timedelta(seconds=30),
        "job_id": job,
        "attempt": 1,
        "fence": fence,
        "tenant": "nlp",
        "job_class": "general",
        "name": "a job",
        "command": ("true",),
        "workers": (WorkerPlan(worker=0, gpus=cards, gpu_milli=milli),),
        "grace_seconds": 5,
    }
    return LaunchWorkers(**(values | changes))


def a_worker(*cards: str, job: str = "other", is_exclusive: bool = True) -> Worker:
    return Worker("n1", job, 1, 0, 1, 3, "c", 0.0, gpus=cards, is_exclusive=is_exclusive)


def verdict(node: NodeView, order: LaunchWorkers, **world: Any) -> Code | None:
    reason = refuse_launch(node, order, NOW, **({"live": (), "unclean": {}} | world))
    return None if reason is None else reason.code


@pytest.mark.parametrize(
    ("node", "order", "world", "expected"),
    [
        (a_node(), a_launch("GPU-0"), {}, None),
        (a_node(), a_launch(), {}, None),
        (a_node(epoch=4), a_launch(), {}, Code.WRONG_EPOCH),
        (a_node(epoch=0), a_launch(), {}, Code.WRONG_EPOCH),
        (a_node(), a_launch(expires_at=NOW), {}, Code.EXPIRED),
        (a_node(is_reconciled=False), a_launch(), {}, Code.NOT_RECONCILED),
        (a_node(job_fences={"j1": 11}), a_launch(), {}, Code.OLD_FENCE),
        (a_node(job_fences={"j1": 10}), a_launch(), {}, None),
        (a_node(job_fences={"j2": 11}), a_launch(), {}, None),
        (a_node(stopped_fences={"j1": 10}), a_launch(), {}, Code.OLD_FENCE),
        (a_node(stopped_fences={"j1": 9}), a_launch(), {}, None),
        (a_node(), a_launch("GPU-9"), {}, Code.UNSUPPORTED),
        (a_node(), a_launch("GPU-0"), {"live": [a_worker("GPU-0")]}, Code.GPU_BUSY),
        (a_node(), a_launch("GPU-0"), {"live": [a_worker("GPU-1")]}, None),
        (a_node(), a_launch("GPU-0", milli=500), {"live": [a_worker("GPU-0")]}, Code.GPU_BUSY),
        (a_node(), a_launch("GPU-0"), {"live": [a_worker("GPU-0", is_exclusive=False)]}, Code.GPU_BUSY),
        (a_node(), a_launch("GPU-0", milli=500), {"live": [a_worker("GPU-0", is_exclusive=False)]}, None),
        (a_node(), a_launch("GPU-0"), {"unclean": {"GPU-0": 60_000}}, Code.GPU_BUSY),
        (a_node(), a_launch("GPU-1"), {"unclean": {"GPU-0": 60_000}}, None),
    ],
)
def test_launches_are_judged(
    node: NodeView, order: LaunchWorkers, world: dict[str, Any], expected: Code | None
) -> None:
    assert verdict(node, order, **world) is expected


def test_a_card_refuses_fences_older_than_its_last_sole_holder() -> None:
    node = a_node()
    node.remember_launch(a_launch("GPU-0", fence=10))
    assert verdict(node, a_launch("GPU-0", job="j2", fence=9)) is Code.OLD_FENCE
    assert verdict(node, a_launch("GPU-0", job="j2", fence=9, milli=500)) is Code.OLD_FENCE
    assert verdict(node, a_launch("GPU-1", job="j2", fence=9)) is None


def test_shares_of_a_card_may_arrive_in_any_order() -> None:
    node = a_node()
    node.remember_launch(a_launch("GPU-0", fence=10, milli=500))
    assert verdict(node, a_launch("GPU-0", job="j2", fence=9, milli=500)) is None
    assert verdict(node, a_launch("GPU-0", job="j2", fence=9)) is Code.OLD_FENCE


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 20)), max_size=30))
def test_accepted_fences_of_a_job_never_go_back(launches: list[tuple[str, int]]) -> None:
    node = a_node()
    accepted: dict[str, list[int]] = {"a": [], "b": []}
    for job, fence in launches:
        order = a_launch(job=job, fence=fence)
        if verdict(node, order) is None:
            node.remember_launch(order)
            accepted[job].append(fence)
    assert all(fences == sorted(fences) for fences in accepted.values())


def test_reconciling_needs_the_same_session() -> None:
    order = ReconcileNode(node="n1", epoch=2, expires_at=NOW + timedelta(seconds=5))
    reason = refuse_session(a_node(), order, NOW)
    assert reason is not None
    assert reason.code is Code.WRONG_EPOCH


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("trigger", Trigger)
def test_workers_move_only_forward(phase: Phase, trigger: Trigger) -> None:
    order = list(Phase)
    if (phase, trigger) in TRANSITIONS:
        assert order.index(advance(phase, trigger)) > order.index(phase)
    else:
        with pytest.raises(InvalidTransitionError):
            advance(phase, trigger)
