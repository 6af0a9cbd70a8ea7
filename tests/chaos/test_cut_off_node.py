"""Silence longer than a lease: a node that is cut off has stopped its work before anything of it is given away; a
platform that is away kills nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from berth.bus.connection import Connection
from berth.bus.permissions import PROVISIONER
from berth.bus.provision import ensure_node_consumers
from berth.client.sdk import BerthClient
from berth.testing.platform import POLICY, TestPlatform, embedded_platform, wait_until
from tests.chaos.campaign import TERMINAL
from tests.chaos.faults import freeze
from tests.chaos.judge import Asked, judge_outside
from tests.chaos.records import read_records
from tests.chaos.users import PROGRAM

pytestmark = [pytest.mark.chaos, pytest.mark.xdist_group("platform"), pytest.mark.timeout(180)]

IS_LONG = os.environ.get("BERTH_TEST_CHAOS") == "long"
SUSPECT_SECONDS, LOST_SECONDS = 2, 10
FAR = "far"
FLEET = "n1=2xH100-80G:nvswitch,n2=2xH100-80G:nvswitch"


@contextmanager
def another_agent(platform: TestPlatform, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An agent on a machine of its own, as far as the platform can tell: it can be cut off without the others."""
    environment = dict(
        entry.split("=", 1)
        for entry in Path(f"/proc/{platform.pid('node_agent')}/environ").read_text().split("\0")
        if "=" in entry
    )
    asyncio.run(_provision(platform))
    environment |= {"BERTH_HOME": str(folder), "BERTH_NODES": f"{FAR}=2xH100-80G:nvswitch"}
    with (folder / "agent.log").open("ab") as log:
        agent = subprocess.Popen(
            [sys.executable, "-m", "services.node_agent"], env=environment, cwd=folder, stdout=log, stderr=log
        )
    try:
        yield agent
    finally:
        for number in (signal.SIGCONT, signal.SIGINT):
            agent.send_signal(number)
        agent.wait(30)


async def _provision(platform: TestPlatform) -> None:
    async with Connection(platform.nats.settings(PROVISIONER)) as bus:
        await ensure_node_consumers(bus, "default", [FAR])


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """Of a platform with little patience, so that tests need little too."""
    document = yaml.safe_load(POLICY.read_text())
    document["defaults"]["recovery"] |= {
        "suspect_after": f"{SUSPECT_SECONDS}s",
        "lost_after": f"{LOST_SECONDS}s",
        "backoff": {"first": "0s", "factor": 1, "max": "0s"},
    }
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump(document))
    return {"BERTH_POLICY_FILE": str(path), "BERTH_SHORTEST_LOST_AFTER_SECONDS": "1"}


def test_work_of_a_lost_node_has_ended_before_it_runs_elsewhere(settings: dict[str, str]) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="berth-far-") as folder,
        tempfile.TemporaryDirectory(prefix="berth-records-") as records,
        embedded_platform(FLEET, environment=settings) as platform,
        another_agent(platform, Path(folder)) as agent,
        BerthClient(platform.url, platform.token) as client,
    ):
        wait_until(lambda: {n.node: n.state for n in client.nodes()}.get(FAR) == "ready", 30, "the far node is ready")
        for node in ("n1", "n2"):
            client.cordon(node)
        program = [sys.executable, "-I", "-S", str(PROGRAM), records, "60", "deaf"]
        spec = {"name": "deaf", "tenant": "research", "class": "general", "gpus": 2, "command": program}
        wait_until(lambda: all(n.cordoned for n in client.nodes() if n.node != FAR), 30, "the others take nothing")
        job = client.submit(spec)
        wait_until(lambda: bool(read_records(Path(records))), 30, "it runs on the far node")

        agent.send_signal(signal.SIGSTOP)
        client.cordon("n1", cordoned=False)
        ended = client.wait(job.job_id, timeout_seconds=60)
        agent.send_signal(signal.SIGCONT)
        wait_until(lambda: {n.node: n.state for n in client.nodes()}[FAR] == "ready", 30, "the far node is back")

        runs = read_records(Path(records))
        asked = Asked("deaf", "deaf", 1, 2, [job.job_id])
        told = [(e.subject, e.type) for e in client.events(subject=job.job_id) if e.type in TERMINAL]
        violations = judge_outside([asked], runs, {job.job_id: ended.state}, told, control_plane_faults_only=False)
        assert not violations
        assert [(run.attempt, run.node) for run in runs] == [(1, FAR), (2, "n1")]
        assert not any(gpu.held_by for gpu in client.gpus())
        assert not Path(f"/proc/{runs[0].pid}").exists()


@pytest.mark.parametrize("part", ["nats", *(("inventory", "postgres") if IS_LONG else ())])
def test_an_outage_longer_than_the_lease_kills_no_work(settings: dict[str, str], part: str) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="berth-records-") as records,
        embedded_platform(FLEET, environment=settings) as platform,
        BerthClient(platform.url, platform.token) as client,
    ):
        program = [sys.executable, "-I", "-S", str(PROGRAM), records, f"{2 * LOST_SECONDS + 5}", "plain"]
        job = client.submit({"name": "steady", "tenant": "research", "class": "general", "gpus": 1, "command": program})
        wait_until(lambda: bool(read_records(Path(records))), 30, "it runs")
        asyncio.run(freeze(platform, part, 2.0 * LOST_SECONDS))
        assert client.wait(job.job_id, timeout_seconds=60).state == "succeeded"
        assert [(run.attempt, run.code) for run in read_records(Path(records))] == [(1, 0)]
        wait_until(lambda: {n.state for n in client.nodes()} == {"ready"}, 30, "every node is ready")
