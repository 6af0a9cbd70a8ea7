"""Who is heard, who is lost, and which cards may get work."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from berth.contracts.events import (
    GpuConditionReported,
    NodeChanged,
    NodeCordonRequested,
    NodeLost,
    PolicyActivated,
    StartFailed,
)
from berth.contracts.nodes import (
    GpuHealthState,
    GpuReading,
    NodeAccepted,
    NodeState,
    RegisterNode,
    RegistrationRefused,
    TelemetryFrame,
)
from berth.contracts.reasons import Code, because
from berth.decisions.health import InventoryCore
from tests.unit.decisions.desks import START, Desk, described, kinds

POLICY = PolicyActivated(
    policy_version=1,
    author="user:ops",
    document={
        "defaults": {
            "recovery": {"suspect_after": 30, "lost_after": 300, "quarantine": {"failures": 2, "within": 600}}
        },
        "health": {"fatal_xids": [79], "harmless_xids": [31]},
        "cleaning": {"wait": 60},
    },
)


@pytest.fixture
def desk() -> Desk[InventoryCore]:
    desk = Desk(InventoryCore())
    desk.feed(POLICY)
    return desk


def set_policy(desk: Desk[InventoryCore], lost_after: int) -> None:
    recovery = {"suspect_after": min(8, lost_after), "lost_after": lost_after}
    document = {**POLICY.document, "defaults": {"recovery": recovery}}
    desk.feed(POLICY.model_copy(update={"policy_version": desk.core.policy_version + 1, "document": document}))


def join(desk: Desk[InventoryCore], *nodes: str) -> list[Any]:
    for node in nodes:
        desk.core.register(RegisterNode(description=described(node), sent_at=desk.now), now=desk.now)
    return desk.settle()


def frame(desk: Desk[InventoryCore], node: str, *, epoch: int = 1, skew: float = 0) -> TelemetryFrame:
    return TelemetryFrame(
        node=node,
        epoch=epoch,
        sequence=1,
        sent_at=desk.now + timedelta(seconds=skew),
        gpus=(GpuReading(uuid=f"GPU-{node}-0", utilization_percent=50),),
    )


def beat(desk: Desk[InventoryCore], seconds: int, *nodes: str) -> list[Any]:
    """Let time pass while only these nodes are heard."""
    told = []
    for _ in range(seconds // 5):
        told += desk.wait(5)
        for node in nodes:
            desk.core.heard(frame(desk, node), now=desk.now)
        told += desk.settle()
    return told


def condition(gpu: int, **what: Any) -> GpuConditionReported:
    return GpuConditionReported(node="n1", epoch=1, gpu=f"GPU-n1-{gpu}", at=START, **what)


def test_each_registration_is_a_new_epoch_also_after_a_restart(desk: Desk[InventoryCore]) -> None:
    assert kinds(join(desk, "n1")) == ["NodeRegistered", "NodeChanged"]
    desk.restart(InventoryCore())
    answer = desk.core.register(RegisterNode(description=described("n1"), sent_at=desk.now), now=desk.now)
    assert isinstance(answer, NodeAccepted)
    assert answer.epoch == 2
    assert answer.platform_time == desk.now


def test_a_card_has_one_agent(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1")
    twin = described("n1").model_copy(update={"node": "n2"})
    answer = desk.core.register(RegisterNode(description=twin, sent_at=desk.now), now=desk.now)
    assert isinstance(answer, RegistrationRefused)
    assert answer.reason.facts["held_by_node"] == "n1"
    assert desk.settle() == []


def test_silence_makes_a_node_suspect_then_lost_and_both_are_told_whole(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1", "n2")
    assert kinds(beat(desk, 35, "n1")) == ["NodeSuspect", "NodeChanged"]
    assert desk.last(NodeChanged).state is NodeState.SUSPECT
    assert kinds(beat(desk, 300, "n1")) == ["NodeLost", "NodeChanged"]
    assert desk.core.state("n2") is NodeState.LOST


def test_a_word_in_time_brings_a_suspect_node_back(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1", "n2")
    beat(desk, 200, "n1")
    renewed = desk.core.heard(frame(desk, "n2"), now=desk.now)
    assert not renewed.register_again
    assert kinds(desk.settle()) == ["NodeBack", "NodeChanged"]
    assert kinds(beat(desk, 100, "n1", "n2")) == []


def test_a_lost_node_must_register_again(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1", "n2")
    beat(desk, 400, "n1")
    assert desk.core.heard(frame(desk, "n2"), now=desk.now).register_again
    assert desk.settle() == []
    assert kinds(join(desk, "n2")) == ["NodeRegistered", "NodeBack", "NodeChanged"]


def test_nobody_is_lost_while_less_than_half_is_heard(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1", "n2", "n3")
    told = beat(desk, 1000, "n1")
    assert "NodeLost" not in kinds(told)
    beat(desk, 10, "n1", "n2")
    assert kinds(beat(desk, 60, "n1", "n2")) == ["NodeLost", "NodeChanged"]


def test_a_restart_counts_silence_from_its_own_start(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1", "n2")
    desk.now += timedelta(hours=1)
    desk.restart(InventoryCore())
    assert kinds(desk.settle()) == []
    assert kinds(beat(desk, 20, "n1")) == []
    assert "NodeLost" not in kinds(beat(desk, 250, "n1"))
    assert [lost.node for lost in desk.all(NodeLost)] == []
    assert kinds(beat(desk, 60, "n1")) == ["NodeLost", "NodeChanged"]


def test_our_own_deafness_is_not_their_silence(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1", "n2")
    desk.now += timedelta(seconds=290)
    desk.core.was_deaf(now=desk.now)
    assert desk.settle() == []
    assert kinds(beat(desk, 25, "n1", "n2")) == []


def test_while_we_hear_nobody_nobody_is_judged(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1", "n2")
    desk.core.goes_deaf()
    assert desk.wait(3600) == []
    desk.core.was_deaf(now=desk.now)
    assert kinds(beat(desk, 60, "n1", "n2")) == []


@pytest.mark.parametrize("lost_after", [6, 12, 45, 120, 300, 3600])
def test_the_agents_lease_and_its_time_to_stop_end_before_we_call_it_lost(
    desk: Desk[InventoryCore], lost_after: int
) -> None:
    set_policy(desk, lost_after)
    accepted = desk.core.register(RegisterNode(description=described("n1"), sent_at=desk.now), now=desk.now)
    assert isinstance(accepted, NodeAccepted)
    renewed = desk.core.heard(frame(desk, "n1"), now=desk.now)
    for told in (accepted, renewed):
        assert told.lease_seconds + told.stop_seconds == pytest.approx(lost_after)
        assert told.stop_seconds >= min(12, lost_after / 3)


def test_a_shorter_patience_does_not_break_the_leases_that_were_given(desk: Desk[InventoryCore]) -> None:
    set_policy(desk, 300)
    join(desk, "n1", "n2", "n3")
    set_policy(desk, 10)
    desk.restart(InventoryCore())
    assert "NodeLost" not in kinds(beat(desk, 290, "n1", "n2"))
    beat(desk, 20, "n1", "n2")
    assert [lost.node for lost in desk.all(NodeLost)] == ["n3"]


def test_frames_are_wanted_several_times_before_a_node_is_suspect(desk: Desk[InventoryCore]) -> None:
    assert desk.core.telemetry_every_seconds * 3 < 30


def test_a_wrong_clock_is_told_once_and_decides_nothing(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1")
    for _ in range(3):
        desk.core.heard(frame(desk, "n1", skew=-600), now=desk.now)
    assert kinds(desk.settle()) == ["ClockSkewFound"]
    desk.core.heard(frame(desk, "n1"), now=desk.now)
    desk.core.heard(frame(desk, "n1", skew=3600), now=desk.now)
    assert kinds(desk.settle()) == ["ClockSkewFound"]
    assert desk.core.state("n1") is NodeState.READY


def test_a_fatal_code_takes_one_card_out_until_it_passes_its_check(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1")
    assert desk.feed(condition(1, xid=31)) == []
    assert kinds(desk.feed(condition(5, xid=79))) == ["GpuOut", "NodeChanged"]
    assert desk.feed(condition(5, xid=79)) == []
    assert [g.index for g in desk.last(NodeChanged).gpus if g.health is not GpuHealthState.HEALTHY] == [5]
    join(desk, "n1")  # a restarted agent does not heal it
    assert [g.index for g in desk.last(NodeChanged).gpus if g.health is not GpuHealthState.HEALTHY] == [5]
    assert kinds(desk.feed(condition(5, passed_check=True))) == ["GpuReturned", "NodeChanged"]


def test_a_card_with_memory_nobody_owns_is_not_clean_until_it_is_empty(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1")
    told = desk.feed(condition(0, memory_used_mib=61440, after_job=True))
    assert kinds(told) == ["OrphanFound", "NodeChanged"]
    assert told[0].used_gib == 60
    assert told[1].gpus[0].health is GpuHealthState.NOT_CLEAN
    assert desk.feed(condition(0, memory_used_mib=30000)) == []
    assert kinds(desk.feed(condition(0, memory_used_mib=0))) == ["OrphanRemoved", "NodeChanged"]


def test_failed_starts_in_a_short_time_quarantine_a_node_until_it_is_uncordoned(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1")
    failed = StartFailed(job_id="j1", attempt=1, node="n1", worker=0, reason=because(Code.START_REFUSED))
    assert desk.feed(failed) == []
    beat(desk, 660, "n1")
    assert desk.feed(failed) == []
    assert kinds(desk.feed(failed)) == ["NodeQuarantined", "NodeChanged"]
    join(desk, "n1")
    assert desk.core.state("n1") is NodeState.QUARANTINED
    uncordon = NodeCordonRequested(node="n1", cordoned=False, requested_by="user:ops")
    assert kinds(desk.feed(uncordon)) == ["NodeChanged"]
    assert desk.core.state("n1") is NodeState.READY


def test_a_cordoned_node_is_told_once_and_keeps_its_cordon_over_a_restart(desk: Desk[InventoryCore]) -> None:
    join(desk, "n1")
    cordon = NodeCordonRequested(node="n1", cordoned=True, requested_by="user:ops")
    assert kinds(desk.feed(cordon, cordon)) == ["NodeChanged"]
    desk.restart(InventoryCore())
    assert desk.core.state("n1") is NodeState.CORDONED


def test_the_answer_about_nodes_has_health_and_readings_of_now(desk: Desk[InventoryCore]) -> None:
    join(desk, "n2", "n1")
    desk.feed(condition(3, xid=79))
    desk.core.heard(frame(desk, "n1"), now=desk.now)
    first, second = desk.core.nodes(now=desk.now).nodes
    assert (first.node, second.node) == ("n1", "n2")
    assert first.readings[0].utilization_percent == 50
    assert first.description.gpus[3].health is GpuHealthState.QUARANTINED
    assert second.readings == ()
    assert desk.core.nodes("n9").nodes == ()
