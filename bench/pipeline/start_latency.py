"""From submission to the program's first act, one job at a time on an idle platform."""

from __future__ import annotations

import contextlib
import os
import select
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson

from bench.api import Api, job_spec
from bench.errors import BenchFailed
from bench.measure import by_owner, fdatasync_p50_ms
from bench.options import Options, say
from bench.platform import TENANT, BenchPlatform, Store, bench_platform
from berth.embedded.fleet import many_nodes

WARM_UP: Final = 10
START_SECONDS: Final = 20.0
END_SECONDS: Final = 20.0
LOOK_SECONDS: Final = 0.01
PAUSE_SECONDS: Final = 0.02
"""After the end of a job was seen, so that what follows from it (audit, write-offs) is done too."""


def start_latency(options: Options) -> dict[str, Any]:
    """1,000 starts in memory; fewer on disk, with the disk's own price of a sync; syncs on the path under strace."""
    starts, disk_starts, traced_starts = (100, 50, 10) if options.quick else (1_000, 300, 30)
    figures: dict[str, Any] = {"bench": "start_latency", "starts": starts, "disk_starts": disk_starts}
    if options.store != "disk":
        figures |= _set("memory", starts, prefix="")
    if options.store != "memory":
        figures |= _set("disk", disk_starts, prefix="disk_")
    return figures | _syncs_on_path(traced_starts)


def _set(store: Store, starts: int, *, prefix: str) -> dict[str, Any]:
    say(f"{starts} starts, stores on {store}")
    with bench_platform(fleet=many_nodes(1), store=store) as platform:
        spans = [(ended - began) * 1000 for began, ended in _starts(platform, starts)]
        sync_ms = fdatasync_p50_ms(platform.layout.home)
    found = {
        f"{prefix}p50_ms": round(statistics.median(spans), 1),
        f"{prefix}p99_ms": round(statistics.quantiles(spans, n=100, method="inclusive")[98], 1),
        f"{prefix}max_ms": round(max(spans), 1),
        f"{prefix}fsync_ms": sync_ms,
    }
    say(f"{store}: {found}")
    return found


def _syncs_on_path(starts: int) -> dict[str, Any]:
    say(f"counting syncs: {starts} starts under strace")
    try:
        with bench_platform(fleet=many_nodes(1), store="disk", traced=True) as platform:
            spans = _starts(platform, starts)
            assert platform.trace is not None
            found = [platform.trace.between(*span) for span in spans] if platform.trace.read() else []
    except BenchFailed as why:
        if "strace" not in str(why):
            raise
        return {"fsyncs_on_path": None, "fsyncs_why_not": str(why)}
    counts = [len(syncs) for syncs in found]
    owners = by_owner([sync for syncs in found for sync in syncs])
    return {
        "fsyncs_on_path": statistics.median(counts),
        "fsyncs_on_path_max": max(counts),
        "fsyncs_on_path_by_part": {owner: round(count / starts, 1) for owner, count in owners.items()},
    }


def _starts(platform: BenchPlatform, starts: int) -> list[tuple[float, float]]:
    """For each job: when its submission began to be sent, and when its program ran, both by `time.time`."""
    api = platform.api()
    with _starting_line(platform.layout.home / "starting-line") as (path, line):
        command = ["/bin/sh", "-c", f"exec date +%s.%N > {path}"]
        spans = [_one(api, line, command, number) for number in range(WARM_UP + starts)]
    api.close()
    if died := platform.restarts():
        raise BenchFailed(f"parts of the platform died: {died}")
    return spans[WARM_UP:]


def _one(api: Api, line: int, command: list[str], number: int) -> tuple[float, float]:
    body = orjson.dumps(job_spec(f"start-{number}", command, tenant=TENANT))
    began = time.time()
    job_id = api.submit_one(body)
    if not select.select([line], [], [], START_SECONDS)[0]:
        raise BenchFailed(f"{job_id} did not start within {START_SECONDS} s: {api.job(job_id)}")
    started = float(os.read(line, 100))
    deadline = time.monotonic() + END_SECONDS
    while (job := api.job(job_id))["state"] != "succeeded":
        if time.monotonic() > deadline:
            raise BenchFailed(f"{job_id} did not end within {END_SECONDS} s: {job}")
        time.sleep(LOOK_SECONDS)
    time.sleep(PAUSE_SECONDS)
    return began, started


@contextlib.contextmanager
def _starting_line(path: Path) -> Iterator[tuple[Path, int]]:
    """A named pipe that programs write their start to: whoever waits at it costs nothing meanwhile."""
    os.mkfifo(path)
    line = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    try:
        yield path, line
    finally:
        os.close(line)
        path.unlink()
