"""Starting and stopping: data are kept, nothing is left, platforms do not meet, no rights are needed."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from berth.client.sdk import BerthClient
from berth.embedded.supervisor import is_supervised
from berth.testing.platform import (
    TestPlatform,
    embedded_platform,
    processes_of,
    temporary_home,
    wait_until,
)
from tests.e2e.cli import ROOT, Berth
from tests.e2e.test_platform import END_SECONDS, a_job

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("platform"), pytest.mark.timeout(240)]

FLEET = "n1=4xH100-80G:nvswitch"


def client_of(platform: TestPlatform) -> BerthClient:
    return BerthClient(platform.url, platform.token)


def test_down_leaves_no_process_and_up_goes_on_where_it_stopped() -> None:
    with embedded_platform(FLEET) as platform:
        with client_of(platform) as client:
            done = client.wait(client.submit(a_job("echo kept")).job_id, timeout_seconds=END_SECONDS)
            # Ends by itself only after the platform has been down: proves that it is not forgotten, and runs anew.
            flag = platform.layout.home / "go-on"
            job = client.submit(a_job(f"test -e {flag} || sleep 300"))
            wait_until(lambda: client.job(job.job_id).state == "running", END_SECONDS, "it runs")
        first = platform.url, platform.token

        platform.down()
        assert platform.processes() == {}
        flag.touch()

        platform.up()
        assert (platform.url, platform.token) == first
        with client_of(platform) as client:
            assert client.job(done.job_id).state == "succeeded"
            assert client.wait(job.job_id, timeout_seconds=END_SECONDS).state == "succeeded"
            assert "".join(client.logs(done.job_id)) == "kept\n"
        platform.down()
        assert platform.processes() == {}


def test_up_after_the_supervisor_was_killed_takes_over_and_no_program_is_lost() -> None:
    with embedded_platform(FLEET) as platform:
        with client_of(platform) as client:
            flag = platform.layout.home / "go-on"
            job = client.submit(a_job(f"while ! test -e {flag}; do sleep 0.2; done"))
            wait_until(lambda: client.job(job.job_id).state == "running", END_SECONDS, "it runs")
        old = platform.state
        os.kill(old.pid, signal.SIGKILL)
        wait_until(lambda: not is_supervised(platform.layout), 10, "the supervisor is gone")

        platform.up()
        assert not set(old.processes.values()) & platform.processes().keys()
        with client_of(platform) as client:
            flag.touch()
            assert client.wait(job.job_id, timeout_seconds=END_SECONDS).state == "succeeded"
            assert len(client.job(job.job_id).attempts) == 1


@pytest.mark.parametrize("killed", [("node_agent",), ("supervisor", "node_agent")])
def test_down_leaves_no_process_whoever_was_killed_before(killed: tuple[str, ...]) -> None:
    with embedded_platform(FLEET) as platform:
        with client_of(platform) as client:
            job = client.submit(a_job("trap '' TERM; sleep 300 & wait; sleep 300"))
            wait_until(lambda: client.job(job.job_id).state == "running", END_SECONDS, "it runs")
        state = platform.state
        for name in killed:
            os.kill(state.pid if name == "supervisor" else state.processes[name], signal.SIGKILL)
        wait_until(lambda: is_supervised(platform.layout) == ("supervisor" not in killed), 10, "the kill is over")
        platform.down()
        assert platform.processes() == {}


def test_two_platforms_live_side_by_side() -> None:
    with embedded_platform(FLEET) as one, embedded_platform(FLEET) as other:
        assert one.url != other.url
        with client_of(one) as client, client_of(other) as other_client:
            jobs = [c.submit(a_job("sleep 0.2")) for c in (client, other_client)]
            ended = [
                c.wait(job.job_id, timeout_seconds=END_SECONDS).state
                for c, job in zip((client, other_client), jobs, strict=True)
            ]
            assert ended == ["succeeded", "succeeded"]
            assert [j.job_id for j in other_client.jobs()] == [jobs[1].job_id]
        one.down()
        assert one.processes() == {} and other.processes() != {}
        with client_of(other) as other_client:
            assert (
                other_client.wait(other_client.submit(a_job()).job_id, timeout_seconds=END_SECONDS).state == "succeeded"
            )


def test_a_second_up_says_that_it_runs_and_down_that_it_has_stopped() -> None:
    with embedded_platform(FLEET) as platform:
        berth = Berth(platform.layout.home)
        again = berth.json("up")
        assert (again["state"], again["url"], again["is_new"]) == ("running", platform.url, False)
        assert berth.json("status")["state"] == "running"
        assert berth.json("down")["was_running"] is True
        assert berth.json("down")["was_running"] is False
        berth("status", expect=1)
        assert platform.processes() == {}


def test_a_first_policy_with_faults_is_refused_before_anything_starts(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("tenants: {a: {quota: {H100-80G: -1}}}\n")
    Berth(tmp_path / "home")("up", "--policy", str(policy), expect=2)
    assert not (tmp_path / "home").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user already")
def test_an_ordinary_user_needs_no_rights() -> None:
    try:
        user = pwd.getpwnam("nobody")
    except KeyError:
        pytest.skip("this machine has no account without rights")
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv here")
    become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    if not all(map(reachable_by_others, (Path(sys.executable), ROOT / "libs"))):
        # An interpreter below /root, as on this machine: only looking into closed folders is allowed besides.
        become += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    if subprocess.run([*become, sys.executable, "-c", ""], check=False, capture_output=True).returncode != 0:
        pytest.skip("an ordinary user cannot run this interpreter")
    with temporary_home() as home:
        os.chown(home.parent, user.pw_uid, user.pw_gid)
        berth = Berth(home, tuple(become))
        try:
            assert berth.json("up", "--fleet", FLEET)["state"] == "running"
            assert {Path(f"/proc/{pid}").stat().st_uid for pid in processes_of(home)} == {user.pw_uid}
            berth("run", "--tenant", "research", "--wait", "--", "sh", "-c", "id -u")
        finally:
            berth("down")
        assert processes_of(home) == {}


def reachable_by_others(path: Path) -> bool:
    """Whether anybody may read `path`, also behind its links."""
    real = path.resolve()
    return all(folder.stat().st_mode & 0o005 for folder in (real, *real.parents, path, *path.parents))
