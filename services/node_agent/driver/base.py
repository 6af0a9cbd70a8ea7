"""The seam between the agent and whatever drives the cards."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class FaultKind(StrEnum):
    """What a failed call means for the caller."""

    UNSUPPORTED = "unsupported"
    """This card or driver never answers it: drop the reading."""
    TRANSIENT = "transient"
    """Ask again; after three times the reading is stale."""
    DENIED = "denied"
    """Needs rights the agent lacks."""
    LOST = "lost"
    """The card is gone or needs a reset: it may get no work."""
    RELOAD = "reload"
    """The driver was exchanged under the process: only a new process can talk to it."""


class GpuDriverError(Exception):
    """A call to the driver failed; `kind` says who should act."""

    def __init__(self, kind: FaultKind, call: str, code: int = 0, text: str = "") -> None:
        super().__init__(f"{call}: {text or kind} ({code})")
        self.kind = kind
        self.call = call
        self.code = code


class Tier(StrEnum):
    """How much a sample asks of the cards."""

    HOT = "hot"
    """Every second: utilisation, memory, energy, clock reasons, processes."""
    WARM = "warm"
    """Every ten seconds, in addition: temperatures, clocks, power, memory bandwidth."""


class MigState(StrEnum):
    """Whether a card is partitioned."""

    UNSUPPORTED = "unsupported"
    DISABLED = "disabled"
    ENABLED = "enabled"
    CHANGING = "changing"
    """Asked for but not in force before a reset: no work meanwhile."""


class LinkClass(StrEnum):
    """How two cards reach each other, nearest first; the words of `nvidia-smi topo`, with NVLink told from NVSwitch."""

    SELF = "X"
    NVSWITCH = "NVSWITCH"
    NVLINK = "NVLINK"
    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"


@dataclass(frozen=True, slots=True)
class MigInstance:
    """One slice of a partitioned card."""

    uuid: str
    profile: str
    """Such as `1g.10gb`."""
    memory_mib: int
    gpu_instance: int
    compute_instance: int


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """What does not change while the driver is loaded."""

    uuid: str
    """The name everywhere; `index` is for display, its order changes between boots and tools."""
    index: int
    model: str
    card_type: str
    memory_mib: int
    driver_version: str = ""
    pci_bus_id: str = ""
    """As sysfs writes it: `0000:3b:00.0`."""
    numa_node: int | None = None
    compute_capability: tuple[int, int] | None = None
    serial: str = ""
    minor: int | None = None
    mig: MigState = MigState.UNSUPPORTED
    mig_instances: tuple[MigInstance, ...] = ()
    persistence: bool | None = None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that has the card open; pids are always those of the host."""

    pid: int
    memory_mib: int | None = None
    sm_percent: int | None = None


@dataclass(frozen=True, slots=True)
class GpuTelemetry:
    """Readings of one card; None is "not supported or not known" and proves nothing."""

    uuid: str
    taken_at_ns: int
    """Wall clock; a reading that does not move on is stale."""
    utilization_percent: float | None = None
    """Mean over the samples the card took since the last reading."""
    memory_used_mib: int | None = None
    """Without what the driver keeps for itself."""
    memory_reserved_mib: int | None = None
    memory_total_mib: int | None = None
    memory_busy_percent: float | None = None
    power_watts: float | None = None
    """Mean since the last reading where the card counts energy."""
    energy_millijoules: int | None = None
    temperature_celsius: float | None = None
    memory_temperature_celsius: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    clock_reasons: int | None = None
    """Bit mask: 0x1 idle, 0x4 software power cap, 0x20/0x40 thermal, 0x80 power brake."""
    processes: tuple[GpuProcess, ...] | None = None
    processes_trusted: bool = True
    """False when the list contradicts the process table; then it proves nothing either."""


class HealthLevel(StrEnum):
    """What a card's own counters say, best first."""

    OK = "ok"
    DEGRADED = "degraded"
    """Works, slower than it should: thermal or power brake."""
    DRAINING = "draining"
    """Needs a reset once idle."""
    FAILED = "failed"
    LOST = "lost"
    UNKNOWN = "unknown"
    """Its health could not be read; never to be taken for OK."""


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """One card's state of health and what it rests on."""

    uuid: str
    level: HealthLevel
    ecc_uncorrected: int | None = None
    remap_pending: bool = False
    remap_failed: bool = False
    recovery_action: int | None = None
    """0 none, 1 GPU reset, 2 node reboot, 3 drain P2P, 4 drain and reset; None: not told by this card."""
    why: str = ""


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """A fault the card reported. `uuid` empty: some card was lost and the driver does not say which."""

    uuid: str
    xid: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Topology:
    """How the cards of a node are joined; rows and columns in order of `index`."""

    matrix: tuple[tuple[LinkClass, ...], ...]
    link_groups: tuple[tuple[int, ...], ...] = ()
    """Indices of cards that all reach each other by NVLink or NVSwitch."""
    fabric: str = ""
    """Domain of a multi-node NVLink fabric; empty: none."""


def groups_from(matrix: tuple[tuple[LinkClass, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Groups of cards joined by NVLink: connected components, of two or more, in order."""
    fast = (LinkClass.NVLINK, LinkClass.NVSWITCH)
    left = set(range(len(matrix)))
    groups = []
    while left:
        pending, group = [min(left)], set[int]()
        while pending:
            card = pending.pop()
            if card in left:
                left.remove(card)
                group.add(card)
                pending += [other for other in left if matrix[card][other] in fast]
        if len(group) > 1:
            groups.append(tuple(sorted(group)))
    return tuple(groups)


class GpuDriver(Protocol):
    """Reads the cards of one node. Calls block, some for 20 ms: they belong into a thread, one at a time."""

    def open(self) -> None:
        """Get ready. Raises GpuDriverError."""
        ...

    def close(self) -> None: ...

    def gpus(self) -> tuple[GpuInfo, ...]:
        """All cards, by index. One that cannot be read is left out, and looked for again at each call."""
        ...

    def topology(self) -> Topology: ...

    def telemetry(self, tier: Tier) -> tuple[GpuTelemetry, ...]:
        """Readings of all cards, by index. A card that is gone has readings of None only."""
        ...

    def health(self) -> tuple[GpuHealth, ...]: ...

    def events(self, timeout_seconds: float) -> tuple[GpuEvent, ...]:
        """Faults since the last call; waits for the first one. Has a thread of its own beside the other calls."""
        ...
