"""How many replicas a load needs, and when the number follows."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from berth.contracts.jobs import ServiceSpec
from berth.decisions.serving.scaling import follow, forget, needed, next_look
from tests.unit.decisions.desks import START


def a_service(**more: Any) -> ServiceSpec:
    return ServiceSpec(**{"min": 1, "max": 6, "load_per_replica": 50, "scale_down_after": 300, **more})


def at(seconds: float) -> Any:
    return START + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("load", "wanted"), [(0, 1), (1, 1), (50, 1), (50.1, 2), (100, 2), (299, 6), (1e9, 6), (150.0000000001, 3)]
)
def test_load_divided_by_the_load_of_one_rounded_up_within_bounds(load: float, wanted: int) -> None:
    assert needed(a_service(), load) == wanted


def test_decimal_loads_divide_exactly() -> None:
    assert needed(a_service(load_per_replica=0.1), 0.3) == 3


def test_nothing_asked_of_a_service_with_min_zero_needs_nothing_and_anything_needs_one() -> None:
    assert needed(a_service(min=0), 0) == 0
    assert needed(a_service(min=0), 0.001) == 1


def test_up_follows_at_once_where_no_waiting_is_set() -> None:
    assert follow(a_service(), [(at(0), 1), (at(10), 4)], wanted=1, now=at(10)) == 4


def test_up_waits_until_the_higher_number_was_needed_all_the_time() -> None:
    spec = a_service(scale_up_after=60)
    demand = [(at(0), 1), (at(100), 4), (at(130), 3)]
    assert follow(spec, demand, wanted=1, now=at(159)) == 1
    assert follow(spec, demand, wanted=1, now=at(160)) == 3


def test_down_waits_until_the_lower_number_was_enough_all_the_time() -> None:
    demand = [(at(0), 4), (at(100), 1), (at(200), 2), (at(250), 1)]
    assert follow(a_service(), demand, wanted=4, now=at(399)) == 4
    assert follow(a_service(), demand, wanted=4, now=at(400)) == 2
    assert follow(a_service(), demand, wanted=2, now=at(549)) == 2
    assert follow(a_service(), demand, wanted=2, now=at(550)) == 1


def test_swings_around_a_threshold_change_nothing() -> None:
    demand = [(at(60 * i), 1 + i % 2) for i in range(20)]
    assert {follow(a_service(), demand[: i + 1], wanted=2, now=at(60 * i)) for i in range(1, 20)} == {2}


def test_the_history_that_is_kept_gives_the_same_answers() -> None:
    demand = [(at(10 * i), 1 + i * 7 % 5) for i in range(100)]
    kept = forget(a_service(), demand, now=at(990))
    assert len(kept) < 40
    for later in (990, 1100, 1289, 1290):
        assert follow(a_service(), kept, wanted=5, now=at(later)) == follow(
            a_service(), demand, wanted=5, now=at(later)
        )


def test_the_next_look_is_when_the_answer_may_change() -> None:
    assert next_look(a_service(), [(at(0), 4), (at(100), 1)], wanted=4, now=at(100)) == at(300)
    assert next_look(a_service(), [(at(0), 4), (at(100), 1)], wanted=4, now=at(300)) == at(400)
