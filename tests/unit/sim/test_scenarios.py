"""Every acceptance scenario that decisions alone can play comes out as it says; and the player does notice."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from berth.sim.scenarios import Scenario, load, play
from berth.sim.scenarios.command import main

FOLDER = Path(__file__).parents[2] / "scenarios"
FILES = sorted(FOLDER.glob("*.yaml"))
PLAYED = [file for file in FILES if load(file).level != "service"]


@pytest.mark.parametrize("file", PLAYED, ids=lambda file: file.stem)
def test_scenario(file: Path) -> None:
    outcome = play(load(file))
    assert outcome.has_passed, [f"step {f.step}: {f.what}" for f in outcome.failures]


def changed(scenario: Scenario, step: int, **expect: Any) -> Scenario:
    steps = list(scenario.steps)
    steps[step] = replace(steps[step], expect=expect)
    return replace(scenario, steps=tuple(steps))


@pytest.fixture(scope="module")
def released_once() -> Scenario:
    return load(FOLDER / "a01-quota-released-once.yaml")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"jobs": {"pair": {"state": "waiting"}}}, "job pair: expected state waiting, was running"),
        ({"jobs": {"nobody": {"state": "waiting"}}}, "job nobody"),
        ({"jobs": {"pair": {"gpus_on": {"n1": [4, 5]}}}}, "expected gpus_on"),
        ({"usage": {"nlp": {"A100-80G": 5}}}, "expected 5 A100-80G, was 4"),
        ({"free": {"n1": 5}}, "free on n1: expected 5, was 4"),
        ({"why": {"big": {"reasons": ["topology"]}}}, "why big: expected ['topology']"),
        ({"why": {"big": {"numbers": {"free": 5}}}}, "expected free 5"),
        ({"counts": {"jobs": 3}}, "count of jobs: expected 3, was 2"),
        ({"counts": {"starts": {"pair": 2}}}, "expected 2, was 1"),
        ({"audit": [{"event": "started", "job": "pair", "times": 2}]}, "expected 2 times, was 1"),
        ({"audit": [{"event": "started", "job": "pair", "has": ["weather"]}]}, "lacks ['weather']"),
        ({"nodes": {"n1": {"state": "lost"}}}, "node n1: expected state lost, was ready"),
        ({"alerts": ["gpu_out"]}, "alert gpu_out was not raised"),
        ({"answers": {"first": {"outcome": "accepted"}}}, "answer first: nothing was asked"),
        ({"weather": "fine"}, "nobody here can check weather"),
    ],
)
def test_the_player_says_what_was_expected_and_what_was(
    released_once: Scenario, wrong: dict[str, Any], said: str
) -> None:
    outcome = play(changed(released_once, 0, **wrong))
    assert [f.step for f in outcome.failures] == [1] * len(outcome.failures)
    assert said in outcome.failures[0].what


@pytest.mark.parametrize(
    "never",
    [
        {"started": ["big"]},
        {"started_before": {"big": "+12m"}},
        {"usage_over": {"nlp": {"A100-80G": 7}}},
        {"on_node": {"pair": ["n1"]}},
        {"text": ["big"]},
        {"weather": ["fine"]},
    ],
)
def test_the_player_notices_what_must_never_be(released_once: Scenario, never: dict[str, Any]) -> None:
    scenario = replace(released_once, body={**released_once.body, "never": never})
    assert "never" in play(scenario).failures[0].what


def test_two_plays_of_one_scenario_are_equal_event_by_event() -> None:
    scenario = load(FOLDER / "a37-floor-and-preempt-cap.yaml")
    assert play(scenario, with_trace=True).trace == play(scenario, with_trace=True).trace


def test_the_command_prints_one_line_for_each_and_a_sum(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for stem in ("a07-two-gangs-one-cluster", "a24-bad-numbers-refused"):
        (tmp_path / f"{stem}.yaml").write_text((FOLDER / f"{stem}.yaml").read_text())
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a07-two-gangs-one-cluster pass"
    assert lines[1].startswith("a24-bad-numbers-refused skipped")
    assert lines[-1] == "1 passed, 0 failed, 1 skipped"


def test_the_command_fails_where_one_failed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = (
        (FOLDER / "a07-two-gangs-one-cluster.yaml")
        .read_text()
        .replace("workers_running: 4, nodes", "attempt: 9, nodes")
    )
    (tmp_path / "wrong.yaml").write_text(text)
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "a07-two-gangs-one-cluster fail: step 1" in out
    assert "expected attempt 9, was 1" in out
    assert out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"
