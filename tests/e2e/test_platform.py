"""What users do on a platform that really runs: from `up` to `down`, over REST and on the command line."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from berth.client.sdk import BerthClient, Refused
from berth.testing.platform import TestPlatform, wait_until
from tests.e2e.cli import Berth

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("platform"), pytest.mark.timeout(180)]

END_SECONDS = 60.0


def a_job(script: str = "true", **fields: Any) -> dict[str, Any]:
    """One GPU, a shell script."""
    name = f"job-{uuid.uuid4().hex[:8]}"
    return {
        "name": name,
        "tenant": "research",
        "class": "general",
        "gpus": 1,
        "command": ["sh", "-c", script],
        **fields,
    }


def log_of(client: BerthClient, job_id: str, **which: int) -> str:
    return "".join(client.logs(job_id, **which))


def test_every_node_of_the_fleet_is_ready(client: BerthClient) -> None:
    nodes = {node.node: node for node in client.nodes()}
    assert {name: (node.state, node.gpus_usable, node.card_types) for name, node in nodes.items()} == {
        "h1": ("ready", 8, {"H100-80G": 8}),
        "a1": ("ready", 4, {"A100-40G": 4}),
    }


def test_a_batch_runs_and_each_program_sees_its_own_cards(client: BerthClient) -> None:
    script = 'echo "cards $CUDA_VISIBLE_DEVICES"; sleep 0.5'
    answer = client.submit_batch([a_job(script, gpus=gpus, types=["H100-80G"]) for gpus in (1, 2, 4, 1)])
    ended = [client.wait(job.job_id, timeout_seconds=END_SECONDS) for job in answer.jobs]
    assert [job.state for job in ended] == ["succeeded"] * 4
    cards = [set(log_of(client, job.job_id).split()[1].split(",")) for job in ended]
    assert [len(of) for of in cards] == [1, 2, 4, 1]
    assert sum(map(len, cards)) == len(set[str]().union(*cards)), "two programs ran at once on one card"
    assert [set(job.attempts[0].assignments[0].gpus) for job in map(client.job, (j.job_id for j in ended))] == cards


def test_a_gang_starts_together_and_each_worker_knows_its_number(client: BerthClient) -> None:
    script = 'echo "worker $BERTH_WORKER of $BERTH_WORKERS"'
    job = client.submit(a_job(script, workers=2, gpus=4, **{"class": "training"}))
    assert client.wait(job.job_id, timeout_seconds=END_SECONDS).state == "succeeded"
    assert [log_of(client, job.job_id, worker=n).strip() for n in (0, 1)] == ["worker 0 of 2", "worker 1 of 2"]


def test_the_same_key_is_the_same_job(client: BerthClient) -> None:
    job, key = a_job(), uuid.uuid4().hex
    first, second = client.submit(job, key=key), client.submit(job, key=key)
    assert (first.job_id, second.is_repeat) == (second.job_id, True)
    with pytest.raises(Refused):
        client.submit(a_job(), key=key)


def test_a_failing_job_is_tried_again_and_says_what_happened(client: BerthClient) -> None:
    script = 'echo "attempt $BERTH_ATTEMPT"; test "$BERTH_ATTEMPT" -gt 1 || exit 7'
    job = client.wait(client.submit(a_job(script)).job_id, timeout_seconds=END_SECONDS)
    attempts = client.job(job.job_id).attempts
    assert job.state == "succeeded"
    assert [(a.attempt, a.outcome, a.exit_code) for a in attempts] == [(1, "failed", 7), (2, "succeeded", 0)]
    assert attempts[0].fence < attempts[1].fence
    assert log_of(client, job.job_id, attempt=1) == "attempt 1\n"


def test_a_job_out_of_retries_fails_with_the_end_of_its_output(client: BerthClient) -> None:
    script = "echo no such table >&2; exit 3"
    job = client.wait(client.submit(a_job(script, max_restarts=0)).job_id, timeout_seconds=END_SECONDS)
    assert job.state == "failed"
    assert "no such table" in client.job(job.job_id).message


def test_what_can_never_fit_is_refused_with_numbers(client: BerthClient) -> None:
    job = client.wait(client.submit(a_job(gpus=64, types=["H100-80G"])).job_id, timeout_seconds=END_SECONDS)
    assert job.state == "refused"
    assert job.reasons and "64" in " ".join(client.why(job.job_id).text)


def test_a_stranger_gets_a_problem_document(platform: TestPlatform) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        answer = httpx.get(f"{platform.url}/v1/jobs", headers=headers, trust_env=False)
        assert answer.status_code == 401
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"]


def test_the_command_line_submits_shows_explains_follows_and_cancels(berth: Berth) -> None:
    suffix = uuid.uuid4().hex[:6]
    fill = f"""
name: fill-{suffix}
tenant: research
class: general
gpus: 4
types: [A100-40G]
command: [sh, -c, "echo filling; sleep 300"]
"""
    [holder] = [berth.json("submit", "-", stdin=fill)]
    waiting = berth.json("submit", "-", stdin=fill.replace("fill-", "next-"))
    assert {holder["job_id"], waiting["job_id"]} <= {job["job_id"] for job in berth.json("list")["jobs"]}

    wait_until(lambda: berth.json("show", holder["job_id"])["state"] == "running", END_SECONDS, "the first runs")
    wait_until(lambda: bool(berth.json("show", f"next-{suffix}")["reasons"]), END_SECONDS, "the second says why")
    why = berth.json("why", f"next-{suffix}")
    assert why["state"] == "waiting" and why["place"] == 1 and why["text"]
    assert berth("logs", f"fill-{suffix}").splitlines() == ["filling"]
    held = [gpu for gpu in berth.json("gpus")["gpus"] if gpu["held_by"]]
    assert {job for gpu in held for job in gpu["held_by"]} == {holder["job_id"]} and len(held) == 4

    for name in (f"next-{suffix}", f"fill-{suffix}"):
        berth("cancel", name, "--wait", "--why", "test")
        assert berth.json("show", name)["state"] == "cancelled"
    wait_until(lambda: not [g for g in berth.json("gpus")["gpus"] if g["held_by"]], END_SECONDS, "the cards are free")


def test_the_command_line_says_what_is_wrong_by_its_exit_code(berth: Berth) -> None:
    berth("show", "no-such-job", expect=3)
    berth("submit", "-", stdin="name: x\nclass: general\ngpus: -1\n", expect=3)
    berth("submit", "no-such-file", expect=2)
    berth("run", "--tenant", "research", "--wait", "--", "false", expect=1)
