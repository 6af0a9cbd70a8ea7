"""The command line against a gateway that listens: output, JSON, exit codes, helpful errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from berth.contracts.requests import LogAnswer, QuotaAnswer, QuotaLine
from services.gateway.api.jobs import LOG_CHUNKS
from tests.unit.client.conftest import Cli, Platform
from tests.unit.gateway.fakes import waiting

JOB = "name: train\nclass: training\ngpus: 2\ncommand: [python, train.py]\n"


def submitted(berth: Cli, text: str = JOB, *options: str) -> str:
    ran = berth("submit", "-", "--json", *options, stdin=text)
    assert ran.code == 0, ran.err
    job_id: str = ran.json["job_id"]
    return job_id


# ----------------------------------------------------------------------------------------------------------- submitting
def test_a_file_is_submitted(berth: Cli) -> None:
    ran = berth("submit", berth.file("job.yaml", JOB))
    assert (ran.code, ran.out.split()[1]) == (0, "train")


def test_a_key_makes_a_repeat_harmless(berth: Cli) -> None:
    assert submitted(berth, JOB, "--key", "cli-1") == submitted(berth, JOB, "--key", "cli-1")
    ran = berth("submit", "-", "--key", "cli-1", "--set", "gpus=4", stdin=JOB)
    assert ran.code == 3
    assert "Idempotency-Key" in ran.err


def test_several_documents_are_a_batch(berth: Cli) -> None:
    ran = berth("submit", "-", "--json", stdin=f"{JOB}---\n{JOB}")
    assert len(ran.json["jobs"]) == 2


def test_fields_are_overridden(berth: Cli, platform: Platform) -> None:
    job = submitted(
        berth,
        JOB,
        "--set",
        "gpus=1",
        "--set",
        "env.LR=0.1",
        "--set",
        "types=[H100-80G]",
        "--set",
        "name=a=b",
        "--set",
        "priority=7",
    )
    with platform.client() as client:
        spec = client.job(job).spec
    assert spec is not None
    assert (spec.gpus, spec.env, spec.types, spec.name, spec.priority) == (1, {"LR": "0.1"}, ("H100-80G",), "a=b", 7)


def test_one_command_is_run(berth: Cli, platform: Platform) -> None:
    ran = berth(
        "run",
        "--gpus",
        "2",
        "--class",
        "training",
        "--env",
        "A=b=c",
        "--time-limit",
        "1h",
        "--json",
        "--",
        "python",
        "train.py",
        "--lr",
        "1",
    )
    assert ran.code == 0, ran.err
    with platform.client() as client:
        found = client.job(ran.json["job_id"])
    assert found.name.startswith("train-")
    assert found.spec is not None
    assert found.spec.command == ("python", "train.py", "--lr", "1")
    assert (found.spec.env, found.spec.workdir) == ({"A": "b=c"}, str(berth.folder))


def test_a_secret_is_taken_from_the_environment(
    berth: Cli, platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("API_KEY", "s3cr3t")
    ran = berth("run", "--secret-env", "API_KEY", "--json", "--", "x")
    assert platform.world.store.job_secrets[ran.json["job_id"]] == {"API_KEY": "s3cr3t"}
    assert "s3cr3t" not in berth("show", ran.json["job_id"], "--json").out
    assert berth("run", "--secret-env", "MISSING", "--", "x").code == 2


# --------------------------------------------------------------------------------------------------------------- reading
def test_jobs_are_listed_and_shown(berth: Cli, platform: Platform) -> None:
    job = submitted(berth, JOB.replace("train\n", "训练-é-🚀\n", 1))
    platform.world.store.progress(job, **waiting("no_free_gpus", needed=2, free=0))
    listed = berth("list", "--name", "训练-é-🚀")
    assert "训练-é-🚀" in listed.out
    assert "not enough GPUs are free (needs 2, free 0)" in listed.out
    shown = berth("show", "训练-é-🚀")
    assert job in shown.out
    why = berth("why", job)
    assert "not enough GPUs are free (needs 2, free 0) → " in why.out
    assert berth("why", job, "--json").json["reasons"][0]["facts"] == {"needed": 2, "free": 0}
    assert berth("list", "--name", "训练-é-🚀", "--json").json["jobs"][0]["job_id"] == job


def test_an_empty_list_says_what_to_do(berth: Cli) -> None:
    ran = berth("list", "--name", "no such job")
    assert (ran.code, ran.out) == (0, "")
    assert "berth submit" in ran.err


def test_logs_are_printed_and_followed(berth: Cli, platform: Platform) -> None:
    job = submitted(berth)
    assignments = [{"worker": 0, "node": "n1", "gpus": ["G0"]}]
    platform.world.store.progress(
        job, state="running", attempt=1, phase=2, attempts=[{"attempt": 1, "fence": 1, "assignments": assignments}]
    )
    answer = LogAnswer(is_known=True, text="loss 0.5\n", next_offset=9, is_over=True)
    platform.world.bus.answers["berth.req.default.node.n1.logs"] = lambda _: answer
    assert berth("logs", job).out == "loss 0.5\n"
    assert berth("logs", "-f", job).out == "loss 0.5\n"
    assert berth("logs", job, "--json").json["text"] == "loss 0.5\n"
    assert json.loads(berth("logs", "-f", job, "--json").out) == {"text": "loss 0.5\n"}


def test_a_log_longer_than_one_answer_is_printed_to_its_end(berth: Cli, platform: Platform) -> None:
    job = submitted(berth)
    platform.world.store.progress(
        job,
        state="running",
        attempt=1,
        phase=2,
        attempts=[{"attempt": 1, "fence": 1, "assignments": [{"worker": 0, "node": "n1", "gpus": ["G0"]}]}],
    )
    lines = [f"line {number}\n" for number in range(LOG_CHUNKS + 10)]

    def read(question: dict[str, int]) -> LogAnswer:
        number = question["offset"]
        return LogAnswer(is_known=True, text=lines[number], next_offset=number + 1, is_over=number == len(lines) - 1)

    platform.world.bus.answers["berth.req.default.node.n1.logs"] = read
    assert berth("logs", job).out == "".join(lines)
    assert berth("logs", job, "--json").json["text"] == "".join(lines)


def test_events_are_printed_in_order(berth: Cli, platform: Platform) -> None:
    platform.world.source.add("berth.job.submitted.v1", tenant="team-a", subject="j1")
    platform.world.source.add("berth.job.placed.v1", tenant="team-a", subject="j1")
    ran = berth("events")
    assert [line.split()[2] for line in ran.out.splitlines()][-2:] == ["job.submitted.v1", "job.placed.v1"]
    assert berth("events", "--json").json["next"] >= 2


def test_quota_is_a_table(berth: Cli, platform: Platform) -> None:
    lines = (QuotaLine(tenant="team-a", card_type="H100-80G", quota=8, used=2.5),)
    platform.world.bus.answers["berth.req.default.placement.quota"] = lambda _: QuotaAnswer(lines=lines)
    assert berth("quota").out.splitlines()[1].split() == ["team-a", "H100-80G", "8", "2.5", "0", "-", "0"]


# ------------------------------------------------------------------------------------------------------------ exit codes
def test_waiting_says_by_its_exit_code_how_it_went(berth: Cli, platform: Platform) -> None:
    good, bad = submitted(berth), submitted(berth)
    platform.world.store.progress(good, state="succeeded")
    platform.world.store.progress(bad, state="failed")
    assert berth("wait", good).code == 0
    assert berth("wait", good, bad).code == 1
    assert berth("wait", submitted(berth), "--timeout", "0").code == 1


def test_cancelling_twice_is_no_error(berth: Cli) -> None:
    job = submitted(berth)
    for _ in range(2):
        ran = berth("cancel", job, "--why", "enough")
        assert ran.code == 0
        assert "cancel requested" in ran.out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (JOB.replace("gpus: 2", "gpus: -1"), ("gpus", "-1", "raise gpus to at least 0")),
        (JOB.replace("gpus: 2", "gpu: 2"), ("gpu", "did you mean gpus?")),
        (JOB + "types: [X1]\n", ("types[0]", "X1", "use one of A100-40G, H100-80G")),
    ],
)
def test_a_refusal_names_field_value_and_remedy(berth: Cli, text: str, words: tuple[str, ...]) -> None:
    ran = berth("submit", "-", stdin=text)
    assert ran.code == 3
    for word in words:
        assert word in ran.err
    as_json = berth("submit", "-", "--json", stdin=text)
    assert (as_json.code, as_json.json["status"]) == (3, 422)


def test_malformed_yaml_is_a_usage_error_with_its_place(berth: Cli) -> None:
    ran = berth("submit", "-", stdin="name: a\n  b: c")
    assert ran.code == 2
    assert "line 2, column 4" in ran.err


@pytest.mark.parametrize(
    "arguments",
    [("submit", "nowhere.yaml"), ("submit",), ("list", "--limit", "0"), ("nonsense",), ("submit", "-", "--set", "x")],
)
def test_wrong_usage(berth: Cli, arguments: tuple[str, ...]) -> None:
    assert berth(*arguments, stdin=JOB).code == 2


def test_a_wrong_token_and_an_unknown_job_are_refused(berth: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    assert berth("show", "nope").code == 3
    monkeypatch.setenv("BERTH_TOKEN", "wrong")
    assert berth("list").code == 3


def test_a_part_that_is_away_is_a_server_error(berth: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("berth.client.transport.time.sleep", lambda _: None)
    ran = berth("nodes")
    assert ran.code == 5
    assert "inventory" in ran.err


def test_a_platform_that_is_away_is_said_so(berth: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("berth.client.transport.time.sleep", lambda _: None)
    monkeypatch.setenv("BERTH_URL", "http://127.0.0.1:1")
    ran = berth("list", "--json")
    assert (ran.code, ran.json["code"]) == (4, "unreachable")
    assert "berth up" in ran.err
    monkeypatch.delenv("BERTH_URL")
    assert berth("list").code == 4


# --------------------------------------------------------------------------------------------------------- operators
def test_tokens_and_policy_need_an_operator(berth: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = berth.file("policy.yaml", "tenants: {team-a: {}}\n")
    for arguments in (("token", "list"), ("policy", "show"), ("policy", "apply", policy), ("parked", "list")):
        assert berth(*arguments).code == 3
    monkeypatch.setenv("BERTH_TOKEN", "operator")
    token = berth("token", "create", "李雷", "--tenant", "team-a").out.strip()
    monkeypatch.setenv("BERTH_TOKEN", token)
    assert berth("whoami").out == "李雷, member of team-a\n"
    monkeypatch.setenv("BERTH_TOKEN", "operator")
    assert berth("policy", "show").out.startswith("# version 1")
    ran = berth("policy", "apply", policy, "--why", "test", "--json")
    assert (ran.code, ran.json["state"]) == (0, "proposed")
    listed = berth("parked", "list")
    assert listed.code == 0
    assert "did not answer" in listed.err


# ------------------------------------------------------------------------------------------------------------- the rest
def test_help_tells_commands_and_exit_codes(berth: Cli) -> None:
    ran = berth("--help")
    for word in ("submit", "why", "Exit codes", "4xx"):
        assert word in ran.out


def test_it_starts_without_models_and_http() -> None:
    """Heavy imports cost a third of a second at each call."""
    code = (
        "import sys; sys.argv = ['berth', 'version']\n"
        "from berth.client.cli import main\n"
        "try:\n    main.main()\nexcept SystemExit: pass\n"
        "heavy = {'berth.contracts', 'httpx', 'rich.table', 'yaml', 'sqlalchemy', 'nats'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{root / 'libs'}:{root}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
