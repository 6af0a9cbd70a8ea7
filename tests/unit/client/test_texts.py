"""Every reason code has words, with its numbers and something to do about it."""

from __future__ import annotations

import pytest

from berth.client import texts
from berth.contracts.jobs import JobState
from berth.contracts.reasons import Code


@pytest.mark.parametrize("code", list(Code))
def test_every_code_has_a_sentence_and_a_remedy(code: Code) -> None:
    assert len(texts.sentence({"code": code})) > 10
    assert "_" not in texts.sentence({"code": code})
    assert texts.remedy({"code": code})


def test_no_words_for_codes_that_do_not_exist() -> None:
    assert set(texts.WORDS) == {code.value for code in Code}


def test_numbers_and_holders_follow_the_sentence() -> None:
    reason = {
        "code": "no_free_gpus",
        "facts": {"needed": 8, "free": 2.5, "card_type": "H100-80G", "is_whole": True},
        "blocked_by": ["j1", "j2", "j3", "j4"],
    }
    text = texts.sentence(reason, {"j1": "训练"})
    assert text == (
        "not enough GPUs are free (needs 8, free 2.5, type H100-80G, is whole yes); held by 训练 (j1), j2, j3 and 1 more"
    )


def test_a_remedy_of_the_reason_itself_comes_first() -> None:
    assert texts.remedy({"code": "no_free_gpus", "remedy": "wait for j1"}) == "wait for j1"


@pytest.mark.parametrize("state", list(JobState))
def test_every_state_has_a_summary(state: JobState) -> None:
    assert texts.summary({"state": state.value})


def test_a_summary_says_where_or_why() -> None:
    assert texts.summary({"state": "running", "nodes": ["n1", "n2"]}) == "runs on n1, n2"
    reasons = [{"code": "never_fits", "facts": {"needed": 9}}]
    assert texts.summary({"state": "refused", "reasons": reasons}).startswith("never fits: not even the empty pool")
    waiting = {"state": "waiting", "reasons": [{"code": "quota_full"}], "cancel_requested": True}
    assert texts.summary(waiting) == "waits because the tenant's quota is in use, cancel requested"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.04, "0.0s"), (9.96, "10.0s"), (59.4, "59s"), (60, "1m00s"), (3725, "1h02m"), (90000, "1d01h")],
)
def test_durations_have_two_units_at_most(seconds: float | None, text: str) -> None:
    assert texts.duration(seconds) == text
