"""A record that is replayed comes out equal; whatever was changed in it is found, and named."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from berth.replay.record_file import BadRecord, Commit, RecordedEvent, parse, read, writing
from berth.replay.rerun import Difference, explain_difference, replay
from berth.replay.simulated import random_steps, record_simulation

SEED, STEPS = 5, 60


@pytest.fixture(scope="module")
def record() -> list[bytes]:
    return record_simulation(random_steps(SEED, STEPS))


def difference(lines: list[bytes]) -> Difference:
    found = replay(parse(lines)).difference
    assert found is not None
    return explain_difference(found, parse(lines))


def the_event(record: list[bytes], type_: str, at: int = 0) -> int:
    """Index of a line with an event of a type."""
    return [n for n, line in enumerate(record) if line.startswith(b'{"line":"event"') and type_.encode() in line][at]


def changed(record: list[bytes], at: int, change: Callable[[bytes], bytes]) -> list[bytes]:
    line = change(record[at])
    assert line != record[at]
    return [*record[:at], line, *record[at + 1 :]]


def edited(record: list[bytes], at: int, **fields: object) -> list[bytes]:
    return changed(record, at, lambda line: orjson.dumps({**orjson.loads(line), **fields}))


def a_commit(record: list[bytes], service: str, *, emitted: bool = True) -> int:
    for at, line in enumerate(record):
        if line.startswith(b'{"line":"commit"'):
            commit = orjson.loads(line)
            if commit["service"] == service and bool(commit["emitted"]) is emitted:
                return at
    raise AssertionError(f"no such commit of {service}")


def test_what_was_recorded_is_decided_again_to_the_byte(record: list[bytes]) -> None:
    verdict = replay(parse(record))
    assert verdict.difference is None
    assert verdict.commits > 100
    assert verdict.emissions > 100
    assert verdict.restarts > 4
    assert verdict.policies > 1


def test_a_byte_changed_in_an_event_is_found_in_the_batch_that_took_it(record: list[bytes]) -> None:
    at = the_event(record, "job.submitted")
    job = orjson.loads(record[at])["event"]["data"]["job_id"]
    found = difference(changed(record, at, lambda line: line.replace(b'"priority":', b'"priority":9', 1)))
    assert (found.service, found.place) == ("admission", 1)
    assert found.commit is not None
    assert found.event_id == f"gateway.{job}.1.JobSubmitted"
    assert found.expected.startswith(f"{job}.1.Job")
    assert found.actual.startswith(f"{job}.1.Job")
    assert found.expected != found.actual
    text = "\n".join(found.lines())
    assert f"commit {found.commit}" in text
    assert "expected" in text
    assert "actual" in text


def test_a_decision_changed_in_the_record_of_events_is_found(record: list[bytes]) -> None:
    at = the_event(record, "job.placed")
    found = difference(changed(record, at, lambda line: line.replace(b'"policy_version":', b'"policy_version":7', 1)))
    assert found.service == "placement"
    assert found.what == "the recorded event is not what was decided"
    assert found.seq == orjson.loads(record[at])["seq"]


@pytest.mark.parametrize("service", ["admission", "placement", "lifecycle"])
def test_another_digest_is_found_though_every_sum_is_right(record: list[bytes], service: str) -> None:
    at = a_commit(record, service)
    found = difference(edited(record, at, digest="00" * 16))
    commit = orjson.loads(record[at])
    assert (found.service, found.commit) == (service, commit["id"])


def test_a_command_that_differs_is_named_though_no_record_holds_it(record: list[bytes]) -> None:
    for at, line in enumerate(record):
        if line.startswith(b'{"line":"commit"') and b'"lifecycle"' in line and b'"sums"' in line:
            commit = orjson.loads(line)
            sums = commit["note"]["sums"]
            found = difference(edited(record, at, digest="00" * 16, note={**commit["note"], "sums": [1, *sums[1:]]}))
            assert found.expected_sum == 1
            assert "not in the record of events" in "\n".join(found.lines())
            return
    raise AssertionError("lifecycle told nothing")


def test_a_missing_event_is_found(record: list[bytes]) -> None:
    at = the_event(record, "job.admitted")
    with_less = [*record[:at], *record[at + 1 :]]
    assert replay(parse(with_less)).difference is not None


def test_an_event_nobody_decided_is_found(record: list[bytes]) -> None:
    at = the_event(record, "job.admitted")
    found = difference(changed(record, at, lambda line: line.replace(b"JobAdmitted", b"JobAdmittee", 1)))
    assert found.what == "an event is recorded that was never decided"


def test_another_clock_is_found(record: list[bytes]) -> None:
    at = a_commit(record, "lifecycle")
    later = orjson.loads(record[at])["clock"].replace("2026-", "2027-")
    assert replay(parse(edited(record, at, clock=later))).difference is not None


def test_an_event_that_cannot_be_read_is_named(record: list[bytes]) -> None:
    at = the_event(record, "job.submitted")
    found = difference(changed(record, at, lambda line: line.replace(b'"submitted_at":"2', b'"submitted_at":"x', 1)))
    assert "cannot be read" in found.what
    assert found.seq == orjson.loads(record[at])["seq"]


def test_hash_seeds_and_processes_do_not_matter() -> None:
    program = (
        "import hashlib, sys; from berth.replay.simulated import random_steps, record_simulation;"
        "sys.stdout.write(hashlib.sha256(b'\\n'.join(record_simulation(random_steps(8, 25)))).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": "libs"},
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).resolve().parents[3],
            timeout=120,
        ).stdout
        for seed in ("1", "77")
    }
    assert len(digests) == 1


# ------------------------------------------------------------------------------------------------------------ the file
@pytest.mark.parametrize("name", ["record.jsonl", "record.jsonl.gz"])
def test_a_file_holds_what_was_written(record: list[bytes], tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with writing(path) as file:
        file.writelines(line + b"\n" for line in record)
    assert list(read(path)) == list(parse(record))
    assert replay(read(path)).is_equal


def test_a_file_that_was_not_finished_does_not_stay(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), writing(tmp_path / "r") as file:
        file.write(b"{}")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda lines: lines[:-1], "cut off"),
        (lambda lines: lines[1:], "header"),
        (lambda lines: [], "empty"),
        (lambda lines: [*lines, lines[1]], "behind the end"),
        (lambda lines: [lines[0].replace(b'"format":1', b'"format":99'), *lines[1:]], "format 99"),
        (lambda lines: [*lines[:5], b"\xff\x00", *lines[5:]], "line 6"),
    ],
)
def test_what_is_no_record_is_refused(
    record: list[bytes], damage: Callable[[list[bytes]], list[bytes]], says: str
) -> None:
    with pytest.raises(BadRecord, match=says):
        replay(parse(damage(record)))


def test_an_event_that_is_not_json_on_one_line_survives_the_file() -> None:
    from berth.replay.record_file import End, Header, end_line, event_line, header_line

    events = [RecordedEvent(n, "t", payload) for n, payload in enumerate((b"{\n}", b"not json", b'{"a":1}'), 1)]
    lines = [header_line(Header("p", {})), *map(event_line, events), end_line(events=3, commits=0)]
    assert list(parse(lines)) == [Header("p", {}), *events, End(3, 0)]


def test_commits_of_a_file_are_what_the_log_had(record: list[bytes]) -> None:
    commits = [line for line in parse(record) if isinstance(line, Commit)]
    assert {commit.service for commit in commits} >= {"admission", "placement", "lifecycle"}
    assert all(len(commit.note.sums) == commit.emitted for commit in commits)
