"""Nodes and their cards, as agents report them and as the pool knows them."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from berth.contracts.base import Instant, Token, Wire
from berth.contracts.reasons import Reason


class NodeState(StrEnum):
    """Whether a node may get new work, and whether it is heard."""

    READY = "ready"
    SUSPECT = "suspect"
    LOST = "lost"
    CORDONED = "cordoned"
    QUARANTINED = "quarantined"


class GpuHealthState(StrEnum):
    """Whether a card may get new work."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    QUARANTINED = "quarantined"
    NOT_CLEAN = "not_clean"


class MigLayout(Wire):
    """Slices of a partitioned card: fixed `slices` (profile -> count), or room to cut them on demand.

    compute_slices, memory_slices: what the card has; profiles: profile -> [compute, memory] each takes.
    """

    slices: dict[str, int] = Field(default_factory=dict)
    compute_slices: int = 0
    memory_slices: int = 0
    profiles: dict[str, tuple[int, int]] = Field(default_factory=dict)


class GpuDescription(Wire):
    """One card. `links`: UUIDs of cards of the same node joined to it by a fast link (NVLink, NVSwitch)."""

    uuid: str
    index: int
    card_type: str
    model: str = ""
    memory_mib: int
    pci_bus_id: str = ""
    numa_node: int | None = None
    health: GpuHealthState = GpuHealthState.HEALTHY
    health_reasons: tuple[Reason, ...] = ()
    mig: MigLayout | None = None


class NodeDescription(Wire):
    """What a node offers.

    domain: its place on each topology level of the pool, widest first (`{"block": "b1", "rack": "r2"}`).
    link_groups: groups of GPU indices joined by a fast link; no entry: every card stands alone.
    link_matrix: link class between each pair of cards, by index (NVSWITCH, NVLINK, PIX, PXB, PHB, NODE, SYS).
    enforcement: what the agent can enforce for shared cards: none, audit, cgroup or container.
    """

    node: Token
    hostname: str = ""
    address: str = "127.0.0.1"
    driver_version: str = ""
    gpus: tuple[GpuDescription, ...] = ()
    link_groups: tuple[tuple[int, ...], ...] = ()
    link_matrix: tuple[tuple[str, ...], ...] = ()
    domain: dict[str, str] = Field(default_factory=dict)
    shareable: bool = False
    cpu_count: int = 0
    memory_mib: int = 0
    enforcement: str = "none"
    runtime: str = "process"
    agent_version: str = ""
    boot_id: str = ""


class WorkerReport(Wire):
    """A worker that a node runs or whose end it has not yet reported."""

    job_id: Token
    attempt: int
    fence: int
    worker: int
    state: str = "running"


class RegisterNode(Wire):
    """An agent to inventory (`berth.req.<pool>.inventory.register`): may I take part, and this I still run."""

    description: NodeDescription
    workers: tuple[WorkerReport, ...] = ()
    sent_at: Instant


class NodeAccepted(Wire):
    """Answer to `RegisterNode`: the session epoch, new at each registration, and the lease that telemetry renews.

    platform_time: the platform's clock, by which expiries are meant; the node's own may be wrong.
    pool_nodes: nodes of the pool; an agent that hosts or reaches more than half of them, none of which is heard, takes
    it for an outage of the platform and lets its work go on. 0: not known, it then stops its work at the deadline.
    stop_seconds: from the end of the lease until the cards may be given away: all processes must be gone by then. 0: not
    known.
    """

    node: Token
    epoch: int
    lease_seconds: float
    telemetry_every_seconds: float
    platform_time: Instant | None = None
    pool_nodes: int = 0
    stop_seconds: float = 0


class RegistrationRefused(Wire):
    """Answer to `RegisterNode` where the node may not take part."""

    reason: Reason


class GpuReading(Wire):
    """Latest readings of one card; None: not supported or not known, which proves nothing."""

    uuid: str
    utilization_percent: float | None = None
    memory_used_mib: int | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: int | None = None
    process_count: int | None = None


class TelemetryFrame(Wire):
    """What a node sends every few seconds on `berth.tel.<pool>.<node>`; the answer `LeaseRenewed` renews its lease."""

    node: Token
    epoch: int
    sequence: int
    sent_at: Instant
    gpus: tuple[GpuReading, ...] = ()
    workers: int = 0
    took_ms: float = 0.0


class LeaseRenewed(Wire):
    """Answer to a telemetry frame. `register_again`: the platform does not know this epoch.

    The other fields: see `NodeAccepted`.
    """

    node: Token
    epoch: int
    sequence: int
    lease_seconds: float
    register_again: bool = False
    platform_time: Instant | None = None
    pool_nodes: int = 0
    stop_seconds: float = 0
