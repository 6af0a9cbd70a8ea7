"""The policy over the API: history, comparison, proposals that wait for another operator, quotas."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from berth.contracts.events import AccessDenied, PolicyApproved, PolicyProposed, PolicyWithdrawn
from berth.contracts.requests import AffectedJob, PolicyCheckAnswer, PolicyEffects, QuotaCut
from services.gateway.intake import Tell
from services.gateway.store.queries import HeldProposal
from tests.unit.gateway.fakes import POLICY, World, make_world
from tests.unit.gateway.test_api import Caller, problem

NOW = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
CUT = QuotaCut(tenant="team-a", card_type="H100-80G", held=8, may_hold=4, over=4, draining=4)
EFFECTS = PolicyEffects(policy_version=1, state_version=7, as_of=NOW, cuts=(CUT,))


@pytest.fixture
async def api() -> AsyncIterator[Caller]:
    world = await make_world()
    ask = "berth.req.default"
    world.bus.answers[f"{ask}.admission.check_policy"] = _checked
    world.bus.answers[f"{ask}.placement.policy_effects"] = lambda _: EFFECTS
    yield Caller(world)


def _checked(question: dict[str, Any]) -> PolicyCheckAnswer:
    problems = ({"path": "tenants", "fault": "is wrong", "remedy": "mend it"},) if "bad" in question["document"] else ()
    return PolicyCheckAnswer(is_valid=not problems, problems=problems)


def with_admission(world: World) -> None:
    """Every proposal is activated, unless it was made from another version."""

    def answer(tell: Tell) -> None:
        if isinstance(tell.data, PolicyProposed):
            current = len(world.store.policies)
            if tell.data.based_on not in {None, current}:
                stale = [{"path": "(document)", "fault": "another version is in force", "remedy": "look again"}]
                world.store.proposals[tell.data.proposal_id] = (None, stale)
                return
            version = world.store.activate(tell.data.document)
            world.store.proposals[tell.data.proposal_id] = (version, [])

    world.store.on_tell = answer


def hold(world: World, *, author: str = "operator-2") -> HeldProposal:
    document = POLICY | {"description": "new"}
    held = HeldProposal("p-1", document, author, "more", NOW, 1, "protection")
    world.store.held.append(held)
    return held


def quota(amount: Any) -> dict[str, Any]:
    return {"quota": {"H100-80G": amount}, "why": "asked"}


# ------------------------------------------------------------------------------------------------------- history, diff
async def test_history_tells_versions_newest_first_with_what_changed(api: Caller) -> None:
    api.world.store.activate(POLICY | {"tenants": {"team-a": {"quota": {"H100-80G": 4}}, "team-b": {}, "视觉组": {}}})
    api.world.store.activate(POLICY)
    found = (await api("operator").get("/v1/policy/history")).json()
    assert [(v["version"], v["changed"]) for v in found["versions"]] == [
        (3, "tenant team-a, quota H100-80G: 4 → (not set)"),
        (2, "tenant team-a, quota H100-80G: (not set) → 4"),
        (1, "the first policy"),
    ]
    page = (await api("operator").get("/v1/policy/history", params={"limit": 1})).json()
    assert (page["versions"][0]["version"], page["next"]) == (3, 3)
    page = (await api("operator").get("/v1/policy/history", params={"limit": 5, "before": 3})).json()
    assert ([v["version"] for v in page["versions"]], page["next"]) == ([2, 1], None)


async def test_a_document_is_compared_with_the_policy_in_force_and_tried(api: Caller) -> None:
    document = POLICY | {"description": "new"}
    found = (await api("operator").post("/v1/policy/diff", json={"document": document})).json()
    assert [change["text"] for change in found["changes"]] == ["description: (not set) → new"]
    assert (found["from_version"], found["to_version"], found["effects"]["cuts"][0]["over"]) == (1, None, 4)


async def test_a_wrong_document_is_compared_but_not_tried(api: Caller) -> None:
    found = (await api("operator").post("/v1/policy/diff", json={"document": {"bad": 1}})).json()
    assert (found["effects"], found["problems"][0]["path"], found["changes"]) == (None, "tenants", [])


async def test_two_versions_are_compared_without_a_trial(api: Caller) -> None:
    api.world.store.activate(POLICY | {"description": "new"})
    found = (await api("operator").post("/v1/policy/diff", json={"version": 2, "base": 1})).json()
    assert (found["from_version"], found["to_version"], len(found["changes"]), found["effects"]) == (1, 2, 1, None)
    back = (await api("operator").post("/v1/policy/diff", json={"version": 1})).json()
    assert (back["from_version"], back["to_version"]) == (2, 1)
    assert back["effects"] is not None, "what going back would do"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 422, "invalid"),
        ({"document": {}, "version": 1}, 422, "invalid"),
        ({"version": 9}, 404, "not_found"),
        ({"document": {}, "base": 9}, 404, "not_found"),
        ({"document": []}, 422, None),
    ],
)
async def test_a_comparison_of_nothing_is_refused(api: Caller, body: dict[str, Any], status: int, code: str) -> None:
    answer = await api("operator").post("/v1/policy/diff", json=body)
    assert answer.status_code == status and code in {None, answer.json()["code"]}


async def test_the_schema_is_served(api: Caller) -> None:
    assert (await api("member").get("/v1/policy/schema")).json()["title"] == "Berth policy"


# ------------------------------------------------------------------------------------------------------------ approval
async def test_a_guarded_proposal_is_held(api: Caller) -> None:
    def hold_it(tell: Tell) -> None:
        assert isinstance(tell.data, PolicyProposed)
        held = HeldProposal(tell.data.proposal_id, tell.data.document, "operator-1", "", NOW, 1, "all")
        api.world.store.held.append(held)

    api.world.store.on_tell = hold_it
    answer = await api("operator").put("/v1/policy", json={"document": POLICY})
    assert (answer.status_code, answer.json()["state"]) == (202, "held")


async def test_held_proposals_are_listed_with_what_they_change(api: Caller) -> None:
    hold(api.world)
    [found] = (await api("operator").get("/v1/policy/proposals")).json()["proposals"]
    assert (found["proposal_id"], found["author"], found["changes"][0]["text"]) == (
        "p-1",
        "operator-2",
        "description: (not set) → new",
    )


async def test_another_operator_approves(api: Caller) -> None:
    held = hold(api.world)

    def activate(tell: Tell) -> None:
        assert isinstance(tell.data, PolicyApproved) and tell.data.approver == "operator-1"
        api.world.store.proposals[held.proposal_id] = (api.world.store.activate(held.document), [])

    api.world.store.on_tell = activate
    answer = await api("operator").post("/v1/policy/proposals/p-1/approve", json={"why": "fine"})
    assert (answer.status_code, answer.json()["version"]) == (200, 2)


async def test_nobody_approves_their_own(api: Caller) -> None:
    hold(api.world, author="operator-1")
    problem(await api("operator").post("/v1/policy/proposals/p-1/approve", json={}), 403, "forbidden")
    assert isinstance(api.world.store.told[-1], AccessDenied)


async def test_a_proposal_is_turned_down(api: Caller) -> None:
    hold(api.world)
    api.world.store.on_tell = lambda _: api.world.store.proposals.update({"p-1": (None, [])})
    answer = await api("operator").post("/v1/policy/proposals/p-1/withdraw", json={"why": "no"})
    assert answer.status_code == 202
    assert isinstance(api.world.store.told[-1], PolicyWithdrawn)


async def test_what_does_not_wait_cannot_be_approved(api: Caller) -> None:
    for verb in ("approve", "withdraw"):
        problem(await api("operator").post(f"/v1/policy/proposals/p-9/{verb}", json={}), 404, "not_found")


# --------------------------------------------------------------------------------------------------------------- quota
async def _set(api: Caller, body: dict[str, Any], tenant: str = "team-a", token: str = "operator") -> httpx.Response:
    return await api(token).patch(f"/v1/tenants/{tenant}/quota", json=body)


async def test_a_quota_is_set_as_a_version_of_its_own_with_its_actor(api: Caller) -> None:
    with_admission(api.world)
    answer = await _set(api, quota(4))
    assert (answer.status_code, answer.json()["version"]) == (200, 2)
    [told] = [fact for fact in api.world.store.told if isinstance(fact, PolicyProposed)]
    assert (told.author, told.why, told.based_on) == ("operator-1", "asked", 1)
    assert told.document == POLICY | {"tenants": POLICY["tenants"] | {"team-a": {"quota": {"H100-80G": 4}}}}
    await _set(api, {"quota": {"A100-40G": 0.5}})
    await _set(api, quota(None))
    assert api.world.store.policies[-1].document["tenants"]["team-a"] == {"quota": {"A100-40G": 0.5}}


async def test_a_quota_that_is_so_already_makes_no_version(api: Caller) -> None:
    with_admission(api.world)
    await _set(api, quota(4))
    assert (await _set(api, quota(4))).json()["version"] == 2
    assert len(api.world.store.policies) == 2


async def test_a_quota_is_set_on_the_newest_version_when_others_change_it_too(api: Caller) -> None:
    with_admission(api.world)
    answer_of = api.world.store.on_tell
    raced: list[bool] = []

    def race(tell: Tell) -> None:
        if not raced:
            raced.append(True)
            api.world.store.activate(POLICY | {"description": "theirs"})
        answer_of(tell)

    api.world.store.on_tell = race
    assert (await _set(api, quota(4))).json()["version"] == 3
    assert api.world.store.policies[-1].document["description"] == "theirs"


@pytest.mark.parametrize("amount", ["8", True, [1]])
async def test_a_quota_is_a_number(api: Caller, amount: Any) -> None:
    assert (await _set(api, quota(amount))).status_code == 422


async def test_a_quota_of_an_unknown_tenant_or_of_nothing_is_refused(api: Caller) -> None:
    problem(await _set(api, quota(1), tenant="nobody"), 404, "not_found")
    assert (await _set(api, {"quota": {}})).status_code == 422


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/policy/history", None),
        ("POST", "/v1/policy/diff", {"version": 1}),
        ("GET", "/v1/policy/proposals", None),
        ("POST", "/v1/policy/proposals/p-1/approve", {}),
        ("POST", "/v1/policy/proposals/p-1/withdraw", {}),
        ("PATCH", "/v1/tenants/team-a/quota", quota(99)),
    ],
)
@pytest.mark.parametrize("token", ["member", "admin-a"])
async def test_only_operators_may(api: Caller, token: str, method: str, path: str, body: Any) -> None:
    problem(await api(token).request(method, path, json=body), 403, "forbidden")
    assert [type(fact) for fact in api.world.store.told] == [AccessDenied]


def test_affected_jobs_carry_no_names() -> None:
    assert "name" not in AffectedJob.model_fields
