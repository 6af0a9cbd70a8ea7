"""Whatever JSON a document holds: the check answers, and a valid policy with one wrong key is refused at that key."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from berth.decisions.policy.check import check, warnings
from berth.decisions.policy.diff import changes
from berth.decisions.policy.document import Policy

ROOT = Path(__file__).resolve().parents[4]
FLEET = {"H100-80G": 16, "A100-40G": 4}
PRESETS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "policies").glob("*.yaml"))}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**30, -(10**30), 2**63, 0, -1]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["30s", "1h30m", "off", "H100-80G", "24:00", "UTC", "2026-03-02T08:00:00Z", "inference", "\x00"]),
)
keys = st.one_of(
    st.text(max_size=6),
    st.sampled_from([*Policy.model_fields, "name", "class", "quota", "windows", "reserved", "from", "to", "idle"]),
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=20,
)
Place = tuple[str | int, ...]


def places(value: Any, at: Place = ()) -> list[Place]:
    """Every place of a document, the whole one left out."""
    found: list[Place] = []
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        found += [(*at, key), *places(entry, (*at, key))]
    return found


def put(document: dict[str, Any], place: Place, value: Any) -> dict[str, Any]:
    made = copy.deepcopy(document)
    inner: Any = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return made


def wrong_for(value: Any) -> Any:
    """Something that can never stand in place of this."""
    return 3.5 if isinstance(value, (dict, list)) else {"no": "such"}


PLACES = [(name, place) for name, document in PRESETS.items() for place in places(document)]


@settings(deadline=None, max_examples=300)
@given(anything)
def test_any_json_gets_an_answer(document: Any) -> None:
    found = check(document, installed=FLEET)
    warnings(document, installed=FLEET)
    assert all(problem.path and problem.fault and problem.remedy for problem in found)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(PLACES), anything)
def test_any_json_in_any_place_gets_an_answer(where: tuple[str, Place], value: Any) -> None:
    name, place = where
    document = put(PRESETS[name], place, value)
    if not check(document, installed=FLEET):
        warnings(document, installed=FLEET)
        changes(PRESETS[name], document)
        changes(document, PRESETS[name])


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(PLACES))
def test_one_wrong_key_is_refused_at_its_path(where: tuple[str, Place]) -> None:
    name, place = where
    inner: Any = PRESETS[name]
    for key in place:
        inner = inner[key]
    path = ".".join(map(str, place))
    found = check(put(PRESETS[name], place, wrong_for(inner)), installed=FLEET)
    assert any(problem.path == path or problem.path.startswith(f"{path}.") for problem in found), (path, found)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([(n, p) for n, p in PLACES if p[-1] not in {"quota", "reserved"}]))
def test_one_misspelt_key_is_refused_at_its_path(where: tuple[str, Place]) -> None:
    name, place = where
    inner: Any = PRESETS[name]
    for key in place:
        inner = inner[key]
    free_names = {"card_types", "tenants", "cohorts", "reserved", "floor", "quota"}
    if not isinstance(inner, dict) or place[-1] in free_names:
        return
    found = check(put(PRESETS[name], (*place, "mispelt"), 1), installed=FLEET)
    assert ".".join(map(str, (*place, "mispelt"))) in [problem.path for problem in found]


@pytest.mark.parametrize("name", PRESETS)
def test_a_document_written_back_is_the_same_policy(name: str) -> None:
    policy = Policy.from_document(PRESETS[name])
    assert Policy.from_document(policy.to_document()) == policy
    assert changes(PRESETS[name], policy.to_document()) == []
