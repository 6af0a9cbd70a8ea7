"""What was ever sent can still be read, and what is sent has not changed unnoticed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from berth.contracts.consumers import CONSUMES
from berth.contracts.envelope import Fact, Order, decode, registered
from tests.contract.freeze import GOLDEN, SCHEMAS, schema_text

TYPES = sorted(registered())


@pytest.mark.parametrize("type_", TYPES)
def test_schema_is_the_frozen_one(type_: str) -> None:
    frozen = (SCHEMAS / f"{type_}.json").read_text()
    assert schema_text(type_) == frozen, (
        "the message has changed; where only optional fields were added, run `make schemas`, else make a new version"
    )


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_every_message_ever_sent_can_be_read(path: Any) -> None:
    raw = path.read_bytes()
    event = decode(raw)
    assert event.type == path.stem
    kept = json.loads(event.to_json())["data"]
    for name, value in json.loads(raw)["data"].items():
        assert kept[name] == value, f"{path.stem}: {name} is not read as it was sent"


def test_every_type_has_its_golden_file() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} >= set(TYPES)


def test_every_schema_with_a_golden_file_accepts_it() -> None:
    import jsonschema

    for type_ in TYPES:
        data = json.loads((GOLDEN / f"{type_}.json").read_text())["data"]
        jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{type_}.json").read_text())).validate(data)


def test_facts_have_owners_and_orders_have_verbs() -> None:
    for type_, cls in registered().items():
        if issubclass(cls, Fact):
            assert cls.OWNERS, type_
        else:
            assert issubclass(cls, Order) and cls.VERB, type_


def test_cores_take_in_just_what_their_consumers_deliver() -> None:
    from berth.decisions.admission import AdmissionCore
    from berth.decisions.health import InventoryCore
    from berth.decisions.lifecycle import LifecycleCore
    from berth.decisions.placement.core import PlacementCore

    for core in (AdmissionCore, InventoryCore, LifecycleCore, PlacementCore):
        assert set(core.CONSUMES) == set(CONSUMES[core.NAME]), core.NAME
        assert len(CONSUMES[core.NAME]) == len(set(CONSUMES[core.NAME])), f"{core.NAME}: filters overlap"


def test_views_take_in_just_what_their_consumer_delivers() -> None:
    from services.gateway.projector import PROJECTED

    assert {fact.TYPE for fact in CONSUMES["gateway"]} == PROJECTED


def test_an_older_reader_ignores_fields_it_does_not_know() -> None:
    raw = json.loads((GOLDEN / "berth.job.placed.v1.json").read_text())
    raw["data"]["added_later"] = 1
    raw["extension"] = "x"
    assert decode(json.dumps(raw).encode()).data.job_id == "j-0001"
