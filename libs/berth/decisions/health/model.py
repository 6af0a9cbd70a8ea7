"""What inventory remembers of a node and its cards. Plain values that a shell can store as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from berth.contracts.nodes import GpuHealthState, NodeDescription, NodeState


class Hearing(StrEnum):
    """Whether a node is heard."""

    HEARD = "heard"
    SUSPECT = "suspect"
    LOST = "lost"


@dataclass(slots=True)
class Card:
    """What is known against a card. out: why it left the pool, as JSON; unclean_mib: memory that nobody owns up to."""

    index: int
    out: dict[str, Any] | None = None
    unclean_mib: int = 0

    @property
    def health(self) -> GpuHealthState:
        """Whether the card may get new work."""
        if self.out is not None:
            return GpuHealthState.QUARANTINED
        return GpuHealthState.NOT_CLEAN if self.unclean_mib else GpuHealthState.HEALTHY


@dataclass(slots=True)
class NodeRecord:
    """One node, as stored.

    version: of its `NodeChanged`. told: number of the newest emission. start_failures: when starts failed lately.
    skew_told: whether its clock was reported as wrong. leased_until: not lost before, whatever policy says by now.
    """

    node: str
    epoch: int = 0
    version: int = 0
    hearing: Hearing = Hearing.HEARD
    cordoned: bool = False
    quarantined: bool = False
    description: dict[str, Any] = field(default_factory=dict)
    cards: dict[str, Card] = field(default_factory=dict)
    start_failures: list[datetime] = field(default_factory=list)
    skew_told: bool = False
    told: int = 0
    leased_until: datetime | None = None

    @property
    def state(self) -> NodeState:
        """Whether the node may get new work, and whether it is heard."""
        if self.hearing is not Hearing.HEARD:
            return NodeState(self.hearing.value)
        if self.quarantined:
            return NodeState.QUARANTINED
        return NodeState.CORDONED if self.cordoned else NodeState.READY

    def described(self) -> NodeDescription:
        """The description it registered with."""
        return NodeDescription.model_validate(self.description)
