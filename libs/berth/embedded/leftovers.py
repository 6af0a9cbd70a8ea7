"""Finds and ends what goes on by itself: services whose supervisor was killed, and work whose agent was."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Final

from berth.embedded.layout import SERVICES

PATIENCE_SECONDS: Final = 12.0
WORK_GRACE_SECONDS: Final = 3.0
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


def end_work(nodes: Path, *, grace_seconds: float = WORK_GRACE_SECONDS) -> int:
    """End the programs on nodes whose agent is not there to do it; returns how many there were, once they are gone.

    Each has a supervisor that knows how to stop it with all that it has started; its record stays for the next agent.
    """
    found = [(folder, *which) for folder in nodes.glob("*/workers/*") if (which := _worker_supervisor(folder))]
    for folder, pid, _ in found:
        with contextlib.suppress(OSError):
            (folder / "stop").write_text(f"{int(grace_seconds * 1000)} platform stopped")
        _send(pid, signal.SIGTERM)
    deadline = time.monotonic() + grace_seconds + PATIENCE_SECONDS
    while left := [pid for _, pid, ticks in found if _start_ticks(pid) == ticks]:
        if time.monotonic() > deadline:
            for pid in left:
                _send(pid, signal.SIGKILL)  # the kernel ends the program with it
        time.sleep(0.02)
    return len(found)


def _worker_supervisor(folder: Path) -> tuple[int, int] | None:
    """Pid and start of the process that watches a worker, where it runs."""
    if (folder / "exit").exists():
        return None
    try:
        record = json.loads((folder / "state").read_text())
        pid, ticks = int(record["supervisor_pid"]), int(record["supervisor_start_ticks"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (pid, ticks) if _start_ticks(pid) == ticks else None


def _start_ticks(pid: int) -> int | None:
    """When a running process started, in clock ticks since boot: with its number this names it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
