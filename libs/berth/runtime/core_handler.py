"""Runs a decision core inside the event-service loop: decodes, checks the sender, stores the records."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from berth.bus.message import Message
from berth.contracts import subjects
from berth.contracts.envelope import HEADER_TYPE, Envelope, UnknownTypeError, decode
from berth.decisions.core import DECISIONS_VERSION, Core
from berth.runtime.event_service import BatchHandler, Outcome, PoisonMessage
from berth.store.database import Database

C = TypeVar("C", bound=Core)


class CoreHandler(BatchHandler, Generic[C]):
    """A core with its records in the service's schema. `heavy`: its pass may run for long."""

    decisions_version = DECISIONS_VERSION

    def __init__(self, core: C, *, pool: str, heavy: bool = False) -> None:
        self.core = core
        self.is_heavy = heavy
        self.filters = core_filters(type(core), pool=pool)

    async def load(self, database: Database, *, now: datetime) -> None:
        """Rebuild the core from the stored records."""
        records = [(kind, key, orjson.loads(body)) async for kind, key, body in database.records()]
        self.core.restore(records, now=now)

    def apply(self, message: Message, *, now: datetime) -> None:
        """Decode one event and hand it to the core."""
        event = read_event(message)
        try:
            self.core.apply(event, now=now)
        except ValueError as error:
            raise PoisonMessage(f"refused by {self.core.NAME}: {error}") from error

    def settle(self, *, now: datetime) -> Outcome:
        """Let the core decide; bodies become bytes before anything can change them."""
        settled = self.core.settle(now=now)
        records = [
            (r.kind, r.key, None if r.body is None else orjson.dumps(r.body, default=_json, option=_OPTIONS))
            for r in settled.records
        ]
        return Outcome(settled.emissions, records, settled.timers)

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


_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def _json(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be stored")


HandlerFactory = Callable[[], CoreHandler[C]]
