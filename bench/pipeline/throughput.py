"""Many jobs through the whole platform: how many a second, and what each costs in CPU time and disk syncs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from bench.api import batch_body, job_spec
from bench.errors import BenchFailed
from bench.measure import CpuReading, by_owner
from bench.options import Options, say
from bench.platform import TENANT, BenchPlatform, Store, bench_platform
from berth.embedded.fleet import many_nodes

BATCH: Final = 500
SENDERS: Final = 2
LOOK_SECONDS: Final = 0.5
SETTLE_SECONDS: Final = 2.0
IDLE_SECONDS: Final = 5.0
SIMULATED: Final = {"BERTH_NODE_RUNTIME": "simulated"}


@dataclass(frozen=True, slots=True)
class Flow:
    """What one run gave. cpu: from before the first request until all parts were idle again."""

    jobs: int
    began: float
    ended: float
    settled: float
    seconds: float
    submit_seconds: float
    cpu: CpuReading
    wal_syncs: int

    @property
    def jobs_per_s(self) -> float:
        return round(self.jobs / self.seconds, 1)

    @property
    def cpu_us_per_job(self) -> float:
        return round(self.cpu.total_us / self.jobs, 1)

    def cpu_by_part(self) -> dict[str, float]:
        """CPU us per job of each part."""
        return {part: round(used / self.jobs, 1) for part, used in self.cpu.by_part_us.items()}


def pipeline(options: Options) -> dict[str, Any]:
    """20,000 jobs of simulated work on 256 nodes of 8 GPUs; syncs counted in a second, smaller run."""
    store: Store = options.store or "disk"
    nodes, jobs, traced_jobs = (32, 2_000, 1_000) if options.quick else (256, 20_000, 4_000)
    command = ["sleep", "1"]
    with bench_platform(fleet=many_nodes(nodes), store=store, environment=SIMULATED) as platform:
        idle = idle_us_per_s(platform)
        flow = run_flow(platform, jobs=jobs, command=command)
    figures: dict[str, Any] = {
        "bench": "pipeline",
        "jobs_per_s": flow.jobs_per_s,
        "cpu_us_per_job": flow.cpu_us_per_job,
        "fsyncs_per_1000_jobs": None,
        "jobs": jobs,
        "nodes": nodes,
        "store": store,
        "cpu_us_per_job_by_part": flow.cpu_by_part(),
        "cpu_counted_by": flow.cpu.how,
        "idle_cpu_us_per_s": idle,
        "submit_jobs_per_s": round(jobs / flow.submit_seconds, 1),
        "wal_fsyncs_per_1000_jobs": round(flow.wal_syncs * 1000 / jobs, 1),
    }
    return figures | count_syncs(nodes=nodes, jobs=traced_jobs, command=command)


def count_syncs(*, nodes: int, jobs: int, command: Sequence[str]) -> dict[str, Any]:
    """Syncs of one run on disk, followed by strace; the reason where that is not possible."""
    say(f"counting syncs: {jobs} jobs under strace")
    try:
        with bench_platform(fleet=many_nodes(nodes), store="disk", environment=SIMULATED, traced=True) as platform:
            flow = run_flow(platform, jobs=jobs, command=command)
            assert platform.trace is not None
            syncs = platform.trace.read().between(flow.began, flow.settled)
    except BenchFailed as why:
        if "strace" not in str(why):
            raise
        return {"fsyncs_why_not": str(why)}
    return {
        "fsyncs_per_1000_jobs": round(len(syncs) * 1000 / jobs, 1),
        "fsyncs_by_part": {owner: round(count * 1000 / jobs, 1) for owner, count in by_owner(syncs).items()},
        "fsyncs_jobs": jobs,
        "fsyncs_jobs_per_s": flow.jobs_per_s,
    }


def processes(options: Options) -> dict[str, Any]:
    """2,000 real programs (`true`), one GPU each, on 16 nodes of 8 GPUs."""
    store: Store = options.store or "memory"
    jobs = 300 if options.quick else 2_000
    with bench_platform(fleet=many_nodes(16), store=store) as platform:
        idle = idle_us_per_s(platform)
        flow = run_flow(platform, jobs=jobs, command=["true"])
    return {
        "bench": "processes",
        "jobs_per_s": flow.jobs_per_s,
        "cpu_ms_per_job": round(flow.cpu_us_per_job / 1000, 2),
        "jobs": jobs,
        "store": store,
        "cpu_ms_per_job_by_part": {part: round(us / 1000, 2) for part, us in flow.cpu_by_part().items()},
        "cpu_counted_by": flow.cpu.how,
        "idle_cpu_us_per_s": idle,
    }


def idle_us_per_s(platform: BenchPlatform) -> float:
    """CPU time a second of a platform without work."""
    time.sleep(SETTLE_SECONDS)
    before, began = platform.cpu(), time.monotonic()
    time.sleep(IDLE_SECONDS)
    used = platform.cpu().since(before).total_us
    return round(used / (time.monotonic() - began), 1)


def run_flow(
    platform: BenchPlatform, *, jobs: int, command: Sequence[str], tenant: str = TENANT, timeout_s: float = 280.0
) -> Flow:
    """Send `jobs` as fast as they are taken, wait until all have succeeded and the platform is idle again.

    Raises:
        BenchFailed: a job did not succeed, time ran out, or a part of the platform died meanwhile.
    """
    specs = [job_spec(f"bench-{number}", command, tenant=tenant) for number in range(jobs)]
    bodies = [batch_body(specs[at : at + BATCH]) for at in range(0, jobs, BATCH)]
    api = platform.api()
    wal_before = _wal_syncs(platform)
    before = platform.cpu()
    began, started = time.time(), time.monotonic()
    _send(platform, bodies)
    submit_seconds = time.monotonic() - started
    say(f"{jobs} jobs taken in {submit_seconds:.1f} s")
    while api.has_live_jobs():
        if time.monotonic() - started > timeout_s:
            raise BenchFailed(f"jobs are not over after {timeout_s} s: {api.outcomes()}")
        time.sleep(LOOK_SECONDS)
    seconds, ended = time.monotonic() - started, time.time()
    time.sleep(SETTLE_SECONDS)  # the audit record and write-offs may be behind what users see; they belong to the price
    used = platform.cpu().since(before)
    settled = time.time()
    wal_syncs = _wal_syncs(platform) - wal_before
    outcomes = api.outcomes()
    api.close()
    if outcomes != {"succeeded": jobs}:
        raise BenchFailed(f"{jobs} jobs should have succeeded: {outcomes}")
    if died := platform.restarts():
        raise BenchFailed(f"parts of the platform died: {died}")
    say(f"{jobs} jobs over in {seconds:.1f} s, {used.total_us / jobs:.0f} us CPU per job")
    return Flow(jobs, began, ended, settled, seconds, submit_seconds, used, wal_syncs)


def _send(platform: BenchPlatform, bodies: list[bytes]) -> None:
    """All bodies, over a few connections at once."""
    left = iter(bodies)
    taking = threading.Lock()
    failures: list[Exception] = []

    def sender() -> None:
        api = platform.api()
        try:
            while not failures:
                with taking:
                    body = next(left, None)
                if body is None:
                    return
                api.submit(body)
        except Exception as error:
            failures.append(error)
        finally:
            api.close()

    senders = [threading.Thread(target=sender) for _ in range(SENDERS)]
    for each in senders:
        each.start()
    for each in senders:
        each.join()
    if failures:
        raise failures[0]


def _wal_syncs(platform: BenchPlatform) -> int:
    """Syncs of the write-ahead log by PostgreSQL's own count; a check on strace, and known for the large run too."""

    async def ask() -> int:
        connection = await asyncpg.connect(platform.admin_dsn())
        try:
            found = await connection.fetchval("SELECT coalesce(sum(fsyncs), 0) FROM pg_stat_io WHERE object = 'wal'")
        finally:
            await connection.close()
        return int(found)

    return asyncio.run(ask())
