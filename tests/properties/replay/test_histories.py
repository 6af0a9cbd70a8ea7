"""Any history of a pool, however its batches were split and its services restarted, is decided again to the byte."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from berth.replay.record_file import parse
from berth.replay.rerun import replay
from berth.replay.simulated import VERBS, record_simulation

NUMBERS = st.integers(0, (1 << 16) - 1)
steps = st.lists(st.tuples(st.sampled_from(VERBS), NUMBERS, NUMBERS), min_size=1, max_size=25)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(steps=steps, split=st.none() | st.integers(0, 1000))
def test_any_history_is_decided_again_to_the_byte(steps: list[tuple[str, int, int]], split: int | None) -> None:
    lines = record_simulation(steps, chance=None if split is None else random.Random(split))
    verdict = replay(parse(lines))
    assert verdict.difference is None, "\n".join(verdict.difference.lines())
    assert verdict.commits > 0


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(steps=steps, split=st.none() | st.integers(0, 1000))
def test_the_same_history_twice_is_the_same_record(steps: list[tuple[str, int, int]], split: int | None) -> None:
    runs = [record_simulation(steps, chance=None if split is None else random.Random(split)) for _ in range(2)]
    assert runs[0] == runs[1]
