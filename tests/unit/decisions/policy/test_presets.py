"""The shipped policies do what their pages say, on the embedded fleet, by the code that runs live."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from berth.contracts.events import PreemptionPlanned
from berth.decisions.placement.core import PlacementCore
from tests.unit.decisions.builders import Driver, Pool, a_node, of_type, placed

ROOT = Path(__file__).resolve().parents[4]
DAY = datetime(2026, 3, 3, 11, 0, tzinfo=UTC)
NIGHT = datetime(2026, 3, 3, 22, 0, tzinfo=UTC)
H100, A100 = "H100-80G", "A100-40G"
ALL_H100: dict[str, Any] = {"gpus": 8, "workers": 2, "types": [H100]}


class Fleet(Pool):
    """The embedded fleet under a shipped policy."""

    def __init__(self, policy: str, at: datetime) -> None:
        Driver.__init__(self, PlacementCore())
        self.now = at
        self.tell(a_node("h1", links=[range(8)]), a_node("h2", links=[range(8)]), a_node("a1", type=A100, gpus=4))
        self.set_policy(yaml.safe_load((ROOT / "policies" / f"{policy}.yaml").read_text()))

    def ask(self, name: str, job_class: str, tenant: str = "research", **fields: Any) -> Any:
        return self.submit(name, tenant=tenant, **{"class": job_class}, **fields)

    def stopped(self, said: Any) -> dict[str, str]:
        return {victim.job_id: plan.rule for plan in of_type(said, PreemptionPlanned) for victim in plan.victims}


# --------------------------------------------------------------------------------------------------------------- mixed
def test_mixed_gives_inference_its_lent_reserve_back_by_day_and_not_by_night() -> None:
    for at, victims in ((DAY, {"train": "protection"}), (NIGHT, {})):
        fleet = Fleet("mixed", at)
        assert placed(fleet.ask("train", "training", **ALL_H100)) == ["train"], "idle reserves are lent"
        fleet.after(minutes=11)
        assert fleet.stopped(fleet.ask("serve", "inference", gpus=4, types=[H100])) == victims


def test_mixed_keeps_one_card_for_inference_by_night() -> None:
    fleet = Fleet("mixed", NIGHT)
    fleet.ask("train", "training", **ALL_H100)
    fleet.after(minutes=11)
    assert fleet.stopped(fleet.ask("serve", "inference", gpus=1, types=[H100])) == {"train": "protection"}


def test_mixed_stops_no_training_in_its_first_ten_minutes() -> None:
    fleet = Fleet("mixed", DAY)
    fleet.ask("train", "training", **ALL_H100)
    said = fleet.ask("serve", "inference", gpus=4, types=[H100])
    assert fleet.stopped(said) == {} and "min_runtime" in fleet.why("serve")
    assert fleet.stopped(fleet.after(minutes=10)) == {"train": "protection"}


def test_mixed_bounds_what_inference_takes_beyond_its_reserve() -> None:
    fleet = Fleet("mixed", DAY)
    for number in range(16):
        fleet.ask(f"train-{number}", "training", gpus=1, types=[H100])
    fleet.after(minutes=11)
    taken = 0
    for number in range(12):
        taken += len(fleet.stopped(fleet.ask(f"serve-{number}", "inference", gpus=1, types=[H100])))
    assert taken == 8, "the reserve of four, and a quarter of sixteen within the hour"
    assert "preempt_share_used_up" in fleet.why("serve-11")


def test_mixed_lets_owners_take_back_what_they_lent() -> None:
    fleet = Fleet("mixed", NIGHT)
    for number in range(16):
        fleet.ask(f"train-{number}", "training", gpus=1, types=[H100])
    fleet.after(minutes=11)
    said = fleet.ask("theirs", "training", tenant="product", gpus=4, types=[H100])
    assert len(fleet.stopped(said)) == 4 and set(fleet.stopped(said).values()) == {"reclaim"}


def test_mixed_takes_cards_for_notebooks_from_batch_by_day_only() -> None:
    for at, count in ((DAY, 1), (NIGHT, 0)):
        fleet = Fleet("mixed", at)
        for number in range(4):
            fleet.ask(f"batch-{number}", "general", gpus=1, types=[A100])
        assert len(fleet.stopped(fleet.ask("note", "interactive", gpus=1, types=[A100]))) == count


def test_mixed_plans_a_start_for_the_first_training_job_that_does_not_fit() -> None:
    fleet = Fleet("mixed", NIGHT)
    fleet.ask("now", "training", gpus=8, types=[H100], time_limit="1h")
    fleet.ask("big", "training", **ALL_H100)
    fleet.ask("long", "training", gpus=8, types=[H100])
    assert "would_delay_reserved_job" in fleet.why("long")
    assert placed(fleet.ask("short", "training", gpus=8, types=[H100], time_limit="30m")) == ["short"]


def test_mixed_serves_who_had_less_first() -> None:
    fleet = Fleet("mixed", NIGHT)
    fleet.ask("first", "training", tenant="research", **ALL_H100)
    fleet.after(minutes=5)
    fleet.ask("again", "training", tenant="research", **ALL_H100)
    fleet.after(seconds=1)
    fleet.ask("other", "training", tenant="ops", **ALL_H100)
    assert placed(fleet.end("first")) == ["other"]


# --------------------------------------------------------------------------------------------------------- the others
def test_training_heavy_stops_no_training_in_its_first_hour_and_leaves_it_twelve_cards() -> None:
    fleet = Fleet("training-heavy", DAY)
    for number in range(16):
        fleet.ask(f"train-{number}", "training", gpus=1, types=[H100])
    fleet.after(minutes=59)
    for number in range(4):
        said = fleet.ask(f"theirs-{number}", "training", tenant="product", gpus=1, types=[H100])
        assert fleet.stopped(said) == {}
    assert len(fleet.stopped(fleet.after(minutes=2))) == 3, "product owns three"


def test_inference_first_keeps_its_cards_empty_by_day() -> None:
    fleet = Fleet("inference-first", DAY)
    fleet.ask("train", "training", gpus=8, types=[H100])
    fleet.ask("more", "training", gpus=8, types=[H100])
    assert "protection_line" in fleet.why("more")
    assert placed(fleet.ask("serve", "inference", tenant="product", gpus=8, types=[H100])) == ["serve"]


def test_inference_first_clears_its_cards_before_the_day_begins() -> None:
    fleet = Fleet("inference-first", NIGHT.replace(hour=23, minute=30))
    fleet.ask("train", "training", gpus=8, types=[H100])
    fleet.ask("night", "training", gpus=4, types=[H100], time_limit="6h")
    assert placed(fleet.said) == ["train", "night"]
    fleet.ask("endless", "training", gpus=4, types=[H100])
    assert fleet.nodes_of("endless") == ["h2"], "lent by night; its window belongs to a line that clears"
    stopped: dict[str, str] = {}
    for _ in range(28):
        stopped |= fleet.stopped(fleet.after(minutes=15))
    assert set(stopped.values()) == {"window"}


def test_small_team_lets_urgent_work_of_anybody_go_first() -> None:
    fleet = Fleet("small-team", DAY)
    fleet.ask("slow", "training", gpus=8, types=[H100], priority=30)
    fleet.ask("usual", "training", gpus=8, types=[H100])
    fleet.after(minutes=6)
    said = fleet.ask("urgent", "general", tenant="ops", gpus=8, types=[H100], priority=80)
    assert fleet.stopped(said) == {"slow": "priority"}


@pytest.mark.parametrize("policy", ["mixed", "training-heavy", "inference-first", "small-team"])
@pytest.mark.parametrize("at", [DAY, NIGHT], ids=["day", "night"])
def test_every_example_job_finds_a_place_on_an_empty_fleet(policy: str, at: datetime) -> None:
    wanted: list[tuple[str, dict[str, Any]]] = [
        ("general", {"tenant": "product", "gpus": 1}),
        ("training", {"workers": 2, "gpus": 4, "types": [H100]}),
        ("interactive", {"tenant": "product", "gpus": 1, "types": [A100]}),
        ("inference", {"tenant": "product", "gpus": 1}),
    ]
    for job_class, fields in wanted:
        assert placed(Fleet(policy, at).ask("job", job_class, **fields)) == ["job"]
