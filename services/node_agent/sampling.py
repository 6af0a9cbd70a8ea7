"""Readings of the cards: taken in tiers, kept per window, sent as compact frames."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

from berth.contracts.nodes import GpuReading, TelemetryFrame
from berth.telemetry.logs import get_logger
from services.node_agent.cleaning import tell_condition, watch_cleanliness
from services.node_agent.deps import Deps
from services.node_agent.driver.base import FaultKind, GpuDriverError, GpuHealth, GpuTelemetry, HealthLevel, Tier
from services.node_agent.driver.sim import SimDriver
from services.node_agent.node import Node

HOT_SECONDS: Final = 1.0
WARM_EVERY: Final = 10
COLD_EVERY: Final = 60
EVENT_WAIT_SECONDS: Final = 2.0
STALE_SECONDS: Final = 15.0
"""A reading whose time stamp stands still for so long proves nothing any more."""
_HEALTH_XIDS: Final = {HealthLevel.LOST: 79, HealthLevel.FAILED: 64, HealthLevel.DRAINING: 63}
"""Faults seen in a card's counters are told as the Xid the driver has for them (off the bus, remap failed, pending)."""

log = get_logger("node_agent")


class DriverGone(Exception):
    """The driver was exchanged: this process can never talk to the cards again and has to be started anew."""


class Window:
    """What was read of a node's cards since the last frame."""

    def __init__(self) -> None:
        self.latest: dict[str, GpuTelemetry] = {}
        self.took_ms = 0.0
        self._warm: dict[str, GpuTelemetry] = {}
        self._utilization: dict[str, tuple[float, int]] = {}
        self._power: dict[str, tuple[float, int]] = {}

    def add(self, readings: Iterable[GpuTelemetry], took_ms: float = 0.0) -> None:
        """Take in one sample of all cards."""
        self.took_ms = max(self.took_ms, took_ms)
        for reading in readings:
            previous = self.latest.get(reading.uuid)
            self.latest[reading.uuid] = reading
            if reading.temperature_celsius is not None or reading.sm_clock_mhz is not None:
                self._warm[reading.uuid] = reading
            if previous is not None and previous.taken_at_ns == reading.taken_at_ns:
                continue  # the same reading again is no further evidence
            _accumulate(self._utilization, reading.uuid, reading.utilization_percent)
            _accumulate(self._power, reading.uuid, reading.power_watts)

    def take(self, now_ns: int) -> tuple[GpuReading, ...]:
        """Means since the last call for what varies, latest values for the rest."""
        readings = tuple(self._reading(uuid, latest, now_ns) for uuid, latest in self.latest.items())
        self._utilization.clear()
        self._power.clear()
        self.took_ms = 0.0
        return readings

    def _reading(self, uuid: str, latest: GpuTelemetry, now_ns: int) -> GpuReading:
        if now_ns - latest.taken_at_ns > STALE_SECONDS * 1e9:
            return GpuReading(uuid=uuid)
        warm = self._warm.get(uuid, latest)
        known = latest.processes if latest.processes_trusted else None
        return GpuReading(
            uuid=uuid,
            utilization_percent=_mean(self._utilization, uuid, latest.utilization_percent),
            memory_used_mib=latest.memory_used_mib,
            power_watts=_mean(self._power, uuid, latest.power_watts),
            temperature_celsius=warm.temperature_celsius,
            sm_clock_mhz=warm.sm_clock_mhz,
            process_count=None if known is None else len(known),
        )


def _accumulate(sums: dict[str, tuple[float, int]], uuid: str, value: float | None) -> None:
    if value is not None:
        total, count = sums.get(uuid, (0.0, 0))
        sums[uuid] = (total + value, count + 1)


def _mean(sums: dict[str, tuple[float, int]], uuid: str, otherwise: float | None) -> float | None:
    total, count = sums.get(uuid, (0.0, 0))
    return round(total / count, 1) if count else otherwise


def build_frame(node: Node, window: Window) -> TelemetryFrame:
    """The next frame of a node's session."""
    assert node.session is not None
    took_ms = window.took_ms
    return TelemetryFrame(
        node=node.name,
        epoch=node.session.epoch,
        sequence=node.session.sequence,
        sent_at=datetime.now(UTC),
        gpus=window.take(time.time_ns()),
        workers=len(node.live()),
        took_ms=round(took_ms, 1),
    )


class Sampler:
    """Fills the window of one node and reports what is wrong with its cards."""

    def __init__(self, node: Node, deps: Deps) -> None:
        self.window = Window()
        self._node = node
        self._deps = deps
        self._levels: dict[str, HealthLevel] = {}
        self._failures = 0

    def sample_now(self) -> None:
        """One reading of simulated cards: cheap, in memory."""
        readings = self._node.driver.telemetry(Tier.WARM)
        self.window.add(readings)
        watch_cleanliness(self._node, readings, self._deps)
        self.tell_events(self._node.driver.events(0))
        self.tell_health(self._node.driver.health())

    async def run(self) -> None:
        """Read real cards in their tiers, for ever; a tier that takes too long is asked less often.

        Raises:
            DriverGone: only a new process can go on.
        """
        turn = 0
        while True:
            began = time.monotonic()
            try:
                await self._sample_once(turn)
                self._failures = 0
            except GpuDriverError as error:
                self._on_failure(error)
            took = time.monotonic() - began
            turn += 1
            await asyncio.sleep(max(HOT_SECONDS - took, took))

    async def _sample_once(self, turn: int) -> None:
        tier = Tier.WARM if turn % WARM_EVERY == 0 else Tier.HOT
        began = time.monotonic()
        readings = await asyncio.to_thread(self._node.driver.telemetry, tier)
        self.window.add(readings, (time.monotonic() - began) * 1000)
        watch_cleanliness(self._node, readings, self._deps)
        if turn % COLD_EVERY == 0:
            self.tell_health(await asyncio.to_thread(self._node.driver.health))
            await self._look_for_changes()

    async def _look_for_changes(self) -> None:
        """A card that came back, or was partitioned anew: the platform hears of it by a new registration."""
        before = self._node.gpus
        await asyncio.to_thread(self._node.look_at_cards)
        if self._node.gpus != before:
            log.info("cards have changed", node=self._node.name, cards=len(self._node.gpus))
            self._node.end_session()

    def _on_failure(self, error: GpuDriverError) -> None:
        self._failures += 1
        if error.kind is FaultKind.RELOAD:
            raise DriverGone(str(error)) from error
        if self._failures in (1, 3) or self._failures % 60 == 0:
            log.warning("cards cannot be read", node=self._node.name, times=self._failures, error=str(error))

    async def watch_events(self) -> None:
        """Wait for faults the cards report, for ever."""
        while True:
            try:
                self.tell_events(await asyncio.to_thread(self._node.driver.events, EVENT_WAIT_SECONDS))
            except GpuDriverError as error:
                if error.kind is FaultKind.RELOAD:
                    raise DriverGone(str(error)) from error
                log.warning("card events cannot be read", node=self._node.name, error=str(error))
                await asyncio.sleep(EVENT_WAIT_SECONDS)

    def tell_events(self, events: Iterable[object]) -> None:
        """Report faults; a card that is lost without a name is found by its health."""
        from services.node_agent.driver.base import GpuEvent

        for event in events:
            if isinstance(event, GpuEvent) and event.uuid:
                tell_condition(self._node, event.uuid, self._deps, xid=event.xid)
            elif not isinstance(self._node.driver, SimDriver):
                self.tell_health(self._node.driver.health())

    def tell_health(self, healths: Iterable[GpuHealth]) -> None:
        """Report cards that turned bad by their own counters, and those that are well again. Each change once.

        What could not be read says nothing, neither way.
        """
        for health in healths:
            before = self._levels.get(health.uuid, HealthLevel.OK)
            if health.level in (before, HealthLevel.UNKNOWN, HealthLevel.DEGRADED):
                continue
            self._levels[health.uuid] = health.level
            if xid := _HEALTH_XIDS.get(health.level):
                if not isinstance(self._node.driver, SimDriver):  # there the event has said it
                    tell_condition(self._node, health.uuid, self._deps, xid=xid)
            elif health.level is HealthLevel.OK:
                tell_condition(self._node, health.uuid, self._deps, passed=True)
