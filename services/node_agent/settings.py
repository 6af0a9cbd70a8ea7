"""Settings of the node agent."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import Field, field_validator

from berth.runtime.settings import BerthSettings
from services.node_agent.driver.sim import SimSpec

NVML: Final = "nvml"
_NODE: Final = re.compile(r"([A-Za-z0-9_-]{1,128})=([^:]+)(?::([a-z0-9]+))?")


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node this process hosts; without `cards` its cards are the machine's own."""

    name: str
    cards: SimSpec | None


class Settings(BerthSettings):
    """`BERTH_*` variables that the node agent reads; see `python -m berth.runtime.settings`."""

    nodes: str = Field(
        NVML,
        description="nodes of this process: `a=8xH100-80G:nvswitch,b=4xA40-48G:nvlink2` (simulated cards), or `nvml`",
    )
    node_name: str = Field("", description="name of the node with the machine's own cards; empty: the host name")
    node_domains: dict[str, dict[str, str]] = Field(
        default_factory=dict, description='places on the topology levels, JSON: {"a": {"rack": "r1"}}'
    )
    node_shareable: bool = Field(False, description="whether cards of these nodes may be shared between jobs")
    node_runtime: Literal["process", "simulated"] = Field(
        "process", description="process: real programs; simulated: pretended ones, for benches"
    )
    lease_grace_seconds: float = Field(
        10.0, ge=0, le=600, description="SIGTERM to SIGKILL when the lease has run out; the same on all nodes of a pool"
    )
    shutdown_grace_seconds: float = Field(
        4.0, ge=0, le=8, description="SIGTERM to SIGKILL of workers when the agent is told to end its work (SIGINT)"
    )
    program_path: str = Field("", description="PATH of programs; empty: the system's usual folders")
    checkpoints: Path | None = Field(
        None,
        description="folder of the jobs' checkpoints, the same on all nodes; none: `checkpoints` in the data directory",
    )
    node_peers: str = Field(
        "",
        description="other agents of the pool, `host:port` separated by commas, or a name with many addresses; they are "
        "asked whether they hear the platform when this one does not",
    )
    node_peer_address: str = Field("", description="address at which peers may ask this agent, host:port; empty: none")
    log_piece_mib: int = Field(16, ge=1, le=4096, description="two pieces of this size are kept of a worker's output")
    log_keep_hours: float = Field(72.0, ge=0, description="how long the files of ended workers are kept")
    log_keep_count: int = Field(10_000, ge=0, description="of how many ended workers per node the files are kept")
    failure_log_bytes: int = Field(
        16_384, ge=0, le=262_144, description="end of the output that goes with the report of a failure"
    )
    clean_wait_seconds: float = Field(
        5.0, ge=0, le=600, description="how long a card may take to free its memory before it counts as not clean"
    )
    unclean_from_mib: int = Field(
        512, ge=1, description="memory in use without a known process from which a card counts as not clean"
    )

    @field_validator("nodes")
    @classmethod
    def _nodes_can_be_read(cls, nodes: str) -> str:
        parse_nodes(nodes or NVML, own_name="own")
        return nodes or NVML

    @property
    def checkpoints_directory(self) -> Path:
        """Where each job has a folder of its own, the same in all its attempts."""
        return self.checkpoints or self.home.absolute() / "checkpoints"

    def node_specs(self) -> tuple[NodeSpec, ...]:
        """The nodes, in order."""
        return parse_nodes(self.nodes, own_name=self.node_name or own_name())


def parse_nodes(text: str, *, own_name: str) -> tuple[NodeSpec, ...]:
    """Read a fleet text. Raises ValueError naming the part that is wrong."""
    if text.strip() == NVML:
        return (NodeSpec(own_name, None),)
    specs: dict[str, NodeSpec] = {}
    for part in text.split(","):
        match = _NODE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} describes no node; write name=8xH100-80G:nvswitch")
        name, cards, links = match.groups()
        if name in specs:
            raise ValueError(f"node {name} is there twice")
        specs[name] = NodeSpec(name, SimSpec.parse(f"{cards} {links}" if links else cards))
    return tuple(specs.values())


def own_name() -> str:
    """The host name as a subject token."""
    return re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:128] or "node"
