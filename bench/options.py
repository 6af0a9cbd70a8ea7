"""What the benches are told, and how they tell their progress."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Final

from bench.platform import Store

_BEGAN: Final = time.monotonic()


@dataclass(frozen=True, slots=True)
class Options:
    """store: None leaves it to each bench. quick: smaller counts, for a look; such figures prove nothing."""

    store: Store | None = None
    quick: bool = False


class _Voice:
    is_silent = False


def be_silent() -> None:
    """Say nothing but the figures."""
    _Voice.is_silent = True


def say(text: str) -> None:
    """Progress, on standard error."""
    if not _Voice.is_silent:
        print(f"[{time.monotonic() - _BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)
