"""The real binding against a stand-in for the library; two other programs read the same cards as witnesses."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.node_agent.driver.base import (
    FaultKind,
    GpuDriverError,
    GpuProcess,
    HealthLevel,
    LinkClass,
    MigState,
    Tier,
)
from services.node_agent.driver.nvml import NvmlDriver
from tests.fake_nvml import build as fake

EVENT_NUMBERS = itertools.count(1)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = fake.build(tmp_path_factory.mktemp("nvml"))
    fake.load(built)
    return built


@pytest.fixture
def driver(library: Path) -> Iterator[NvmlDriver]:
    driver = NvmlDriver()
    yield driver
    driver.close()


def test_cards_are_described_as_the_library_says(driver: NvmlDriver, tmp_path: Path) -> None:
    fake.FakeNvml.of(tmp_path / "state", 4)
    driver.open()
    gpus = driver.gpus()
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    first = gpus[0]
    assert (first.card_type, first.memory_mib, first.driver_version) == ("H100-80G", 81559, "580.65.06")
    assert (first.pci_bus_id, first.compute_capability, first.serial) == ("0000:3b:00.0", (9, 0), "")
    assert (first.mig, first.persistence) == (MigState.DISABLED, True)


def test_readings_leave_out_what_the_driver_keeps_for_itself(driver: NvmlDriver, tmp_path: Path) -> None:
    fake.FakeNvml.of(tmp_path / "state", 1, used=1000, reserved=600, util=50, power=350_000, temp=61, memtemp=70)
    driver.open()
    reading = driver.telemetry(Tier.WARM)[0]
    assert (reading.memory_used_mib, reading.memory_reserved_mib, reading.memory_total_mib) == (1000, 600, 81559)
    assert (reading.utilization_percent, reading.power_watts) == (50.0, 350.0)
    assert (reading.temperature_celsius, reading.memory_temperature_celsius) == (61.0, 70)
    assert (reading.sm_clock_mhz, reading.memory_clock_mhz, reading.clock_reasons) == (345, 2619, 1)


def test_hot_readings_leave_out_what_is_slow(driver: NvmlDriver, tmp_path: Path) -> None:
    fake.FakeNvml.of(tmp_path / "state", 1)
    driver.open()
    reading = driver.telemetry(Tier.HOT)[0]
    assert (reading.temperature_celsius, reading.sm_clock_mhz) == (None, None)
    assert reading.memory_used_mib == 0


def test_power_is_the_mean_since_the_last_reading_where_energy_is_counted(
    driver: NvmlDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 1, energy=1_000_000, power=1)
    clock = iter([100.0, 110.0])
    monkeypatch.setattr("services.node_agent.driver.nvml.time.monotonic", lambda: next(clock))
    driver.open()
    driver.telemetry(Tier.HOT)
    state.set(0, energy=1_000_000 + 3_000_000)  # 3,000 J in 10 s
    assert driver.telemetry(Tier.HOT)[0].power_watts == 300.0


def test_processes_are_listed_with_their_share(driver: NvmlDriver, tmp_path: Path) -> None:
    fake.FakeNvml.of(tmp_path / "state", 2).say(f"proc 1 {os.getpid()} 1000 37", f"proc 1 {os.getppid()} -1 120")
    driver.open()
    idle, busy = driver.telemetry(Tier.WARM)
    assert idle.processes == ()
    assert busy.processes is not None
    assert set(busy.processes) == {GpuProcess(os.getpid(), 1000, 37), GpuProcess(os.getppid(), None, None)}
    assert busy.processes_trusted


def test_a_process_list_that_cannot_be_true_is_not_believed(driver: NvmlDriver, tmp_path: Path) -> None:
    fake.FakeNvml.of(tmp_path / "state", 2).say(f"proc 0 {os.getpid()} 999999 10", "proc 1 4194300 10 10")
    driver.open()
    assert [reading.processes_trusted for reading in driver.telemetry(Tier.HOT)] == [False, False]


def test_many_processes_are_fetched_whole(driver: NvmlDriver, tmp_path: Path) -> None:
    lines = [f"proc 0 {pid} 1 1" for pid in range(1, 41)]
    fake.FakeNvml.of(tmp_path / "state", 1).say(*lines)
    driver.open()
    assert len(driver.telemetry(Tier.HOT)[0].processes or ()) == 40


@pytest.mark.parametrize("is_switched", [True, False])
def test_nvlink_is_told_from_nvswitch(driver: NvmlDriver, tmp_path: Path, is_switched: bool) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 4, switch=int(is_switched))
    state.say("link 0 1", "link 2 3", "near 0 2 40", "near 0 3 20")
    driver.open()
    topology = driver.topology()
    expected = LinkClass.NVSWITCH if is_switched else LinkClass.NVLINK
    assert topology.matrix[0] == (LinkClass.SELF, expected, LinkClass.NODE, LinkClass.PXB)
    assert topology.matrix[1][2] is LinkClass.SYS
    assert topology.link_groups == ((0, 1), (2, 3))
    assert topology.fabric == ""


def test_slices_are_found_though_their_numbers_have_holes(driver: NvmlDriver, tmp_path: Path) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 2).set(0, mig=1).set(1, mig=2)
    state.say("mig 0 0 MIG-aaaa 1 9728", "mig 0 3 MIG-bbbb 3 40448")
    driver.open()
    partitioned, changing = driver.gpus()
    assert [(m.uuid, m.profile) for m in partitioned.mig_instances] == [
        ("MIG-aaaa", "1g.10gb"),
        ("MIG-bbbb", "3g.40gb"),
    ]
    assert changing.mig is MigState.CHANGING
    assert driver.telemetry(Tier.WARM)[0].utilization_percent is None


# -- faults


def test_a_reading_the_card_does_not_have_is_none_and_not_asked_again(driver: NvmlDriver, tmp_path: Path) -> None:
    lost = ["fail nvmlDeviceGetSamples 3", "fail nvmlDeviceGetUtilizationRates 3"]
    state = fake.FakeNvml.of(tmp_path / "state", 1, util=40).say(*lost)
    driver.open()
    assert driver.telemetry(Tier.HOT)[0].utilization_percent is None
    state.unsay(lost)
    assert driver.telemetry(Tier.HOT)[0].utilization_percent is None


def test_a_passing_fault_is_asked_again(driver: NvmlDriver, tmp_path: Path) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 1)
    driver.open()
    state.say("fail nvmlDeviceGetMemoryInfo_v2 999")
    assert driver.telemetry(Tier.HOT)[0].memory_used_mib == 600  # the older call stands in, reserve included
    state.say("fail nvmlDeviceGetMemoryInfo 27")
    assert driver.telemetry(Tier.HOT)[0].memory_used_mib is None
    state.lines.clear()
    state.write()
    assert driver.telemetry(Tier.HOT)[0].memory_used_mib == 0


def test_a_card_that_cannot_be_read_at_first_is_found_later(driver: NvmlDriver, tmp_path: Path) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 2).set(0, lost=1)
    driver.open()
    assert [gpu.index for gpu in driver.gpus()] == [1]
    state.set(0, lost=0)
    assert [gpu.index for gpu in driver.gpus()] == [0, 1]


def test_a_lost_card_is_lost_and_the_others_go_on(driver: NvmlDriver, tmp_path: Path) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 2)
    driver.open()
    state.set(0, lost=1)
    lost, well = driver.telemetry(Tier.WARM)
    assert (lost.memory_used_mib, lost.processes) == (None, None)
    assert well.memory_used_mib == 0
    assert [health.level for health in driver.health()] == [HealthLevel.LOST, HealthLevel.OK]
    state.set(0, lost=0)
    assert driver.health()[0].level is HealthLevel.OK


@pytest.mark.parametrize(
    ("changes", "level"),
    [
        ({"failed": 1}, HealthLevel.FAILED),
        ({"action": 2}, HealthLevel.FAILED),
        ({"pending": 1}, HealthLevel.DRAINING),
        ({"action": 4}, HealthLevel.DRAINING),
        ({"reasons": 0x40}, HealthLevel.DEGRADED),
        ({"reasons": 0x4}, HealthLevel.OK),
    ],
)
def test_health_follows_from_the_cards_own_counters(
    driver: NvmlDriver, tmp_path: Path, changes: dict[str, int], level: HealthLevel
) -> None:
    fake.FakeNvml.of(tmp_path / "state", 1, **changes)
    driver.open()
    assert driver.health()[0].level is level


def test_an_exchanged_driver_is_told_from_a_broken_card(driver: NvmlDriver, tmp_path: Path) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 1)
    driver.open()
    state.say("fail nvmlDeviceGetUtilizationRates 18")
    with pytest.raises(GpuDriverError) as caught:
        driver.telemetry(Tier.HOT)
    assert caught.value.kind is FaultKind.RELOAD


def test_no_driver_is_an_error_at_opening(driver: NvmlDriver, tmp_path: Path) -> None:
    fake.FakeNvml.of(tmp_path / "state", 1).say("fail nvmlInitWithFlags 9")
    with pytest.raises(GpuDriverError) as caught:
        driver.open()
    assert caught.value.kind is FaultKind.RELOAD


def test_xid_events_name_card_and_code(driver: NvmlDriver, tmp_path: Path) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 2)
    driver.open()
    assert driver.events(0.0) == ()
    state.say(f"xid {next(EVENT_NUMBERS)} 1 31")
    (event,) = driver.events(1.0)
    assert (event.uuid, event.xid) == (driver.gpus()[1].uuid, 31)
    assert driver.events(0.0) == ()


def test_a_loss_without_a_name_is_found_by_looking_at_all(driver: NvmlDriver, tmp_path: Path) -> None:
    state = fake.FakeNvml.of(tmp_path / "state", 2)
    driver.open()
    driver.events(0.0)
    state.set(1, lost=1).say(f"lostevent {next(EVENT_NUMBERS)}")
    (event,) = driver.events(1.0)
    assert (event.uuid, event.xid) == ("", 79)
    assert [health.level for health in driver.health()] == [HealthLevel.OK, HealthLevel.LOST]
    state.say(f"xid {next(EVENT_NUMBERS)} 0 13")
    assert [event.xid for event in driver.events(1.0)] == [13]


# -- witnesses


def _installed(name: str) -> None:
    """Without importing it here: nvitop replaces functions of `pynvml` when it is imported."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")


def _elsewhere(library: Path, *command: str) -> str:
    env = {**os.environ, "LD_LIBRARY_PATH": str(library.parent)}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gpustat_sees_the_same_cards(library: Path, driver: NvmlDriver, tmp_path: Path) -> None:
    _installed("gpustat")
    fake.FakeNvml.of(tmp_path / "state", 2, util=55, used=2000, temp=50).say(f"proc 0 {os.getpid()} 1500 55")
    driver.open()
    seen = json.loads(_elsewhere(library, "-m", "gpustat", "--json"))
    assert [gpu["uuid"] for gpu in seen["gpus"]] == [gpu.uuid for gpu in driver.gpus()]
    first = seen["gpus"][0]
    reading = driver.telemetry(Tier.WARM)[0]
    assert (first["utilization.gpu"], first["temperature.gpu"]) == (55, reading.temperature_celsius)
    assert first["memory.used"] == reading.memory_used_mib
    assert [process["pid"] for process in first["processes"]] == [os.getpid()]


def test_nvitop_sees_the_same_cards(library: Path, driver: NvmlDriver, tmp_path: Path) -> None:
    _installed("nvitop")
    fake.FakeNvml.of(tmp_path / "state", 2, util=20, used=3000).say(f"proc 1 {os.getpid()} 1500 20")
    driver.open()
    code = (
        "from nvitop import Device; import json;"
        "print(json.dumps([[d.uuid(), d.memory_used() >> 20, sorted(d.processes())] for d in Device.all()]))"
    )
    seen = json.loads(_elsewhere(library, "-c", code))
    readings = driver.telemetry(Tier.HOT)
    assert [entry[:2] for entry in seen] == [[reading.uuid, reading.memory_used_mib] for reading in readings]
    assert seen[1][2] == [os.getpid()]
