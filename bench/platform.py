"""A platform for one bench: its own folder, started, measured, always stopped and removed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from bench.api import Api
from bench.errors import BenchFailed
from bench.measure import ControlGroup, CpuReading, SyncTrace, all_processes, parts_of, read_cpu, read_memory_mib
from berth.embedded.commands import start, stop, wait_for
from berth.embedded.layout import Layout
from berth.embedded.nats import NatsServer
from berth.embedded.postgres import PostgresServer
from berth.embedded.supervisor import PlatformSettings, PlatformState

Store = Literal["memory", "disk"]
TENANT: Final = "bench"
MEMORY: Final = Path("/dev/shm")
GONE_SECONDS: Final = 10.0

POLICY: Final = """\
description: One tenant without limits; whatever fits starts.
card_types:
  H100-80G: {memory_gib: 80, preference: 1}
tenants:
  bench: {}
defaults:
  queue: {discipline: best_effort}
  placement: {strategy: pack}
  recovery: {suspect_after: 30s, lost_after: 90s}
"""


@dataclass(slots=True)
class BenchPlatform:
    """A running platform as the benches see it."""

    layout: Layout
    state: PlatformState
    group: ControlGroup
    trace: SyncTrace | None = None

    def api(self) -> Api:
        """A connection with the operator's token."""
        return Api(self.state.url, self.layout.token_file.read_text().strip())

    def cpu(self) -> CpuReading:
        """CPU time that all of it has used so far."""
        return read_cpu(self.state.pid, self.named(), self.group)

    def memory_mib(self) -> dict[str, float]:
        """Memory of each part."""
        return read_memory_mib(self.state.pid, self.named())

    def named(self) -> dict[int, str]:
        """The processes that give their names to parts."""
        names = {pid: name for name, pid in self.state.processes.items()}
        names[self.state.pid] = "supervisor"
        servers = (("nats", _nats(self.layout).pid), ("postgres", _postgres(self.layout).pid))
        names.update({pid: name for name, pid in servers if pid is not None})
        return names

    def admin_dsn(self) -> str:
        """The database's administrator, for its own counters."""
        return _postgres(self.layout).dsn()

    def restarts(self) -> dict[str, int]:
        """Parts that died meanwhile: there must be none."""
        state = wait_for(self.layout, {"running"}, 1.0)
        return state.restarts if state is not None else {"supervisor": 1}


@contextlib.contextmanager
def bench_platform(
    *, fleet: str, store: Store, environment: dict[str, str] | None = None, traced: bool = False
) -> Iterator[BenchPlatform]:
    """Start a platform in a new folder; stop it and remove the folder at the end, whatever happened.

    Args:
        fleet: as for `berth up --fleet`.
        store: where the whole folder lies: bus, database, journals of the nodes.
        environment: more settings of the services.
        traced: follow it with strace and note its syncs.

    Raises:
        BenchFailed: it did not start, or parts of it were left after the stop.
    """
    with bench_home(store) as home:
        layout = Layout(home)
        policy = home / "policy.yaml"
        policy.write_text(POLICY)
        settings = PlatformSettings(fleet=fleet, environment={"BERTH_POLICY_FILE": str(policy), **(environment or {})})
        trace = SyncTrace(home.with_name(home.name + ".strace")) if traced else None
        group = ControlGroup()
        try:
            with stopped_at_end(layout, group):
                with group.joined():
                    state = start(layout, settings) if trace is None else _start_traced(layout, settings, trace)
                if state.state != "running":
                    raise BenchFailed(f"the platform did not start: {state.message}\n{_tails(layout)}")
                yield BenchPlatform(layout, state, group, trace)
        finally:
            group.remove()
            if trace is not None:
                trace.file.unlink(missing_ok=True)


@contextlib.contextmanager
def bench_home(store: Store) -> Iterator[Path]:
    """A folder for a platform's data, in memory or on the disk of the temporary folder."""
    if store == "memory" and not os.access(MEMORY, os.W_OK):
        raise BenchFailed(f"no folder in memory: {MEMORY} is missing or cannot be written")
    home = Path(tempfile.mkdtemp(prefix="berth-bench-", dir=MEMORY if store == "memory" else None))
    home.chmod(0o755)  # the database's account must reach its data here, or they would be put elsewhere
    try:
        yield home
    finally:
        if (home / "postgres").exists():
            PostgresServer(home / "postgres").destroy()
        shutil.rmtree(home, ignore_errors=True)


@contextlib.contextmanager
def stopped_at_end(layout: Layout, group: ControlGroup) -> Iterator[None]:
    """Stop the platform in `layout` when the block ends, and see that nothing of it is left."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            print(_tails(layout), file=sys.stderr)
        with contextlib.suppress(Exception):
            stop(layout)
        raise
    state = wait_for(layout, {"running", "failed", "stopped"}, 1.0)
    processes = all_processes()
    members = set(group.pids())
    if state is not None:
        members |= set(parts_of(state.pid, {state.pid: "supervisor"}, processes))
    stop(layout)
    left = _left(members)
    if left:
        raise BenchFailed(f"processes left after the stop: {left}")


def _left(members: set[int]) -> list[str]:
    deadline = time.monotonic() + GONE_SECONDS
    while (left := [pid for pid in members if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left if _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _start_traced(layout: Layout, settings: PlatformSettings, trace: SyncTrace) -> PlatformState:
    if shutil.which("strace") is None:
        raise BenchFailed("strace is not installed")
    command = [*trace.command(), sys.executable, "-m", "bench.launch", str(layout.home), json.dumps(asdict(settings))]
    # strace lives as long as what it follows, so it is not waited for here; it ends with the platform.
    tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, stderr=sys.stderr)
    state = wait_for(layout, {"running", "failed", "stopped"}, 120.0, process=tracer)
    return state if state is not None else PlatformState(state="failed", message="no answer under strace")


def _tails(layout: Layout) -> str:
    parts = []
    for log in sorted(layout.logs.glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()[-15:]
        parts.append(f"--- {log.name}\n" + "\n".join(line[:400] for line in lines))
    return "\n".join(parts)


def _nats(layout: Layout) -> NatsServer:
    return NatsServer(layout.home / "nats", credentials=layout.run / "credentials")


def _postgres(layout: Layout) -> PostgresServer:
    return PostgresServer(layout.home / "postgres")
