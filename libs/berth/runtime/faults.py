"""Fault points: places where a test lets the process die, to prove that nothing is lost there.

`BERTH_FAULT_POINT=placement.before_commit:3` kills the process with SIGKILL at the third passing of that point: no
cleanup, no flush, as a power cut would. With `BERTH_FAULTS_ON_SIGNAL=1` a running service takes the same text from
`<home>/run/<service>.fault` at SIGUSR1. Without either a fault point costs one comparison.
"""

import os
import re
import signal
from collections.abc import Callable
from typing import Final

VARIABLE: Final = "BERTH_FAULT_POINT"
_FORM: Final = re.compile(r"([a-z][a-z0-9_.]*)(?::([1-9][0-9]{0,8}))?")


def parse_fault_point(text: str) -> tuple[str, int]:
    """Split `<name>[:<n>]`; n defaults to 1. Raises ValueError for anything else."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError("must be <name> or <name>:<n>, such as placement.before_commit:3")
    return match[1], int(match[2] or 1)


class _Armed:
    """The one point that is armed in this process."""

    __slots__ = ("action", "left", "name")

    def __init__(self) -> None:
        self.name: str | None = None
        self.left = 0
        self.action: Callable[[], None] = _die


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


_armed: Final = _Armed()


def arm(text: str | None, *, action: Callable[[], None] | None = None) -> None:
    """Arm one point (None disarms). Tests in the same process pass an `action` that raises, instead of dying."""
    _armed.name, _armed.left = (None, 0) if text is None else parse_fault_point(text)
    _armed.action = action or _die


async def fault_point(name: str) -> None:
    """A place where the process may be told to die; awaitable so that it reads as a step of the protocol."""
    if _armed.name is not None:
        pass_fault_point(name)


def pass_fault_point(name: str) -> None:
    """As `fault_point`, for code that does not await."""
    if name == _armed.name:
        _armed.left -= 1
        if _armed.left == 0:
            _armed.action()


if os.environ.get(VARIABLE):
    try:
        arm(os.environ[VARIABLE])
    except ValueError:
        pass  # settings name the fault and refuse to start; an import must not
