"""Ids that sort by time: 10 characters of milliseconds, 9 of chance, in Crockford's base 32, lower case."""

from __future__ import annotations

import secrets
import time
from typing import Final

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_RANDOM_BITS: Final = 45


class IdMaker:
    """Makes ids of one process. They grow strictly, so jobs of a batch sort in the order they were asked."""

    def __init__(self) -> None:
        self._last = 0

    def __call__(self) -> str:
        """The next id; a subject token."""
        made = ((time.time_ns() // 1_000_000) << _RANDOM_BITS) | secrets.randbits(_RANDOM_BITS)
        if made <= self._last:
            made = self._last + 1 + secrets.randbits(8)
        self._last = made
        text = ""
        for _ in range(19):
            made, digit = divmod(made, 32)
            text = _ALPHABET[digit] + text
        return text
