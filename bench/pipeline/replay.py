"""Decisions recorded live, with restarts and a change of policy on the way, decided again: how many differ, how fast."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any, Final

import yaml

from bench.api import Api, batch_body, job_spec
from bench.errors import BenchFailed
from bench.options import Options, say
from bench.pipeline.throughput import BATCH, SIMULATED
from bench.platform import POLICY, TENANT, BenchPlatform, bench_platform
from berth.client.record import export
from berth.client.transport import Transport
from berth.embedded.commands import wait_for
from berth.embedded.fleet import many_nodes
from berth.replay.record_file import read
from berth.replay.rerun import Verdict, explain_difference
from berth.replay.rerun import replay as run_again

RESTARTED: Final = ("placement", "lifecycle", "admission", "inventory", "audit", "gateway")
JOBS_A_ROUND: Final = 1_000
REPLACED_SECONDS: Final = 30.0
DRAINED_SECONDS: Final = 240.0


def replay(options: Options) -> dict[str, Any]:
    """Rounds of 1,000 jobs of simulated work (some fail and are tried again) until 100,000 events are recorded; in each
    of the first rounds one service is killed, half-way the policy changes."""
    wanted, nodes = (8_000, 16) if options.quick else (100_000, 64)
    with bench_platform(fleet=many_nodes(nodes), store=options.store or "memory", environment=SIMULATED) as platform:
        began = time.monotonic()
        rounds = _fill(platform, wanted)
        live_seconds = time.monotonic() - began
        path = platform.layout.home / "record.jsonl.gz"
        with Transport(platform.state.url, platform.layout.token_file.read_text().strip()) as api:
            done = export(api, path)
        say(f"{done.events} events and {done.commits} commits in {done.bytes / 1e6:.1f} MB")
        seconds, verdict = _decide_again(path)
    if done.events < wanted:
        raise BenchFailed(f"{done.events} events recorded, {wanted} wanted")
    return {
        "bench": "replay",
        "events": verdict.events,
        "commits": verdict.commits,
        "events_per_s": round(verdict.events / seconds, 1),
        "differences": 0 if verdict.is_equal else 1,
        "emissions": verdict.emissions,
        "starts": verdict.restarts,
        "policies": verdict.policies,
        "jobs": rounds * JOBS_A_ROUND,
        "recorded_in_s": round(live_seconds, 1),
        "file_mb": round(done.bytes / 1e6, 1),
    }


def _fill(platform: BenchPlatform, wanted: int) -> int:
    """Rounds it took."""
    rounds = 0
    api = platform.api()
    while _recorded(api) < wanted:
        specs = [_job(f"replay-{rounds}-{n}", fails=n % 50 == 0) for n in range(JOBS_A_ROUND)]
        for at in range(0, JOBS_A_ROUND, BATCH):
            api.submit(batch_body(specs[at : at + BATCH]))
        if rounds < len(RESTARTED):
            api.close()
            _replace(platform, RESTARTED[rounds])
            api = platform.api()
        if rounds == 2:
            _change_policy(api)
        _drain(api)
        rounds += 1
        say(f"round {rounds}: {_recorded(api)} events")
    api.close()
    return rounds


def _job(name: str, *, fails: bool) -> dict[str, object]:
    return job_spec(name, ["false"] if fails else ["sleep", "0.5"], tenant=TENANT)


def _recorded(api: Api) -> int:
    return int(api.call("GET", f"/v1/record/events?after={2**61}")["last_seq"])


def _replace(platform: BenchPlatform, service: str) -> None:
    """Kill a service as a crash does; its supervisor starts another."""
    old = platform.state.processes[service]
    os.kill(old, signal.SIGKILL)
    deadline = time.monotonic() + REPLACED_SECONDS
    while time.monotonic() < deadline:
        state = wait_for(platform.layout, {"running"}, 1.0)
        if state is not None and state.processes.get(service, 0) not in (0, old):
            platform.state = state
            say(f"{service} killed and replaced")
            if service == "gateway":
                _reachable(platform)
            return
        time.sleep(0.1)
    raise BenchFailed(f"{service} was not replaced")


def _reachable(platform: BenchPlatform) -> None:
    deadline = time.monotonic() + REPLACED_SECONDS
    while True:
        try:
            api = platform.api()
            api.has_live_jobs()
            api.close()
            return
        except (OSError, BenchFailed):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def _change_policy(api: Api) -> None:
    document = yaml.safe_load(POLICY)
    document["tenants"]["bench"] = {"quota": {"H100-80G": 200}}
    answer = api.call("PUT", "/v1/policy", json.dumps({"document": document, "why": "a limit"}).encode())
    say(f"policy {answer['state']}")


def _drain(api: Api) -> None:
    deadline = time.monotonic() + DRAINED_SECONDS
    while api.has_live_jobs():
        if time.monotonic() > deadline:
            raise BenchFailed(f"jobs still live after {DRAINED_SECONDS:g} s")
        time.sleep(0.3)


def _decide_again(path: Path) -> tuple[float, Verdict]:
    began = time.monotonic()
    verdict = run_again(read(path))
    seconds = time.monotonic() - began
    if verdict.difference is not None:
        found = explain_difference(verdict.difference, read(path))
        say("\n".join(found.lines()))
    return seconds, verdict
