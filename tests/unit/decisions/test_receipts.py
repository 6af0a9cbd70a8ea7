"""Receipts: bounded, with a digest that depends on what the decision stood on and on nothing else."""

from __future__ import annotations

import pytest

from berth.contracts.envelope import Fact, decode
from berth.contracts.events import (
    JobAdmitted,
    JobPlaced,
    JobRefused,
    JobStopping,
    JobWaiting,
    PreemptionPlanned,
    Receipt,
)
from berth.contracts.reasons import Code, because
from berth.decisions.core import DECISIONS_VERSION
from berth.decisions.receipts import CANDIDATES, REASONS, make_receipt
from berth.replay.record_file import RecordedEvent, parse
from berth.replay.simulated import random_steps, record_simulation


def a_receipt(outcome: str = "place|j1", policy: int = 1, state: int = 5, code: Code = Code.QUOTA_FULL) -> Receipt:
    return make_receipt(outcome, policy_version=policy, state_version=state, reasons=[because(code)])


def test_equal_inputs_have_equal_digests() -> None:
    assert a_receipt() == a_receipt()


@pytest.mark.parametrize(
    "other",
    [
        a_receipt("place|j2"),
        a_receipt(policy=2),
        a_receipt(state=6),
        a_receipt(code=Code.NO_FREE_GPUS),
    ],
)
def test_another_input_has_another_digest(other: Receipt) -> None:
    assert other.digest != a_receipt().digest


def test_a_receipt_keeps_the_first_of_many() -> None:
    receipt = make_receipt(
        "wait",
        policy_version=1,
        state_version=1,
        candidates=({"node": f"n{n}"} for n in range(100)),
        reasons=[because(Code.QUOTA_FULL)] * 100,
    )
    assert [candidate["node"] for candidate in receipt.candidates] == [f"n{n}" for n in range(CANDIDATES)]
    assert len(receipt.reasons) == REASONS


KINDS: tuple[type[Fact], ...] = (JobAdmitted, JobRefused, JobPlaced, JobWaiting, JobStopping, PreemptionPlanned)


def test_every_decision_of_a_history_has_one() -> None:
    seen: dict[str, int] = dict.fromkeys((kind.TYPE for kind in KINDS), 0)
    for seed in (5, 2):
        for line in parse(record_simulation(random_steps(seed, 70))):
            if not isinstance(line, RecordedEvent) or line.type not in seen:
                continue
            data = decode(line.payload, line.type).data
            receipt: Receipt = data.receipt
            assert receipt.digest
            assert receipt.decisions_version == DECISIONS_VERSION
            assert receipt.policy_version > 0
            assert receipt.state_version > 0
            if isinstance(data, PreemptionPlanned):
                chosen = {candidate["job_id"] for candidate in receipt.candidates if candidate["chosen"]}
                assert chosen <= {victim.job_id for victim in data.victims}
                assert len(chosen) == min(len(data.victims), CANDIDATES)
            if isinstance(data, JobPlaced):
                nodes = {assignment.node for assignment in data.assignments}
                assert nodes & {candidate["node"] for candidate in receipt.candidates if candidate["chosen"]}
            seen[line.type] += 1
    assert all(seen.values()), seen
