"""Simulated cards: deterministic identity, plausible links, and readings that follow what is done to them.

A node is described in a few words, `8xH100-80G nvswitch`: count, card type, and how they are joined:

    nvswitch     all of them, through switches
    nvlink<N>    in groups of N (bridged pairs: nvlink2)
    pcie         not at all (default)
"""

import re
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

from services.node_agent.driver.base import (
    FaultKind,
    GpuDriverError,
    GpuEvent,
    GpuHealth,
    GpuInfo,
    GpuProcess,
    GpuTelemetry,
    HealthLevel,
    LinkClass,
    MigState,
    Tier,
    Topology,
    groups_from,
)
from services.node_agent.driver.cards import memory_of

_NAMESPACE: Final = uuid.UUID("9b1c4f0e-5d0e-4a53-9f0b-6f1f4e6a2b7d")
_SPEC: Final = re.compile(r"(\d{1,3})x([A-Za-z0-9._+]+-\d+G)(?:\s+(nvswitch|nvlink\d+|pcie))?")
_IDLE_WATTS, _BUSY_WATTS = 60.0, 420.0
_FATAL_XIDS: Final = frozenset({46, 48, 62, 64, 74, 79, 95, 119, 120, 140})
DRIVER_VERSION: Final = "simulated"


@dataclass(frozen=True, slots=True)
class SimSpec:
    """Cards of one simulated node."""

    count: int
    card_type: str
    links: str = "pcie"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `8xH100-80G nvswitch`. Raises ValueError."""
        match = _SPEC.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"{text!r} is not like `8xH100-80G nvswitch`, `4xA40-48G nvlink2` or `4xA100-40G pcie`")
        return cls(int(match[1]), match[2], match[3] or "pcie")

    @property
    def group_size(self) -> int:
        """Cards joined by NVLink; 1: none."""
        if self.links == "nvswitch":
            return self.count
        return int(self.links.removeprefix("nvlink")) if self.links.startswith("nvlink") else 1


@dataclass(slots=True)
class _Card:
    info: GpuInfo
    processes: dict[int, int] = field(default_factory=dict)
    """pid -> MiB."""
    leaked_mib: int = 0
    utilization: float | None = None
    """None: follows the processes."""
    xid: int = 0
    is_lost: bool = False
    energy_mj: float = 0.0
    read_at: float = field(default_factory=time.monotonic)
    frozen: GpuTelemetry | None = None


class SimDriver:
    """`GpuDriver` over pretended cards; may be used from several threads."""

    def __init__(self, node: str, spec: SimSpec) -> None:
        self.spec = spec
        self._lock = threading.Lock()
        self._cards = [_Card(_info(node, spec, index)) for index in range(spec.count)]
        self._by_uuid = {card.info.uuid: card for card in self._cards}
        self._events: list[GpuEvent] = []
        self._event_came = threading.Event()

    # -- GpuDriver

    def open(self) -> None:
        pass

    def close(self) -> None:
        self._event_came.set()

    def gpus(self) -> tuple[GpuInfo, ...]:
        return tuple(card.info for card in self._cards)

    def topology(self) -> Topology:
        indices = range(self.spec.count)
        matrix = tuple(tuple(self._link(row, column) for column in indices) for row in indices)
        return Topology(matrix, groups_from(matrix))

    def telemetry(self, tier: Tier) -> tuple[GpuTelemetry, ...]:
        with self._lock:
            return tuple(self._read(card, tier) for card in self._cards)

    def health(self) -> tuple[GpuHealth, ...]:
        with self._lock:
            return tuple(_health(card) for card in self._cards)

    def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        self._event_came.wait(timeout_seconds)
        with self._lock:
            found, self._events = tuple(self._events), []
            self._event_came.clear()
        return found

    # -- what the world does to the cards

    def occupy(self, uuids: Sequence[str], pid: int, *, memory_mib: int | None = None) -> None:
        """A process opens cards; by default it takes half of their memory."""
        with self._lock:
            for each in uuids:
                if card := self._by_uuid.get(each):
                    card.processes[pid] = card.info.memory_mib // 2 if memory_mib is None else memory_mib

    def vacate(self, uuids: Sequence[str], pid: int) -> None:
        """A process is gone from cards; what it had leaked stays."""
        with self._lock:
            for each in uuids:
                if card := self._by_uuid.get(each):
                    card.processes.pop(pid, None)

    def leak(self, index: int, memory_mib: int) -> None:
        """From now on so much memory is held by nobody; 0 frees it."""
        with self._lock:
            self._card(index).leaked_mib = memory_mib

    def load(self, index: int, percent: float | None, *, is_frozen: bool = False) -> None:
        """Set utilisation (None: follow the processes); frozen: the readings stay as they are, time stamps included."""
        with self._lock:
            card = self._card(index)
            card.utilization = percent
            card.frozen = self._read(card, Tier.WARM) if is_frozen else None

    def fault(self, index: int, xid: int) -> None:
        """The card reports an Xid; 79 takes it off the bus."""
        with self._lock:
            card = self._card(index)
            card.xid, card.is_lost = xid, card.is_lost or xid == 79
            self._events.append(GpuEvent(card.info.uuid, xid, time.time_ns()))
            self._event_came.set()

    def repair(self, index: int) -> None:
        """The card is as new."""
        with self._lock:
            card = self._card(index)
            card.xid, card.is_lost, card.leaked_mib = 0, False, 0

    # -- details

    def _card(self, index: int) -> _Card:
        if not 0 <= index < len(self._cards):
            raise GpuDriverError(FaultKind.UNSUPPORTED, "simulate", text=f"no card {index}")
        return self._cards[index]

    def _link(self, row: int, column: int) -> LinkClass:
        if row == column:
            return LinkClass.SELF
        if row // self.spec.group_size == column // self.spec.group_size:
            return LinkClass.NVSWITCH if self.spec.links == "nvswitch" else LinkClass.NVLINK
        if row // 2 == column // 2:
            return LinkClass.PIX
        same_socket = _numa(self.spec.count, row) == _numa(self.spec.count, column)
        return LinkClass.NODE if same_socket else LinkClass.SYS

    def _read(self, card: _Card, tier: Tier) -> GpuTelemetry:
        if card.frozen is not None:
            return card.frozen
        if card.is_lost:
            return GpuTelemetry(card.info.uuid, time.time_ns())
        used = sum(card.processes.values()) + card.leaked_mib
        busy = (95.0 if card.processes else 0.0) if card.utilization is None else card.utilization
        watts = _IDLE_WATTS + (_BUSY_WATTS - _IDLE_WATTS) * busy / 100
        now = time.monotonic()
        card.energy_mj += watts * (now - card.read_at) * 1000
        card.read_at = now
        is_warm = tier is Tier.WARM
        return GpuTelemetry(
            card.info.uuid,
            time.time_ns(),
            utilization_percent=busy,
            memory_used_mib=min(used, card.info.memory_mib),
            memory_reserved_mib=512,
            memory_total_mib=card.info.memory_mib,
            power_watts=watts,
            energy_millijoules=int(card.energy_mj),
            temperature_celsius=35 + busy * 0.35 if is_warm else None,
            sm_clock_mhz=(1755 if busy else 345) if is_warm else None,
            memory_clock_mhz=1593 if is_warm else None,
            clock_reasons=0 if busy else 1,
            processes=tuple(GpuProcess(pid, mib) for pid, mib in sorted(card.processes.items())),
        )


def _info(node: str, spec: SimSpec, index: int) -> GpuInfo:
    bus = 0x10 + index * 8
    return GpuInfo(
        uuid=f"GPU-{uuid.uuid5(_NAMESPACE, f'{node}/{index}')}",
        index=index,
        model=f"Simulated {spec.card_type.rpartition('-')[0]}",
        card_type=spec.card_type,
        memory_mib=memory_of(spec.card_type),
        driver_version=DRIVER_VERSION,
        pci_bus_id=f"0000:{bus & 0xFF:02x}:00.0",
        numa_node=_numa(spec.count, index),
        compute_capability=None,
        minor=index,
        mig=MigState.UNSUPPORTED,
        persistence=True,
    )


def _numa(count: int, index: int) -> int:
    return 0 if index < max(count // 2, 1) else 1


def _health(card: _Card) -> GpuHealth:
    if card.is_lost:
        return GpuHealth(card.info.uuid, HealthLevel.LOST, why="fallen off the bus")
    if card.xid in _FATAL_XIDS:
        return GpuHealth(card.info.uuid, HealthLevel.FAILED, recovery_action=1, why=f"xid {card.xid}")
    return GpuHealth(card.info.uuid, HealthLevel.OK, ecc_uncorrected=0, recovery_action=0)
