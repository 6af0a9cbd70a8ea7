"""Frames: what is told of the cards, and what is not."""

import time

from berth.contracts.nodes import GpuReading
from services.node_agent.cleaning import leftovers
from services.node_agent.driver.base import GpuProcess, GpuTelemetry
from services.node_agent.sampling import STALE_SECONDS, Window

SECOND = 10**9
NOW = time.time_ns()


def a_reading(at: float = 0, **values: object) -> GpuTelemetry:
    return GpuTelemetry("GPU-0", NOW + int(at * SECOND), **values)  # type: ignore[arg-type]


def frame(*readings: GpuTelemetry, at: float = 0) -> GpuReading:
    window = Window()
    for reading in readings:
        window.add([reading])
    return window.take(NOW + int(at * SECOND))[0]


def test_a_frame_holds_means_of_what_varies_and_the_latest_of_the_rest() -> None:
    told = frame(
        a_reading(0, utilization_percent=0, power_watts=100, memory_used_mib=10),
        a_reading(1, utilization_percent=90, power_watts=300, memory_used_mib=20, processes=()),
    )
    assert (told.utilization_percent, told.power_watts, told.memory_used_mib, told.process_count) == (
        45.0,
        200.0,
        20,
        0,
    )


def test_what_is_read_seldom_stays_from_the_last_time() -> None:
    told = frame(a_reading(0, temperature_celsius=60, sm_clock_mhz=1500), a_reading(1))
    assert (told.temperature_celsius, told.sm_clock_mhz) == (60, 1500)


def test_a_reading_that_stands_still_proves_nothing() -> None:
    frozen = a_reading(0, utilization_percent=90, memory_used_mib=10)
    assert frame(frozen, at=STALE_SECONDS - 1).utilization_percent == 90
    assert frame(frozen, frozen, at=STALE_SECONDS + 1) == GpuReading(uuid="GPU-0")


def test_the_same_reading_again_is_no_further_evidence() -> None:
    busy, idle = a_reading(0, utilization_percent=100), a_reading(1, utilization_percent=0)
    assert frame(busy, busy, busy, idle).utilization_percent == 50.0


def test_a_process_list_that_is_not_believed_is_not_told() -> None:
    told = frame(a_reading(processes=(GpuProcess(1),), processes_trusted=False))
    assert told.process_count is None


def test_the_next_frame_begins_anew() -> None:
    window = Window()
    window.add([a_reading(0, utilization_percent=100)], took_ms=7)
    assert window.took_ms == 7
    window.take(NOW)
    window.add([a_reading(1, utilization_percent=0)])
    assert window.take(NOW + SECOND)[0].utilization_percent == 0


def test_memory_in_use_without_a_worker_is_left_over() -> None:
    readings = [
        GpuTelemetry("used", NOW, memory_used_mib=600),
        GpuTelemetry("context", NOW, memory_used_mib=100),
        GpuTelemetry("process", NOW, memory_used_mib=100, processes=(GpuProcess(1),)),
        GpuTelemetry("unknown", NOW),
        GpuTelemetry("held", NOW, memory_used_mib=9_000),
    ]
    cards = frozenset({"used", "context", "process", "unknown"})
    assert leftovers(readings, cards, unclean_from_mib=512) == {"used": 600, "process": 100}
