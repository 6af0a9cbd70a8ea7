"""Finds and ends services whose supervisor was killed: they go on without it, and nobody would start them again."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final

from berth.embedded.layout import SERVICES

PATIENCE_SECONDS: Final = 12.0
_COMMANDS: Final = {f"services.{name}".encode(): name for name in SERVICES}


def services_of(home: Path) -> dict[int, str]:
    """Running services of the platform in `home`, whoever started them: pid -> name.

    Told by command line and environment, because noted numbers may belong to somebody else by now, and a supervisor
    that was killed in the wrong moment has not noted all of them.
    """
    mark = b"BERTH_HOME=" + os.fsencode(home)
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            name = _COMMANDS.get(words[2]) if len(words) > 2 and words[1] == b"-m" else None
            if name is not None and mark in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = name
    return found


def end_services(home: Path, *, ends_work: bool) -> list[str]:
    """End the services of a platform that has no supervisor, and return their names once they are gone.

    Args:
        ends_work: also what runs on its nodes; otherwise the programs go on, and the next agent takes them up.
    """
    found = services_of(home)
    for pid, name in found.items():
        _send(pid, signal.SIGINT if name == "node_agent" and ends_work else signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (left := services_of(home).keys() & found.keys()) and time.monotonic() < deadline:
        time.sleep(0.03)
    for pid in left:
        _send(pid, signal.SIGKILL)
    while services_of(home).keys() & left:
        time.sleep(0.03)
    return sorted(found.values())


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
