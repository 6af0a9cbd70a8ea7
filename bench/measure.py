"""CPU time, memory and disk syncs of a running platform, read from the kernel.

CPU time has two sources. A control group, where one can be made (root, cgroup v1 or v2), counts every thread that ever
ran in it, whoever its parent was: nothing is missed. Elsewhere it is the sum over the platform's living processes of
their own time and the time of the children they have waited for, which misses only children that were never waited
for. Both are sums of scheduler run time, not of samples, and both leave the load generator out: it is no descendant.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

_TICK_US: Final = 1_000_000 // os.sysconf("SC_CLK_TCK")
_CGROUP: Final = Path("/sys/fs/cgroup")


# --- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """A living process: its own CPU time, and that of the children it has waited for."""

    pid: int
    parent: int
    own_us: int
    waited_us: int


def all_processes() -> dict[int, ProcessTimes]:
    """Every process of the machine."""
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208  # a Path for each of some hundred entries is the larger part of the cost
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                text = Path(f"/proc/{entry}/stat").read_text()
                fields = text[text.rindex(")") + 2 :].split()
                found[int(entry)] = ProcessTimes(
                    pid=int(entry),
                    parent=int(fields[1]),
                    own_us=(int(fields[11]) + int(fields[12])) * _TICK_US,
                    waited_us=(int(fields[13]) + int(fields[14])) * _TICK_US,
                )
    return found


def parts_of(root: int, named: Mapping[int, str], processes: Mapping[int, ProcessTimes]) -> dict[int, str]:
    """The part each process below `root` belongs to: the name of its nearest named ancestor, itself included."""
    parts: dict[int, str] = {}
    for pid in processes:
        path = []
        at = pid
        while at in processes and at not in named and at != root:
            path.append(at)
            at = processes[at].parent
        if at in named and at in processes:
            for each in (*path, at):
                parts[each] = named[at] if each == at else f"{named[at]} children"
        elif at == root:
            for each in path:
                parts[each] = "others"
    return parts


# --- CPU --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuReading:
    """CPU time used so far. how: cgroup or proc."""

    total_us: int
    by_part_us: Mapping[str, int]
    how: str

    def since(self, earlier: CpuReading) -> CpuReading:
        """What was used between two readings; time of processes that ended unseen is under `ended`."""
        parts = {
            name: used - earlier.by_part_us.get(name, 0)
            for name, used in self.by_part_us.items()
            if used != earlier.by_part_us.get(name, 0)
        }
        total = self.total_us - earlier.total_us
        seen = sum(parts.values())
        if self.how == "cgroup" and total - seen > _TICK_US:
            parts["ended"] = total - seen
        return CpuReading(total, dict(sorted(parts.items(), key=lambda item: -item[1])), self.how)


class ControlGroup:
    """A control group of this bench's own; where none can be made, `path` is None and it counts nothing."""

    def __init__(self) -> None:
        self.path, self._home = _make_group()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Processes started inside the block belong to the group, with all they start in turn."""
        if self.path is None or self._home is None:
            yield
            return
        (self.path / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield
        finally:
            (self._home / "cgroup.procs").write_text(str(os.getpid()))

    def used_us(self) -> int | None:
        """CPU time of all that ever ran in it."""
        if self.path is None:
            return None
        v1 = self.path / "cpuacct.usage"
        if v1.exists():
            return int(v1.read_text()) // 1000
        found = re.search(r"^usage_usec (\d+)$", (self.path / "cpu.stat").read_text(), re.MULTILINE)
        return int(found[1]) if found else None

    def pids(self) -> list[int]:
        """Processes in it now."""
        return [] if self.path is None else [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]

    def remove(self) -> None:
        """Give it back; the kernel takes a moment after the last process ended."""
        if self.path is None:
            return
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                time.sleep(0.05)


def _make_group() -> tuple[Path | None, Path | None]:
    """A new group and the one this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, place = line.split(":", 2)
        if "cpuacct" in controllers.split(","):
            mount = next((m for m in (_CGROUP / "cpuacct", _CGROUP / "cpu,cpuacct") if m.exists()), None)
        elif number == "0" and (_CGROUP / "cgroup.controllers").exists():
            mount = _CGROUP
        else:
            continue
        if mount is None:
            continue
        home = mount / place.lstrip("/")
        path = home / f"berth-bench-{os.getpid()}-{time.monotonic_ns()}"
        try:
            path.mkdir()
            (path / "cgroup.procs").write_text(str(os.getpid()))
            (home / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            with contextlib.suppress(OSError):
                path.rmdir()
            continue
        return path, home
    return None, None


def read_cpu(root: int, named: Mapping[int, str], group: ControlGroup) -> CpuReading:
    """CPU time of the platform whose first process is `root`."""
    processes = all_processes()
    by_part: Counter[str] = Counter()
    for pid, part in parts_of(root, named, processes).items():
        by_part[part] += processes[pid].own_us
        # What a server has waited for is its own work (PostgreSQL's connections); what an agent has are programs.
        by_part[part if part in _OWN_CHILDREN or part.endswith("children") else f"{part} children"] += processes[
            pid
        ].waited_us
    for server in _OWN_CHILDREN:
        by_part[server] += by_part.pop(f"{server} children", 0)
    counted = group.used_us()
    if counted is None:
        return CpuReading(sum(by_part.values()), by_part, "proc")
    return CpuReading(counted, by_part, "cgroup")


_OWN_CHILDREN: Final = ("postgres", "nats")


# --- memory -----------------------------------------------------------------------------------------------------------


def proportional_kib(pid: int) -> int:
    """Proportional set size: pages shared by n processes count 1/n for each. 0 for a process that is gone."""
    try:
        found = re.search(r"^Pss:\s+(\d+) kB$", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def read_memory_mib(root: int, named: Mapping[int, str]) -> dict[str, float]:
    """Memory of each part of the platform."""
    by_part: Counter[str] = Counter()
    for pid, part in parts_of(root, named, all_processes()).items():
        by_part[part.removesuffix(" children") if part.startswith(_OWN_CHILDREN) else part] += proportional_kib(pid)
    return {part: round(kib / 1024, 1) for part, kib in by_part.most_common()}


# --- syncs ------------------------------------------------------------------------------------------------------------


def fdatasync_p50_ms(folder: Path, *, times: int = 200) -> float:
    """The disk's own price: median of appending 4 KiB to a file in `folder` and syncing it."""
    path = folder / "fdatasync-probe"
    block = os.urandom(4096)
    taken = []
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for _ in range(times):
            os.write(handle, block)
            began = time.perf_counter()
            os.fdatasync(handle)
            taken.append((time.perf_counter() - began) * 1000)
    finally:
        os.close(handle)
        path.unlink()
    return round(statistics.median(taken), 3)


SYNC_CALLS: Final = "fsync,fdatasync,sync_file_range,msync,sync,syncfs"
# A file opened for synchronous writing is synced by each write without a call of its own. Such files are small state
# files, written once for each time they are opened, so that the opening counts as one sync.
_OPENS_SYNCED: Final = re.compile(r"\bopen(?:at)?\(.*\bO_D?SYNC\b.* = \d+")
_LINE: Final = re.compile(r"^(\d+)\s+(\d+\.\d+) (?:<\.\.\. )?(\w+)")
_QUOTED: Final = re.compile(r'"([^"]*)"')
_DECODED: Final = re.compile(r"<([^>]*)>")


@dataclass(frozen=True, slots=True)
class Sync:
    """One sync: when (time.time), by which process, of which file."""

    at: float
    pid: int
    path: str


@dataclass(slots=True)
class SyncTrace:
    """What strace noted while it followed a platform from its start.

    strace runs with a seccomp filter (`--seccomp-bpf`): only the calls that are traced stop a process, so the platform
    runs at nearly its own speed and gathers batches of nearly its own size. Attaching to running processes would stop
    them twice at every call of any kind.
    """

    file: Path
    syncs: list[Sync] = field(default_factory=list)

    def command(self) -> list[str]:
        """What to put in front of the command that starts the platform."""
        how = ["-f", "--seccomp-bpf", "-qq", "-ttt", "-y", "-s", "256"]
        return ["strace", *how, "-e", f"trace={SYNC_CALLS},openat", "-o", str(self.file)]

    def read(self) -> Self:
        """Take in what was noted so far."""
        self.syncs = []
        with self.file.open(errors="replace") as lines:
            for line in lines:
                head = _LINE.match(line)
                if head is None or "resumed>" in line[:64]:
                    continue
                is_open = head[3].startswith("open")
                if is_open and _OPENS_SYNCED.search(line) is None:
                    continue
                path = (_QUOTED if is_open else _DECODED).search(line, head.end())
                self.syncs.append(Sync(float(head[2]), int(head[1]), path[1] if path else ""))
        return self

    def between(self, began: float, ended: float) -> list[Sync]:
        """Syncs that began in this span of `time.time`."""
        return [sync for sync in self.syncs if began <= sync.at < ended]


def by_owner(syncs: list[Sync]) -> dict[str, int]:
    """How many syncs each server or service made, told by the folder of the synced file."""
    counted = Counter(_owner(sync.path) for sync in syncs)
    return dict(counted.most_common())


def _owner(path: str) -> str:
    for mark, owner in (
        ("/postgres", "postgres"), ("/nats", "nats"), ("/nodes", "node_agent"), ("/jetstream", "nats"),
    ):  # fmt: skip
        if mark in path:
            return owner
    return path or "unknown"
