"""Runs a decision core inside the event-service loop: decodes, checks the sender, stores the records."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Generic, TypeVar

import orjson
from pydantic import ValidationError

from berth.bus.message import Message
from berth.contracts import subjects
from berth.contracts.envelope import HEADER_TYPE, Envelope, UnknownTypeError, decode
from berth.decisions.core import DECISIONS_VERSION, Core
from berth.decisions.recording import stored_body
from berth.runtime.event_service import BatchHandler, Outcome, PoisonMessage
from berth.store.database import Database
from berth.store.recorded import take_checkpoint

C = TypeVar("C", bound=Core)


class CoreHandler(BatchHandler, Generic[C]):
    """A core with its records in the service's schema.

    heavy: its pass may run for long. recorded: checkpoints of the records are kept, so that it can be replayed.
    """

    decisions_version = DECISIONS_VERSION

    def __init__(self, core: C, *, pool: str, heavy: bool = False, recorded: bool = False) -> None:
        self.core = core
        self.is_heavy = heavy
        self.is_recorded = recorded
        self._given: list[bytes] = []
        self.filters = core_filters(type(core), pool=pool)

    async def load(self, database: Database, *, now: datetime) -> None:
        """Rebuild the core from the stored records."""
        if self.is_recorded:
            await take_checkpoint(database, self.core.NAME)
        records = [(kind, key, orjson.loads(body)) async for kind, key, body in database.records()]
        self.core.restore(records, now=now)

    def apply(self, message: Message, *, now: datetime) -> None:
        """Decode one event and hand it to the core."""
        event = read_event(message)
        try:
            self.core.apply(event, now=now)
        except ValueError as error:
            raise PoisonMessage(f"refused by {self.core.NAME}: {error}") from error

    def take_in(self, event: Envelope[Any], *, now: datetime) -> None:
        """Hand the core an event that is on no stream, as part of `EventService.change`; replay will find it recorded.

        Raises:
            ValueError: the core refuses it.
        """
        self.core.apply(event, now=now)
        self._given.append(event.to_json())

    def given(self) -> list[bytes]:
        """Events of `take_in` since the last call."""
        given, self._given = self._given, []
        return given

    def settle(self, *, now: datetime) -> Outcome:
        """Let the core decide; bodies become bytes before anything can change them."""
        settled = self.core.settle(now=now)
        records = [(record.kind, record.key, stored_body(record)) for record in settled.records]
        return Outcome(settled.emissions, records, settled.timers)

    @property
    def settings(self) -> dict[str, Any]:
        """The core's."""
        return self.core.settings

    def next_timer(self) -> datetime | None:
        """The core's."""
        return self.core.next_timer()

    @property
    def policy_version(self) -> str:
        """Policy in force in the core."""
        return str(self.core.policy_version)


def core_filters(core: type[Core], *, pool: str) -> list[str]:
    """Subjects that carry what a core consumes."""
    return [subjects.event_filter(pool, fact) for fact in core.CONSUMES]


def read_event(message: Message) -> Envelope[Any]:
    """The event in a message.

    Raises:
        PoisonMessage: not an envelope of a known type, or not sent by an owner of that type.
    """
    try:
        event = decode(message.data, message.header(HEADER_TYPE))
    except UnknownTypeError as error:
        raise PoisonMessage(f"unknown type {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PoisonMessage(f"{error.error_count()} faults, first at {where}: {first['msg']}") from error
    except ValueError as error:
        raise PoisonMessage(f"not JSON: {error}") from error
    if event.service not in type(event.data).OWNERS:
        raise PoisonMessage(f"{event.type} is not for {event.service} to send")
    return event
