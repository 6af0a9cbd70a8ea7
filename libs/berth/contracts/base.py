"""Base of every wire model, and the value types that several of them share."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, NewType

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

JobId = NewType("JobId", str)
NodeName = NewType("NodeName", str)

TOKEN = re.compile(r"^[A-Za-z0-9_-]{1,128}$")
"""Text that may stand in a subject: anything else could move a message to another subject."""

Token = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


class Wire(BaseModel):
    """A value on the wire: frozen, and tolerant of fields that a newer sender added."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True, ser_json_inf_nan="constants")


class Strict(BaseModel):
    """A value that a person or another platform sends: unknown keys and loose types are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class JobClass(StrEnum):
    """The four kinds of work; each has rules of its own."""

    TRAINING = "training"
    INFERENCE = "inference"
    INTERACTIVE = "interactive"
    GENERAL = "general"


_PART = re.compile(r"(\d+)([smhd])")
_WHOLE = re.compile(r"^(\d+[smhd])+$")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_DURATION_SECONDS = 10 * 365 * 86400


def parse_duration(value: object) -> object:
    """Seconds of a duration such as `30s`, `1h30m` or `7d`; whole numbers are seconds already.

    Raises:
        ValueError: for anything else, with the accepted forms.
    """
    if isinstance(value, str):
        text = value.strip()
        if not _WHOLE.match(text):
            raise ValueError(f"{value!r} is not a duration; write for example 30s, 45m, 1h30m or 7d")
        return sum(int(count) * _SECONDS[unit] for count, unit in _PART.findall(text))
    if isinstance(value, timedelta):
        return int(value.total_seconds())
    if isinstance(value, bool):
        raise ValueError("a truth value is not a duration; write for example 30s, 45m, 1h30m or 7d")
    return value


def format_duration(seconds: int) -> str:
    """The shortest text for a number of seconds: 5400 -> `1h30m`."""
    if seconds == 0:
        return "0s"
    parts = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


Duration = Annotated[
    int,
    BeforeValidator(parse_duration, json_schema_input_type=int | str),
    Field(ge=0, le=MAX_DURATION_SECONDS, strict=True),
]
"""Whole seconds; text such as `1h30m` is accepted on the way in."""


def _aware(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("a time needs a zone, for example 2026-03-02T09:00:00+08:00")
    return value


Instant = Annotated[datetime, AfterValidator(_aware)]
"""A point in time with a zone."""

Facts = dict[str, Any]
"""Numbers and names that belong to a reason; values are JSON."""


def _no_control(value: str) -> str:
    if not value.isprintable():
        bad = next(c for c in value if not c.isprintable())
        raise ValueError(f"contains the unprintable character U+{ord(bad):04X}; use visible characters and spaces")
    if value != value.strip():
        raise ValueError("begins or ends with white space; remove it")
    return value


DisplayName = Annotated[str, StringConstraints(min_length=1, max_length=256), AfterValidator(_no_control)]
"""A name in any script, as people write it; never part of a subject or a metric label."""
