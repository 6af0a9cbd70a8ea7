"""What a shell writes down of a batch so that it can be decided again, and how two runs of it are compared.

The services write it into their commit log, replay reads it from there; both compute it here.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson
from pydantic import BaseModel

from berth.decisions.core import Emission, Record

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


def stored_body(record: Record) -> bytes | None:
    """A record's body as it is stored; None: the record goes."""
    return None if record.body is None else orjson.dumps(record.body, default=_json, option=_OPTIONS)


def _json(value: object) -> object:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be stored")


def event_id(emission: Emission) -> str:
    """The id under which an emission travels."""
    return f"{emission.entity}.{emission.version}.{type(emission.data).__name__}"


def emission_body(emission: Emission) -> bytes:
    """The data of an emission as it travels, without envelope: the same at any time and in any process."""
    body: bytes = emission.data.__pydantic_serializer__.to_json(emission.data, exclude_none=True)
    return body


class Tally:
    """Adds up one batch's emissions: one digest for all, and one short sum for each, to tell which one differs."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.sums: list[int] = []

    def add(self, id_: str, body: bytes) -> None:
        """The next emission."""
        head = id_.encode()
        self._digest.update(head)
        self._digest.update(body)
        self.sums.append(zlib.crc32(body, zlib.crc32(head)))

    def digest(self) -> bytes:
        """Over ids and data of all, in order."""
        return self._digest.digest()


@dataclass(slots=True)
class Note:
    """What of a batch does not follow from its stream range and clock.

    sums: one for each emission, in order. loaded: the core was rebuilt from its records at this instant, right before.
    settings: what it was made with then.
    took: sequences of the events that were applied; None: every event in the range that the core consumes.
    before, after: events that did not come out of the stream's range, as JSON, applied before and after it (parked
    messages that an operator had replayed; input of the service itself).
    """

    sums: Sequence[int] = ()
    loaded: datetime | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    took: Sequence[int] | None = None
    before: list[bytes] = field(default_factory=list)
    after: list[bytes] = field(default_factory=list)

    def to_json(self) -> bytes | None:
        """As it stands in the commit log; None: there is nothing to say."""
        found: dict[str, Any] = {}
        if self.sums:
            found["sums"] = self.sums
        if self.loaded is not None:
            found["loaded"] = self.loaded
            if self.settings:
                found["settings"] = self.settings
        if self.took is not None:
            found["took"] = self.took
        for name, events in (("before", self.before), ("after", self.after)):
            if events:
                found[name] = [event.decode() for event in events]
        return orjson.dumps(found) if found else None

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Note:
        """From the parsed column.

        Raises:
            ValueError, TypeError: it is no note.
        """
        loaded = found.get("loaded")
        return cls(
            sums=tuple(found.get("sums", ())),
            loaded=None if loaded is None else datetime.fromisoformat(loaded),
            settings=found.get("settings") or {},
            took=None if found.get("took") is None else tuple(found["took"]),
            before=_encoded(found.get("before", ())),
            after=_encoded(found.get("after", ())),
        )


def _encoded(events: Iterable[str]) -> list[bytes]:
    return [event.encode() for event in events]
