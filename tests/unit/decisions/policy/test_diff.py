"""What differs between two documents: named by what people call things, in words."""

from __future__ import annotations

from typing import Any

import pytest

from berth.decisions.policy.diff import changes, in_short

LINE = {"name": "day", "class": "inference", "reserved": {"H100-80G": 4}}
WINDOW = {"days": ["mon", "tue"], "from": "08:00", "to": "20:00", "zone": "UTC"}
OLD: dict[str, Any] = {
    "tenants": {"lab": {"quota": {"H100-80G": 8}}, "shop": {}},
    "defaults": {"preemption": {"grace": "30s"}, "queue": {"discipline": "strict"}},
    "protection": [{"name": "other", "class": "training", "floor": {"H100-80G": 1}}, LINE],
}


def told(**parts: Any) -> list[str]:
    return [change.text for change in changes(OLD, OLD | parts)]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, []),
        ({"tenants": OLD["tenants"] | {"lab": {"quota": {"H100-80G": 6}}}}, ["tenant lab, quota H100-80G: 8 → 6"]),
        ({"tenants": {"lab": OLD["tenants"]["lab"]}}, ["tenant shop is removed"]),
        (
            {"tenants": OLD["tenants"] | {"new": {"quota": {"H100-80G": 2}, "weight": 2}}},
            ["tenant new is new: quota H100-80G 2, weight 2"],
        ),
        (
            {"defaults": {"preemption": {"grace": "2m"}, "queue": {"discipline": "backfill"}}},
            ["defaults, queue discipline: strict → backfill", "defaults, preemption grace: 30s → 2m"],
        ),
        (
            {"classes": {"training": {"idle": {"timeout": "45m"}}}},
            ["class training, idle timeout: (not set) → 45m"],
        ),
        ({"protection": [LINE, OLD["protection"][0]]}, []),
        ({"protection": [OLD["protection"][0]]}, ["line day is removed"]),
        (
            {"protection": [OLD["protection"][0], LINE | {"windows": [WINDOW], "lend_when_idle": True}]},
            ["line day, lend_when_idle: (not set) → yes", "line day, windows: (not set) → mon tue 08:00-20:00 UTC"],
        ),
        ({"class_order": ["inference", "training"]}, ["class_order: (not set) → inference, training"]),
        (
            {"defaults": {}},
            ["defaults, queue discipline: strict → (not set)", "defaults, preemption grace: 30s → (not set)"],
        ),
    ],
)
def test_differences_are_told_in_words(parts: dict[str, Any], words: list[str]) -> None:
    assert sorted(told(**parts)) == sorted(words)


def test_another_spelling_of_a_duration_is_no_difference() -> None:
    assert told(defaults={"preemption": {"grace": 30}, "queue": {"discipline": "strict"}}) == []


def test_history_is_told_in_short() -> None:
    found = changes({}, {"tenants": {name: {} for name in "abcde"}})
    assert in_short(found) == "tenant a is new; tenant b is new; tenant c is new; and 2 more"
    assert in_short([]) == "nothing"


def test_values_travel_as_json() -> None:
    [change] = changes(OLD, OLD | {"tenants": OLD["tenants"] | {"lab": {"quota": {"H100-80G": 6}}}})
    assert change.to_json() == {
        "path": "tenants.lab.quota.H100-80G",
        "before": 8.0,
        "after": 6.0,
        "text": "tenant lab, quota H100-80G: 8 → 6",
    }
