"""`berth policy` and `berth quota set`: with a platform and without one."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from berth.contracts.events import PolicyProposed
from berth.contracts.reasons import Code, because
from berth.contracts.requests import (
    AffectedJob,
    LineEffect,
    NeverStarts,
    PolicyCheckAnswer,
    PolicyEffects,
    QuotaCut,
)
from services.gateway.intake import Tell
from services.gateway.store.queries import HeldProposal
from tests.unit.client.conftest import Cli, Platform
from tests.unit.gateway.fakes import POLICY

ROOT = Path(__file__).resolve().parents[3]
NOW = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
GOOD = "tenants:\n  team-a:\n    quota: {H100-80G: 4}\n"
WRONG = "tenants:\n  team-a:\n    quota: {H100-80G: -4}\ndefaults:\n  recovery:\n    lost_after: 5s\n    suspect_after: soon\n"


def a_job(name: str, **fields: Any) -> AffectedJob:
    return AffectedJob(**{"job_id": name, "tenant": "team-a", "job_class": "training", "gpus": 4, **fields})


EFFECTS = PolicyEffects(
    policy_version=1,
    state_version=1,
    as_of=NOW,
    cuts=(
        QuotaCut(
            tenant="team-a",
            card_type="H100-80G",
            held=12,
            may_hold=4,
            over=8,
            stopped=4,
            draining=4,
            jobs=(a_job("j1", rule="quota_cut"), a_job("j2")),
        ),
    ),
    stops=(a_job("j1", rule="quota_cut"),),
    never=(NeverStarts(job=a_job("j3", gpus=8), reasons=(because(Code.QUOTA_FULL, needed=8, quota=4),)),),
    lines=(LineEffect(name="day", kind="line", change="new", was_open=False, is_open=True, next_change=NOW),),
)


@pytest.fixture
def operator(berth: Cli, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("BERTH_TOKEN", "operator")
    world = platform.world
    world.store.policies.clear()
    world.store.activate(POLICY)
    world.store.held.clear()
    world.bus.answers["berth.req.default.admission.check_policy"] = lambda _: PolicyCheckAnswer(is_valid=True)
    world.bus.answers["berth.req.default.placement.policy_effects"] = lambda _: EFFECTS

    def activate(tell: Tell) -> None:
        if isinstance(tell.data, PolicyProposed):
            world.store.proposals[tell.data.proposal_id] = (world.store.activate(tell.data.document), [])

    monkeypatch.setattr(world.store, "on_tell", activate)
    return berth


# ---------------------------------------------------------------------------------------------------- without platform
def test_a_document_is_checked_without_a_platform_and_lines_are_named(
    berth: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BERTH_URL")
    ran = berth("policy", "check", berth.file("p.yaml", WRONG))
    assert ran.code == 1
    assert "p.yaml:3: tenants.team-a.quota.H100-80G" in ran.out
    assert "p.yaml:7: defaults.recovery.suspect_after: 'soon' is not a duration" in ran.out
    assert "checked without a platform" in ran.err
    ran = berth("policy", "check", berth.file("p.yaml", GOOD), "--json")
    assert (ran.code, ran.json["is_valid"]) == (0, True)


def test_cards_can_be_named_in_place_of_a_platform(berth: Cli) -> None:
    line = "protection: [{name: x, class: inference, reserved: {H100-80G: 9}}]\n"
    ran = berth("policy", "check", berth.file("p.yaml", GOOD + line), "--installed", "H100-80G=8")
    assert ran.code == 1 and "9 H100-80G, 8 are installed" in ran.out
    assert berth("policy", "check", "p.yaml", "--installed", "H100-80G=16").code == 0
    assert berth("policy", "check", "p.yaml", "--installed", "H100-80G").code == 2


@pytest.mark.parametrize("path", sorted((ROOT / "policies").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_policies_are_right_for_the_embedded_fleet(berth: Cli, path: Path) -> None:
    fleet = ("--installed", "H100-80G=16", "--installed", "A100-40G=4")
    ran = berth("policy", "check", str(path), *fleet)
    assert (ran.code, ran.out) == (0, "the document is right\n"), "neither problem nor warning"


@pytest.mark.parametrize("text", ["", "- a\n", "text\n", "3\n", "a: 1\n---\nb: 2\n", "a: [\n"])
def test_what_is_no_policy_is_named(berth: Cli, text: str) -> None:
    ran = berth("policy", "check", "-", "--offline", stdin=text)
    assert ran.code in {1, 2}
    assert "Traceback" not in ran.err


def test_the_schema_needs_no_platform(berth: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BERTH_URL")
    assert berth("policy", "schema").out == (ROOT / "policies" / "schema.json").read_text()


# ------------------------------------------------------------------------------------------------------- with platform
def test_a_check_with_a_platform_tells_what_would_follow(operator: Cli) -> None:
    ran = operator("policy", "check", operator.file("p.yaml", GOOD))
    assert ran.code == 0
    assert "team-a holds 12 H100-80G and may hold 4: 8 too many, 4 are taken back, 4 drain" in ran.out
    assert "would be stopped (quota cut): j1 (team-a, 4 GPUs)" in ran.out
    assert "would never start: j3" in ran.out and "needs 8, quota 4" in ran.out
    assert "line day (new) holds from now on" in ran.out


def test_a_document_is_compared(operator: Cli) -> None:
    ran = operator("policy", "diff", operator.file("p.yaml", GOOD))
    assert ran.code == 0
    assert "tenant team-b is removed" in ran.out and "8 too many" in ran.out
    ran = operator("policy", "apply", "p.yaml", "--dry-run", "--json")
    assert {"changes", "effects"} <= set(ran.json)


def test_versions_are_applied_listed_and_compared(operator: Cli) -> None:
    ran = operator("policy", "apply", operator.file("p.yaml", GOOD), "--why", "less")
    assert (ran.code, ran.out) == (0, "policy version 2 is in force\n")
    ran = operator("policy", "history", "--json")
    assert [version["version"] for version in ran.json["versions"]] == [2, 1]
    assert "is removed; " in operator("policy", "history").out
    ran = operator("policy", "diff", "1", "2")
    assert ran.out.startswith("from version 1 to version 2:") and "at once" not in ran.out
    assert operator("policy", "diff", "p.yaml", "2").code == 2
    assert operator("policy", "show", "--version", "1").out.startswith("# version 1")


def test_a_quota_is_set_alone(operator: Cli, platform: Platform) -> None:
    ran = operator("quota", "set", "team-a", "H100-80G=4", "A100-40G=none", "--why", "asked")
    assert (ran.code, ran.out) == (0, "policy version 2 is in force\n")
    assert platform.world.store.policies[-1].document["tenants"]["team-a"] == {"quota": {"H100-80G": 4}}
    assert operator("quota", "set", "team-a", "H100-80G=lots").code == 2
    assert operator("quota", "set", "nobody", "H100-80G=1").code == 3


def test_a_quota_is_an_operators_matter(berth: Cli) -> None:
    assert berth("quota", "set", "team-a", "H100-80G=400").code == 3


def test_a_held_proposal_is_shown_approved_and_turned_down(operator: Cli, platform: Platform) -> None:
    held = HeldProposal("p-1", POLICY | {"description": "new"}, "operator-2", "more", NOW, 1, "all")
    platform.world.store.held.append(held)
    ran = operator("policy", "proposals")
    assert "p-1" in ran.out and "description: (not set) → new" in ran.out
    platform.world.store.proposals["p-1"] = (2, [])
    assert operator("policy", "approve", "p-1", "--why", "fine").out == "policy version 2 is in force\n"
    assert operator("policy", "reject", "p-1").out == "p-1 is turned down\n"
    assert operator("policy", "approve", "p-2").code == 3
