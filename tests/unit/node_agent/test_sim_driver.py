"""Simulated cards behave like a machine that could exist."""

import pytest

from services.node_agent.driver.base import HealthLevel, LinkClass, Tier
from services.node_agent.driver.sim import SimDriver, SimSpec


def a_driver(text: str, node: str = "n1") -> SimDriver:
    return SimDriver(node, SimSpec.parse(text))


def test_identity_is_the_same_each_time_and_differs_between_nodes() -> None:
    first, again, other = a_driver("2xH100-80G"), a_driver("2xH100-80G"), a_driver("2xH100-80G", "n2")
    assert first.gpus() == again.gpus()
    uuids = {gpu.uuid for driver in (first, other) for gpu in driver.gpus()}
    assert len(uuids) == 4


@pytest.mark.parametrize("text", ["", "8", "8xH100", "8xH100-80G ring", "H100-80G", "-1xH100-80G"])
def test_a_spec_that_describes_no_node_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not like"):
        SimSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("8xH100-80G nvswitch", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("4xA40-48G nvlink2", ((0, 1), (2, 3))),
        ("8xV100-32G nvlink4", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("4xA100-40G pcie", ()),
        ("1xL4-24G", ()),
    ],
)
def test_link_groups_follow_from_the_links(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    assert a_driver(text).topology().link_groups == groups


def test_topology_is_symmetric_and_far_across_sockets() -> None:
    matrix = a_driver("4xA100-40G pcie").topology().matrix
    assert all(matrix[a][b] == matrix[b][a] for a in range(4) for b in range(4))
    assert (matrix[0][0], matrix[0][1], matrix[0][3]) == (LinkClass.SELF, LinkClass.PIX, LinkClass.SYS)


def test_readings_follow_the_processes() -> None:
    driver = a_driver("2xA100-40G")
    gpu = driver.gpus()[0]
    assert driver.telemetry(Tier.HOT)[0].memory_used_mib == 0
    driver.occupy([gpu.uuid], 4711, memory_mib=1000)
    busy, idle = driver.telemetry(Tier.WARM)
    assert (busy.memory_used_mib, busy.utilization_percent, idle.utilization_percent) == (1000, 95.0, 0.0)
    assert [process.pid for process in busy.processes or ()] == [4711]
    driver.vacate([gpu.uuid], 4711)
    assert driver.telemetry(Tier.HOT)[0].processes == ()


def test_leaked_memory_stays_when_the_process_is_gone() -> None:
    driver = a_driver("1xA100-40G")
    driver.leak(0, 5000)
    assert driver.telemetry(Tier.HOT)[0].memory_used_mib == 5000
    driver.repair(0)
    assert driver.telemetry(Tier.HOT)[0].memory_used_mib == 0


def test_frozen_readings_keep_their_time_stamp() -> None:
    driver = a_driver("1xA100-40G")
    driver.load(0, 90, is_frozen=True)
    assert driver.telemetry(Tier.HOT) == driver.telemetry(Tier.HOT)


def test_faults_are_reported_once_and_show_in_the_health() -> None:
    driver = a_driver("2xA100-40G")
    driver.fault(0, 31)
    driver.fault(1, 79)
    assert [(event.xid) for event in driver.events(1)] == [31, 79]
    assert driver.events(0) == ()
    assert [health.level for health in driver.health()] == [HealthLevel.OK, HealthLevel.LOST]
    assert driver.telemetry(Tier.HOT)[1].memory_used_mib is None
    driver.repair(1)
    assert driver.health()[1].level is HealthLevel.OK
