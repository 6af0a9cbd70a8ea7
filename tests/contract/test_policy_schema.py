"""The schema of the policy document: the frozen one, and one that agrees with the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from berth.decisions.policy.check import check
from berth.decisions.policy.schema import schema_text
from tests.contract.freeze import POLICY_SCHEMA

VALIDATOR = jsonschema.Draft202012Validator(json.loads(POLICY_SCHEMA.read_text()))
POLICIES = sorted(POLICY_SCHEMA.parent.glob("*.yaml"))


def test_it_is_the_frozen_one() -> None:
    assert schema_text() == POLICY_SCHEMA.read_text(), "the document has changed; run `make schemas`"


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.stem)
def test_it_accepts_every_shipped_policy(path: Path) -> None:
    VALIDATOR.validate(yaml.safe_load(path.read_text()))


@pytest.mark.parametrize(
    "document",
    [
        {"defalts": {}},
        {"tenants": {"a": {"quota": {"H100-80G": -1}}}},
        {"defaults": {"queue": {"discipline": "maybe"}}},
        {"classes": {"batch": {}}},
        {"class_order": "training"},
        {"protection": [{"name": "x", "windows": [{"from": "8", "to": "20:00", "zone": "UTC"}]}]},
        {"reservations": [{"name": "x"}]},
    ],
    ids=lambda document: next(iter(document)),
)
def test_it_refuses_what_the_models_refuse(document: dict[str, Any]) -> None:
    assert check(document)
    assert not VALIDATOR.is_valid(document)


def test_every_knob_has_a_place_and_lines_are_explained() -> None:
    schema = VALIDATOR.schema
    line = schema["$defs"]["ProtectionLine"]["properties"]
    assert "class" in line and line["reserved"]["description"]
    assert schema["additionalProperties"] is False
