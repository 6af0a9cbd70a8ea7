"""The bus of a simulation: one total order, each event at most once per core, state stored as the services store it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson

from berth.contracts.envelope import Envelope, Fact, Order, decode
from berth.decisions.core import Core, Emission, Settled
from berth.decisions.recording import stored_body
from berth.sim.clock import SimClock

POOL = "sim"


def wrap(emission: Emission, *, service: str, now: datetime, pool: str = POOL) -> Envelope[Any]:
    """The envelope that a service's shell would put around an emission."""
    data = emission.data
    return Envelope[Any].model_construct(
        specversion="1.0",
        id=f"{emission.entity}.{emission.version}.{type(data).__name__}",
        type=data.TYPE,
        source=f"/berth/{pool}/{service}",
        subject=emission.entity,
        time=now,
        datacontenttype="application/json",
        dataschema=f"berth:{data.TYPE}",
        correlationid=emission.correlation,
        causationid=emission.cause,
        traceparent="",
        tenant=emission.tenant,
        actor=emission.actor or f"service:{service}",
        data=data,
    )


@dataclass(slots=True)
class _Seat:
    """A core at the bus: how to make it anew, what it has yet to take in, and what it stored."""

    core: Core
    make: Callable[[], Core]
    inbox: list[Envelope[Any]] = field(default_factory=list)
    records: dict[tuple[str, str], bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parked:
    """An event that a core could not take in."""

    service: str
    event: Envelope[Any]
    why: str


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of one core as it was worked off: what was there to take in, what of it was taken, what followed."""

    service: str
    events: Sequence[Envelope[Any]]
    took: Sequence[Envelope[Any]]
    settled: Settled
    now: datetime


class SimBus:
    """Delivers events to cores by what they consume, and commands to a sink.

    batch_size: how many of the events that wait make a core's next batch; all by default. on_batch, on_restart: for
    shells that record. keep_records: store what cores hand over, so that they can be restarted. through_json: encode
    and decode every event, as a real bus does; slower, and finds what would not survive the way.
    """

    def __init__(self, clock: SimClock, *, keep_records: bool = True, through_json: bool = False) -> None:
        self.clock = clock
        self.log: list[Envelope[Any]] = []
        self.parked: list[Parked] = []
        self.on_order: Callable[[Envelope[Any]], None] = lambda order: None
        self.before_settle: Callable[[Core], None] = lambda core: None
        self.batch_size: Callable[[str, int], int] = lambda service, waiting: waiting
        self.on_batch: Callable[[Batch], None] = lambda batch: None
        self.on_restart: Callable[[str], None] = lambda service: None
        self.is_up = True
        self._keep = keep_records
        self._through_json = through_json
        self._seats: dict[str, _Seat] = {}
        self._takers: dict[type[Fact], list[_Seat]] = {}
        self._listeners: list[Callable[[Envelope[Any]], None]] = []
        self._seen: set[str] = set()
        self._numbers: dict[tuple[str, str], int] = {}
        self._waiting: list[Envelope[Any]] = []

    # -------------------------------------------------------------------------------------------------------- set up
    def attach(self, make: Callable[[], Core]) -> Core:
        """Seat a core, made by `make`, which is used again at a restart."""
        core = make()
        seat = self._seats[core.NAME] = _Seat(core, make)
        for fact in core.CONSUMES:
            self._takers.setdefault(fact, []).append(seat)
        return core

    def listen(self, listener: Callable[[Envelope[Any]], None]) -> None:
        """Show every event to a listener (views, audit) once, in order, before cores decide on it."""
        self._listeners.append(listener)

    def core(self, name: str) -> Core:
        """The core of a service, as it is now."""
        return self._seats[name].core

    def restart(self, name: str) -> Core:
        """Throw a core away and rebuild it from what it stored."""
        seat = self._seats[name]
        seat.core = seat.make()
        stored = [(kind, key, orjson.loads(body)) for (kind, key), body in sorted(seat.records.items())]
        seat.core.restore(stored, now=self.clock.now)
        self.on_restart(name)
        self.batch(name)
        return seat.core

    @property
    def services(self) -> list[str]:
        """Names of the cores."""
        return list(self._seats)

    # ------------------------------------------------------------------------------------------------------- publish
    def tell(self, fact: Fact, entity: str, *, service: str, tenant: str = "", actor: str = "") -> Envelope[Any]:
        """Publish a fact of somebody who is no core: the gateway, an agent."""
        number = self._numbers.get((service, entity), 0) + 1
        self._numbers[service, entity] = number
        # ids of agents carry their service: an agent and a core may both number what they tell of one job
        emission = Emission(fact, entity, number, tenant=tenant, actor=actor, correlation=entity)
        envelope = wrap(emission, service=service, now=self.clock.now)
        envelope = envelope.model_copy(update={"id": f"{service}.{envelope.id}"})
        self.publish(envelope)
        return envelope

    def publish(self, envelope: Envelope[Any]) -> None:
        """Put an event into the order; a repeat by id is dropped, as the broker and every inbox do."""
        if not self.is_up:
            self._waiting.append(envelope)
            return
        if envelope.id in self._seen:
            return
        self._seen.add(envelope.id)
        if self._through_json:
            envelope = decode(envelope.to_json())
        self.log.append(envelope)
        for listener in self._listeners:
            listener(envelope)
        for seat in self._takers.get(type(envelope.data), ()):
            seat.inbox.append(envelope)

    def stop(self) -> None:
        """From now on nothing gets through; senders keep what they have."""
        self.is_up = False

    def start(self) -> None:
        """Everything that was kept goes out in order."""
        self.is_up = True
        waiting, self._waiting = self._waiting, []
        for envelope in waiting:
            if isinstance(envelope.data, Order):
                self.on_order(envelope)
            else:
                self.publish(envelope)

    # ----------------------------------------------------------------------------------------------------------- run
    def step(self) -> bool:
        """Let each core that has events or a due timer work off one batch; whether any did."""
        worked = False
        now = self.clock.now
        for seat in self._seats.values():
            due = seat.core.next_timer()
            if not seat.inbox and (due is None or due > now):
                continue
            worked = True
            self.batch(seat.core.NAME)
        return worked

    def batch(self, name: str) -> None:
        """One batch of one core: apply what has arrived, settle, store, publish."""
        seat, now = self._seats[name], self.clock.now
        self.before_settle(seat.core)
        size = self.batch_size(name, len(seat.inbox))
        events, seat.inbox = seat.inbox[:size], seat.inbox[size:]
        took = []
        for event in events:
            try:
                seat.core.apply(event, now=now)
                took.append(event)
            except ValueError as wrong:
                self.parked.append(Parked(name, event, str(wrong)))
        settled = seat.core.settle(now=now)
        if self._keep:
            for record in settled.records:
                body = stored_body(record)
                if body is None:
                    seat.records.pop((record.kind, record.key), None)
                else:
                    seat.records[record.kind, record.key] = body
        self.on_batch(Batch(name, events, took, settled, now))
        self._send(settled.emissions, service=name)

    def _send(self, emissions: Sequence[Emission], *, service: str) -> None:
        for emission in emissions:
            envelope = wrap(emission, service=service, now=self.clock.now)
            if isinstance(emission.data, Order):
                if self.is_up:
                    self.on_order(envelope)
                else:
                    self._waiting.append(envelope)
            else:
                self.publish(envelope)

    def next_timer(self) -> datetime | None:
        """When the first core wants to be woken."""
        return min(_known(seat.core.next_timer() for seat in self._seats.values()), default=None)


def _known(times: Iterable[datetime | None]) -> list[datetime]:
    return [time for time in times if time is not None]
