"""A platform's decisions, recorded live through failures, restarts and a change of policy, are decided again offline."""

from __future__ import annotations

import gzip
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from berth.client.sdk import BerthClient
from berth.replay.record_file import Commit, RecordedEvent, read
from berth.testing.platform import POLICY, TestPlatform, embedded_platform, wait_until
from tests.e2e.cli import Berth

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("platform"), pytest.mark.timeout(240)]

DECIDING = ("admission", "placement", "lifecycle")


@pytest.fixture(scope="module")
def platform() -> Iterator[TestPlatform]:
    with embedded_platform(
        "h1=8xH100-80G:nvswitch,h2=8xH100-80G:nvswitch", environment={"BERTH_NODE_RUNTIME": "simulated"}
    ) as running:
        yield running


def jobs(count: int, command: list[str], **fields: Any) -> list[dict[str, Any]]:
    return [
        {"name": f"job-{n}", "tenant": "research", "class": "general", "gpus": 1, "command": command, **fields}
        for n in range(count)
    ]


def replace(platform: TestPlatform, service: str) -> None:
    """Kill a service as a crash does, and wait for its successor."""
    old = platform.pid(service)
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: platform.pid(service) not in (0, old), 30, f"{service} was not replaced")


def nothing_lives(client: BerthClient) -> bool:
    return next(iter(client.jobs(state="live")), None) is None


@pytest.fixture(scope="module")
def record(platform: TestPlatform, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was recorded of some hundred jobs."""
    berth, path = Berth(platform.layout.home), tmp_path_factory.mktemp("record") / "record.jsonl.gz"
    policy = yaml.safe_load(POLICY.read_text())
    policy["tenants"]["research"]["quota"]["H100-80G"] = 7
    policy["defaults"]["recovery"]["max_restarts"] = 1
    with BerthClient(platform.url, platform.token) as client:
        long = client.submit_batch(jobs(3, ["sleep", "600"])).jobs
        client.submit_batch(jobs(120, ["sleep", "0.2"]))
        client.submit_batch(jobs(20, ["false"], max_restarts=1))
        client.submit_batch(jobs(10, ["true"], gpus=8, workers=9))
        for service in DECIDING:
            replace(platform, service)
            client.submit_batch(jobs(30, ["sleep", "0.1"], tenant="product", workers=2))
        for job in long:
            client.cancel(job.job_id)
        (path.parent / "policy.yaml").write_text(yaml.safe_dump(policy))
        berth("policy", "apply", str(path.parent / "policy.yaml"), "--why", "less for research")
        waiting = client.submit_batch(jobs(40, ["sleep", "0.1"], priority=5)).jobs
        berth("why", waiting[-1].job_id)  # questions must not change what is decided
        replace(platform, "inventory")
        wait_until(lambda: nothing_lives(client), 90, lambda: f"jobs live\n{platform.log_ends(6)}")
    said = berth.json("record", "export", str(path))
    assert said["events"] > 1500
    assert said["commits"] > 50
    return path


@pytest.fixture
def offline(tmp_path: Path) -> Berth:
    """The command where no platform is."""
    (tmp_path / "home").mkdir()
    return Berth(tmp_path / "home")


def test_live_decisions_are_decided_again_to_the_byte(record: Path, offline: Berth) -> None:
    said = offline.json("replay", str(record))
    assert said["difference"] is None
    assert said["is_equal"]
    assert said["restarts"] >= 6
    assert said["policies"] >= 2
    assert said["emissions"] > 1000
    assert "equal" in offline("replay", str(record))


def test_one_byte_of_one_event_is_found(record: Path, offline: Berth, tmp_path: Path) -> None:
    lines = gzip.decompress(record.read_bytes()).splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if b"job.submitted" in line and b'"max_restarts":1' in line)
    lines[at] = lines[at].replace(b'"max_restarts":1', b'"max_restarts":2', 1)
    changed = tmp_path / "changed.jsonl"
    changed.write_bytes(b"".join(lines))
    text = offline("replay", str(changed), expect=1)
    assert "first difference: admission, commit" in text
    assert '"max_restarts":2' in text.partition("actual")[2]


def test_a_record_up_to_an_instant_is_whole_too(
    record: Path, platform: TestPlatform, offline: Berth, tmp_path: Path
) -> None:
    commits = [line for line in read(record) if isinstance(line, Commit)]
    until = commits[len(commits) // 2].clock.isoformat()
    part = tmp_path / "part.jsonl"
    said = Berth(platform.layout.home).json("record", "export", str(part), "--until", until)
    assert 0 < said["commits"] < len(commits)
    assert all(line.clock.isoformat() <= until for line in read(part) if isinstance(line, Commit))
    assert offline.json("replay", str(part))["is_equal"]


def test_the_last_decision_shows_what_it_stood_on(record: Path, platform: TestPlatform) -> None:
    berth = Berth(platform.layout.home)
    events = [line for line in read(record) if isinstance(line, RecordedEvent) and "job.placed" in line.type]
    placed = orjson.loads(events[-1].payload)
    said = berth.json("show", placed["subject"], "--receipt")
    [receipt] = said["receipts"]
    assert receipt["decision"] == "place"
    assert receipt["event_id"] == placed["id"]
    assert receipt["digest"] == placed["data"]["receipt"]["digest"]
    assert receipt["policy_version"] == 2
    assert any(candidate["chosen"] for candidate in receipt["candidates"])
    text = berth("why", placed["subject"], "--receipt")
    assert text.startswith("place by placement")
    assert receipt["digest"] in text


def test_every_decision_of_the_record_has_a_receipt(record: Path) -> None:
    kinds = ("job.admitted", "job.refused", "job.placed", "job.waiting", "job.stopping")
    seen = dict.fromkeys(kinds, 0)
    for line in read(record):
        kind = line.type.removeprefix("berth.").removesuffix(".v1") if isinstance(line, RecordedEvent) else ""
        if isinstance(line, RecordedEvent) and kind in seen:
            receipt = orjson.loads(line.payload)["data"]["receipt"]
            assert len(receipt["digest"]) == 16
            assert receipt["decisions_version"]
            seen[kind] += 1
    assert all(seen.values()), seen


def test_the_record_holds_every_commit_and_event_once(record: Path) -> None:
    lines = list(read(record))
    seqs = [line.seq for line in lines if isinstance(line, RecordedEvent)]
    assert seqs == sorted(set(seqs))
    for service in DECIDING:
        ids = [line.id for line in lines if isinstance(line, Commit) and line.service == service]
        assert ids == sorted(set(ids))
        assert len(ids) > 5


def test_the_record_is_for_operators(platform: TestPlatform, tmp_path: Path) -> None:
    berth = Berth(platform.layout.home)
    token = tmp_path / "token"
    token.write_text(berth("token", "create", "alice", "--tenant", "research"))
    berth("--token-file", str(token), "record", "export", str(tmp_path / "r"), expect=3)
    assert not (tmp_path / "r").exists()


def test_members_see_receipts_of_their_own_jobs_only(record: Path, platform: TestPlatform, tmp_path: Path) -> None:
    berth, token = Berth(platform.layout.home), tmp_path / "token"
    token.write_text(berth("token", "create", "bob", "--tenant", "product"))
    jobs_of: dict[str, str] = {}
    for line in read(record):
        if isinstance(line, RecordedEvent) and "job.placed" in line.type:
            placed = orjson.loads(line.payload)
            jobs_of[placed["tenant"]] = placed["subject"]
    assert "place" in berth("--token-file", str(token), "show", jobs_of["product"], "--receipt")
    berth("--token-file", str(token), "show", jobs_of["research"], "--receipt", expect=3)


def test_what_is_no_record_is_refused(offline: Berth, tmp_path: Path) -> None:
    (tmp_path / "r").write_text("{}\n")
    offline("replay", str(tmp_path / "r"), expect=2)
    offline("replay", str(tmp_path / "missing"), expect=2)
    offline("replay", expect=2)
