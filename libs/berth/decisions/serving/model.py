"""What serving remembers of a service and its replicas. Plain values that a shell can store as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class ReplicaState(StrEnum):
    """How far a replica is: it waits for room, holds GPUs and loads, answers, or was told to go."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    LEAVING = "leaving"


@dataclass(slots=True)
class Replica:
    """One replica. holds_since: of its present attempt; None while it holds nothing."""

    number: int
    version: str
    state: ReplicaState = ReplicaState.WAITING
    attempt: int = 0
    holds_since: datetime | None = None


@dataclass(slots=True)
class Rollout:
    """A change of version under way. canary: replicas of the new version and no more; None: all."""

    to: str
    canary: int | None = None


@dataclass(slots=True)
class Service:
    """One service.

    demand: (since, replicas that the load needed from then on), oldest first. idle_since: when the ready replicas ran
    out of requests. pause_until: no new replica before, after one that never got ready or failed for good.
    """

    job_id: str
    tenant: str
    version: str
    trace: str = ""
    previous: str = ""
    wanted: int = 0
    load: float = 0
    load_stamp: datetime | None = None
    load_at: datetime | None = None
    is_stale: bool = False
    demand: list[tuple[datetime, int]] = field(default_factory=list)
    idle_since: datetime | None = None
    rollout: Rollout | None = None
    surge: int = 1
    unavailable: int = 0
    replicas: dict[str, Replica] = field(default_factory=dict)
    created: int = 0
    failures: int = 0
    pause_until: datetime | None = None
    cancelled_by: str | None = None
    told: int = 0

    @property
    def staying(self) -> list[Replica]:
        """Replicas that were not told to go."""
        return [replica for replica in self.replicas.values() if replica.state is not ReplicaState.LEAVING]

    @property
    def ready(self) -> int:
        """Replicas that answer and stay."""
        return sum(replica.state is ReplicaState.READY for replica in self.replicas.values())

    @property
    def target(self) -> str:
        """The version that new replicas are of."""
        return self.rollout.to if self.rollout is not None else self.version
