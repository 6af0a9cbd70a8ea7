"""The shape of a decision core: one service's rules and state, without I/O, clock or chance.

Three shells run the same cores: the services, the simulator and replay. A shell feeds events in stream order with
`apply`, then calls `settle` once per batch; the core answers with what to tell and what to store. Both happen in one
transaction. A core whose transaction failed is thrown away and rebuilt with `restore` from the stored records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar

from berth.contracts.envelope import Envelope, Fact, Order

DECISIONS_VERSION = "1"
"""Changes whenever equal inputs may lead to another outcome; stands in receipts and in the commit log."""


@dataclass(frozen=True, slots=True)
class Emission:
    """One event or command to send. The shell adds envelope, subject and span.

    entity: subject token (job id, node name, policy id); for a command the node.
    version: number of this emission within (core, entity), from 1; event id = `<entity>.<version>.<Type>`.
    cause: id of the event that led to it, where it was in this batch. trace: traceparent stored with the job, for spans
    of emissions that a timer caused.
    """

    data: Fact | Order
    entity: str
    version: int
    tenant: str = ""
    actor: str = ""
    correlation: str = ""
    cause: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One piece of state to store (or, without a body, to delete) under (kind, key). The body is a dataclass or dict of
    JSON values; the shell serialises it before it calls the core again."""

    kind: str
    key: str
    body: Any | None


@dataclass(frozen=True, slots=True)
class Settled:
    """What one batch led to, in order. `timers`: how many timers fired."""

    emissions: Sequence[Emission] = ()
    records: Sequence[Record] = ()
    timers: int = 0


@dataclass(slots=True)
class Outbox:
    """Collects one batch's emissions and numbers them per entity; a core owns one and keeps its counters in records."""

    counters: dict[str, int] = field(default_factory=dict)
    emissions: list[Emission] = field(default_factory=list)

    def emit(
        self,
        data: Fact | Order,
        entity: str,
        *,
        tenant: str = "",
        actor: str = "",
        correlation: str = "",
        cause: str = "",
        trace: str = "",
    ) -> None:
        """Add one emission with the entity's next number."""
        version = self.counters.get(entity, 0) + 1
        self.counters[entity] = version
        self.emissions.append(Emission(data, entity, version, tenant, actor, correlation or entity, cause, trace))

    def drain(self) -> list[Emission]:
        """All emissions since the last call, in order."""
        taken, self.emissions = self.emissions, []
        return taken


class Core(ABC):
    """Rules and state of one service."""

    NAME: ClassVar[str]
    """The service."""
    CONSUMES: ClassVar[tuple[type[Fact], ...]]
    """Event types it takes in; the shell subscribes to just these."""

    @abstractmethod
    def apply(self, event: Envelope[Any], *, now: datetime) -> None:
        """Take in one new event (repeats were filtered by id). Late and out-of-order events must be harmless.

        Raises:
            ValueError: the event contradicts itself; the shell parks it. State is unchanged then.
        """

    @abstractmethod
    def settle(self, *, now: datetime) -> Settled:
        """Fire timers due at `now`, decide, and hand over everything since the last call. Idempotent at one instant."""

    @abstractmethod
    def next_timer(self) -> datetime | None:
        """When `settle` wants to be called though no event has come; None: only on events."""

    @abstractmethod
    def restore(self, records: Iterable[tuple[str, str, Any]], *, now: datetime) -> None:
        """Rebuild the state from (kind, key, body) with bodies as parsed JSON. Called once, on a fresh core."""

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of its constructor that decisions depend on, as JSON values: recorded for replay."""
        return {}

    @property
    @abstractmethod
    def policy_version(self) -> int:
        """Version of the policy in force in this core; 0: none yet."""
