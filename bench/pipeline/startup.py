"""How long a whole platform takes to come up, and the memory it holds when it has worked and is idle."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any, Final

from bench.errors import BenchFailed
from bench.measure import ControlGroup
from bench.options import Options, say
from bench.pipeline.throughput import run_flow
from bench.platform import BenchPlatform, Store, bench_home, stopped_at_end
from berth.embedded.commands import stop
from berth.embedded.layout import Layout
from berth.embedded.supervisor import read_state

REST_SECONDS: Final = 10.0


def platform(options: Options) -> dict[str, Any]:
    """`berth up` on a new folder, 1,000 jobs, memory, `berth down`, `berth up` again."""
    store: Store = options.store or "disk"
    jobs = 200 if options.quick else 1_000
    group = ControlGroup()
    try:
        with bench_home(store) as home:
            layout = Layout(home)
            with stopped_at_end(layout, group):
                first_start_s = _up(layout, group)
                memory = _memory_after(_running(layout, group), jobs)
                stop(layout)
                start_s = _up(layout, group)
    finally:
        group.remove()
    return {
        "bench": "platform",
        "first_start_s": first_start_s,
        "start_s": start_s,
        "memory_mib": round(sum(memory.values()), 1),
        "memory_mib_by_part": memory,
        "jobs": jobs,
        "store": store,
    }


def _up(layout: Layout, group: ControlGroup) -> float:
    """Seconds of the command `berth up`, from the shell's point of view."""
    command = [sys.executable, "-m", "berth.client.cli.main", "up", "--home", str(layout.home), "--json"]
    began = time.monotonic()
    with group.joined():
        done = subprocess.run(command, capture_output=True, check=False, timeout=180)
    taken = round(time.monotonic() - began, 2)
    if done.returncode != 0:
        raise BenchFailed(f"berth up: {(done.stdout + done.stderr).decode(errors='replace')[-2000:]}")
    say(f"up after {taken} s")
    return taken


def _running(layout: Layout, group: ControlGroup) -> BenchPlatform:
    state = read_state(layout)
    assert state is not None
    return BenchPlatform(layout, state, group)


def _memory_after(running: BenchPlatform, jobs: int) -> dict[str, float]:
    run_flow(running, jobs=jobs, command=["true"], tenant="research")
    time.sleep(REST_SECONDS)
    return running.memory_mib()
