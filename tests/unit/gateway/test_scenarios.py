"""The bodies of scenario a24, as they stand in its file: refused by the field that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from berth.contracts.jobs import JobSpec
from services.gateway.policy_view import PolicyView
from services.gateway.problems import ApiError
from services.gateway.submissions import Asked, check_jobs

SCENARIO: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[2] / "scenarios" / "a24-bad-numbers-refused.yaml").read_text()
)
FIRST, SECOND = SCENARIO["steps"]
ANSWERS = FIRST["expect"]["answers"]
POLICY = {"tenants": {"vision": {}}, "defaults": {"limits": SCENARIO["policy"]["limits"]}}


def fields_refused(body: dict[str, Any]) -> list[str]:
    """What is wrong with a body, first the field that stands in front of the problem document."""
    try:
        [spec] = check_jobs(Asked((body,), False), tenant="vision")
    except ApiError as error:
        return [str(fault["field"]) for fault in error.problem.errors]
    faults = PolicyView.from_document(1, POLICY, frozenset()).faults(spec)
    return [str(fault.path[0]) for fault in faults]


@pytest.mark.parametrize("raw", [do["submit_raw"] for do in FIRST["do"]], ids=lambda raw: str(raw["as"]))
def test_a_body_that_makes_no_sense_is_refused_by_its_field(raw: dict[str, Any]) -> None:
    assert fields_refused(raw["body"])[0] == ANSWERS[raw["as"]]["field"]


def test_the_next_good_request_is_taken() -> None:
    job = SECOND["do"][0]["submit"]["job"] | {"command": ["true"]}
    assert fields_refused(job) == []
    assert JobSpec.model_validate(job, extra="forbid").gpus == 8
