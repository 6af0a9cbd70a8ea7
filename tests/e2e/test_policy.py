"""The policy of a platform that really runs: refuse, compare, apply, approve, cut a quota."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from berth.client.sdk import BerthClient
from berth.testing.platform import TestPlatform, embedded_platform, wait_until
from tests.e2e.cli import ROOT, Berth

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("platform"), pytest.mark.timeout(240)]

END_SECONDS = 60.0
MIXED = ROOT / "policies" / "mixed.yaml"
FLEET = "h1=8xH100-80G:nvswitch,h2=8xH100-80G:nvswitch,a1=4xA100-40G:pcie"


@pytest.fixture(scope="module")
def platform() -> Iterator[TestPlatform]:
    with embedded_platform(FLEET, environment={"BERTH_POLICY_FILE": str(MIXED)}) as running:
        yield running


@pytest.fixture
def berth(platform: TestPlatform) -> Berth:
    return Berth(platform.layout.home)


@pytest.fixture
def client(platform: TestPlatform) -> Iterator[BerthClient]:
    with BerthClient(platform.url, platform.token) as client:
        yield client
        for job in client.jobs():
            if not job.state.is_final:
                client.cancel(job.job_id)
        wait_until(lambda: not [g for g in client.gpus() if g.held_by], END_SECONDS, "the cards are free")


def submitted(client: BerthClient, **fields: Any) -> str:
    job = {
        "name": f"job-{uuid.uuid4().hex[:8]}",
        "tenant": "research",
        "class": "training",
        "types": ["H100-80G"],
        "command": ["sh", "-c", "exec sleep 600"],
        **fields,
    }
    job_id: str = client.submit(job).job_id
    return job_id


def until_state(client: BerthClient, job_id: str, state: str) -> None:
    wait_until(lambda: client.job(job_id).state == state, END_SECONDS, f"{job_id} is {state}")


def document(client: BerthClient) -> dict[str, Any]:
    found: dict[str, Any] = client.policy()["document"]
    return json.loads(json.dumps(found))


def a_file(folder: Path, value: dict[str, Any]) -> str:
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump(value))
    return str(path)


def test_the_mixed_policy_is_in_force_without_a_warning(berth: Berth, client: BerthClient) -> None:
    assert document(client) == yaml.safe_load(MIXED.read_text())
    found = berth.json("policy", "check", str(MIXED))
    assert (found["problems"], found["warnings"]) == ([], [])
    assert berth.json("policy", "diff", str(MIXED))["changes"] == []


def test_a_wrong_document_is_refused_whole_and_the_old_one_stays(
    berth: Berth, client: BerthClient, tmp_path: Path
) -> None:
    before = client.policy()["version"]
    wrong = document(client)
    wrong["protection"][0]["reserved"]["H100-80G"] = 17
    wrong["protection"][1]["windows"][0]["to"] = "20:00"
    wrong["health"]["harmless_xids"].append(79)
    paths = {"protection.0.reserved.H100-80G", "protection.1.windows.0", "health"}
    assert {p["path"] for p in berth.json("policy", "check", a_file(tmp_path, wrong), expect=1)["problems"]} == paths
    refused = berth.json("policy", "apply", a_file(tmp_path, wrong), "--why", "test", expect=3)
    assert {error["field"] for error in refused["errors"]} == paths and all(e["remedy"] for e in refused["errors"])
    assert client.policy()["version"] == before


def test_a_cut_says_what_would_be_stopped_before_it_is_and_then_stops_just_that(
    berth: Berth, client: BerthClient, tmp_path: Path
) -> None:
    first, second = submitted(client, gpus=8), submitted(client, gpus=4)
    for job_id in (first, second):
        until_state(client, job_id, "running")
    waiting = submitted(client, gpus=8, workers=2)
    until_state(client, waiting, "waiting")

    cut = document(client)
    for name, settings in cut["tenants"].items():
        settings.pop("cohort")
        settings["quota"]["H100-80G"] = 8 if name == "research" else 4
    cut.pop("cohorts")
    cut["defaults"]["quota_cut"] = "preempt"
    cut["defaults"]["preemption"]["reclaim"] = "off"
    found = berth.json("policy", "diff", a_file(tmp_path, cut))
    assert [job["job_id"] for job in found["effects"]["stops"]] == [second]
    assert [entry["job"]["job_id"] for entry in found["effects"]["never"]] == [waiting]
    assert (found["effects"]["cuts"][0]["held"], found["effects"]["cuts"][0]["may_hold"]) == (12, 8)
    assert client.job(second).state == "running", "looking changes nothing"

    version = berth.json("policy", "apply", a_file(tmp_path, cut), "--why", "cut")["version"]
    until_state(client, second, "waiting")
    assert client.job(first).state == "running"
    newest = berth.json("policy", "history")["versions"][0]
    assert (newest["version"], newest["why"]) == (version, "cut") and newest["author"]
    assert berth.json("policy", "apply", str(MIXED), "--why", "back")["version"] == version + 1


def test_a_quota_is_set_alone_and_counts_at_once(berth: Berth, client: BerthClient) -> None:
    before = berth.json("policy", "show")
    set_ = berth.json("quota", "set", "ops", "A100-40G=0", "--why", "lent for a week")
    assert set_["version"] == before["version"] + 1
    after = berth.json("policy", "show")
    assert (after["why"], after["document"]["tenants"]["ops"]["quota"]) == (
        "lent for a week",
        {"H100-80G": 2, "A100-40G": 0},
    )
    wait_until(
        lambda: (
            {"ops": 0}.items()
            <= {x["tenant"]: x["quota"] for x in berth.json("quota")["lines"] if x["card_type"] == "A100-40G"}.items()
        ),
        END_SECONDS,
        "placement knows the quota",
    )
    berth("quota", "set", "ops", "A100-40G=1")


def test_members_may_look_at_no_policy_and_set_no_quota(
    platform: TestPlatform, berth: Berth, client: BerthClient
) -> None:
    token = client.create_token("ann", tenant="research")
    (platform.layout.home / "ann").write_text(token)
    as_ann = ("--token-file", str(platform.layout.home / "ann"))
    for command in (
        ("quota", "set", "research", "H100-80G=16"),
        ("policy", "show"),
        ("policy", "history"),
        ("policy", "diff", str(MIXED)),
        ("policy", "apply", str(MIXED)),
    ):
        berth(*as_ann, *command, expect=3)


def test_a_guarded_change_waits_for_a_second_operator(
    platform: TestPlatform, berth: Berth, client: BerthClient, tmp_path: Path
) -> None:
    guarded = document(client) | {"approval": {"required_for": "protection"}}
    held = berth.json("policy", "apply", a_file(tmp_path, guarded), "--why", "four eyes")
    assert held["state"] == "activated", "the policy in force decides"
    changed = document(client)
    changed["protection"][0]["reserved"]["H100-80G"] = 3
    held = berth.json("policy", "apply", a_file(tmp_path, changed), "--why", "fewer")
    assert held["state"] == "held"
    [listed] = berth.json("policy", "proposals")["proposals"]
    assert [change["text"] for change in listed["changes"]] == ["line inference-day, reserved H100-80G: 4 → 3"]
    berth("policy", "approve", held["proposal_id"], expect=3)
    (platform.layout.home / "second").write_text(client.create_token("second", role="operator"))
    as_second = ("--token-file", str(platform.layout.home / "second"))
    approved = json.loads(berth(*as_second, "policy", "approve", held["proposal_id"], "--json"))
    assert approved["state"] == "activated"
    shown = berth.json("policy", "show")
    assert (shown["version"], shown["approver"], shown["document"]) == (approved["version"], "second", changed)
    back = berth.json("policy", "apply", str(MIXED))
    json.loads(berth(*as_second, "policy", "approve", back["proposal_id"], "--json"))
    assert berth.json("policy", "proposals")["proposals"] == []
