"""The hash chain over the record: any change, gap or swap of rows shows.

hash(n) = BLAKE2b-256(hash(n-1) | number as 8 bytes | recorded_at in microseconds as 8 bytes | payload), with 32 zero
bytes before the first row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

START = bytes(32)


@dataclass(frozen=True, slots=True)
class Link:
    """What the chain covers of a row."""

    number: int
    recorded_at: datetime
    payload: bytes
    hash: bytes


def next_hash(previous: bytes, *, number: int, recorded_at: datetime, payload: bytes) -> bytes:
    """The hash of a row behind one with hash `previous`."""
    digest = hashlib.blake2b(previous, digest_size=32)
    digest.update(number.to_bytes(8, "big"))
    digest.update(microseconds(recorded_at).to_bytes(8, "big"))
    digest.update(payload)
    return digest.digest()


def first_break(links: Iterable[Link], *, previous: bytes = START, number: int = 1) -> int | None:
    """Number of the first row that does not follow from the one before it; None: the chain holds.

    Args:
        links: rows in order, beginning with `number`, whose predecessor has hash `previous`.
    """
    for link in links:
        expected = next_hash(previous, number=number, recorded_at=link.recorded_at, payload=link.payload)
        if link.number != number or link.hash != expected:
            return number
        previous, number = link.hash, number + 1
    return None


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def microseconds(moment: datetime) -> int:
    """Whole microseconds since 1970; exact, which a float timestamp is not."""
    elapsed = moment - _EPOCH
    return (elapsed.days * 86400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds
