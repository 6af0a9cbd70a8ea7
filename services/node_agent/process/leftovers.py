"""Finding and ending processes of a worker whose supervisor is gone.

The parent-death signal takes the main program; what that program had started may live on, in any session and with
any parent. Three marks find it: session, process group, and the name of the worker's directory in the environment.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.node_agent.process.environment import MARKER

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Marks:
    """How to tell a worker's processes from all others."""

    session: int
    """Pid of the supervisor; 0 if unknown."""
    group: int
    """Pid of the main program; 0 if unknown."""
    work_dir: str


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The part of /proc/PID/stat that identifies a process."""

    pid: int
    state: str
    group: int
    session: int
    start_ticks: int


def read_stat(pid: int) -> ProcessStat | None:
    """None when there is no such process (any more)."""
    try:
        text = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessStat(pid, fields[0].decode(), int(fields[2]), int(fields[3]), int(fields[19]))


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether this very process still runs; a zombie does not."""
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks and stat.state not in "ZX"


def strays(marks: Marks, *, not_before_ticks: int) -> Iterator[int]:
    """Live processes of the worker; costs a walk through /proc, so it is for the rare case.

    Args:
        not_before_ticks: start of the supervisor; older processes cannot belong to the worker, whatever their ids.
    """
    wanted = f"{MARKER}={marks.work_dir}".encode()
    for entry in os.scandir(PROC):
        if not entry.name.isdigit():
            continue
        stat = read_stat(int(entry.name))
        if stat is None or stat.state in "ZX" or stat.start_ticks < not_before_ticks:
            continue
        if (marks.session and stat.session == marks.session) or (marks.group and stat.group == marks.group):
            yield stat.pid
            continue
        try:
            environ = Path(entry.path, "environ").read_bytes()
        except OSError:
            continue
        if wanted in environ.split(b"\0"):
            yield stat.pid


async def end_strays(marks: Marks, *, not_before_ticks: int) -> int:
    """Kill all of them and wait until none is left; returns how many were found.

    No grace: without a supervisor nobody could tell how they end. Waits for ever for a process the kernel cannot end
    (state D), because until then its card is not free.
    """
    seen: set[int] = set()
    pause = 0.01
    while True:
        found = await asyncio.to_thread(lambda: list(strays(marks, not_before_ticks=not_before_ticks)))
        if not found:
            return len(seen)
        for pid in found:
            seen.add(pid)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        await asyncio.sleep(pause)
        pause = min(pause * 2, 1.0)
