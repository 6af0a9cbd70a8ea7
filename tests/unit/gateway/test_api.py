"""The API over parts in memory: answers, walls, problem documents, description."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from berth.contracts.api import GpuView, JobView, NodeView, Problem, WhyView
from berth.contracts.events import AccessDenied, NodeCordonRequested, PolicyProposed
from berth.contracts.nodes import GpuDescription, GpuReading, NodeDescription, NodeState
from berth.contracts.reasons import Code, because
from berth.contracts.requests import (
    Holding,
    JobExplained,
    LedgerAnswer,
    LogAnswer,
    NodesAnswer,
    NodeStatus,
    QuotaAnswer,
    QuotaLine,
)
from berth.store.errors import Unreachable
from services.gateway.api.http import describe, make_app
from services.gateway.intake import Tell
from tests.unit.gateway.fakes import World, make_world, waiting

JOB: dict[str, Any] = {"name": "train", "class": "training", "gpus": 2, "command": ["x"]}


class Caller:
    """Calls the API with a token."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.app = make_app(world.deps)

    def __call__(self, token: str | None = "member") -> httpx.AsyncClient:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)

    async def submit(self, token: str = "member", **changes: Any) -> str:
        answer = await self(token).post("/v1/jobs", json=JOB | changes)
        assert answer.status_code == 201, answer.text
        job_id: str = answer.json()["job_id"]
        return job_id


@pytest.fixture
async def api() -> AsyncIterator[Caller]:
    yield Caller(await make_world())


def problem(answer: httpx.Response, status: int, code: str) -> Problem:
    assert answer.headers["content-type"] == "application/problem+json"
    found = Problem.model_validate(answer.json())
    assert (answer.status_code, found.status, found.code) == (status, status, code)
    assert found.remedy
    return found


# ------------------------------------------------------------------------------------------------------------ who
@pytest.mark.parametrize("header", [None, "Bearer", "Bearer ", "Bearer wrong", "Basic bWVtYmVy", "member"])
async def test_without_a_known_token_nothing_is_answered(api: Caller, header: str | None) -> None:
    client = api(None)
    headers = {} if header is None else {"Authorization": header}
    for method, path in (("GET", "/v1/jobs"), ("POST", "/v1/jobs"), ("GET", "/v1/events"), ("GET", "/v1/nodes")):
        answer = await client.request(method, path, headers=headers)
        problem(answer, 401, "unauthenticated")
        assert answer.headers["www-authenticate"].startswith("Bearer")
    assert api.world.store.told == []


async def test_a_viewer_changes_nothing(api: Caller) -> None:
    job = await api.submit()
    viewer = api("viewer")
    problem(await viewer.post("/v1/jobs", json=JOB), 403, "forbidden")
    problem(await viewer.post(f"/v1/jobs/{job}/cancel"), 403, "forbidden")
    problem(await viewer.delete(f"/v1/jobs/{job}"), 403, "forbidden")
    assert (await viewer.get(f"/v1/jobs/{job}")).status_code == 200
    assert api.world.store.cancelled == []


async def test_another_tenants_job_does_not_exist(api: Caller) -> None:
    theirs = await api.submit("other", name="falcon-x")
    client = api()
    for method, path in (
        ("GET", f"/v1/jobs/{theirs}"),
        ("GET", "/v1/jobs/falcon-x"),
        ("GET", f"/v1/jobs/{theirs}/why"),
        ("GET", f"/v1/jobs/{theirs}/logs"),
        ("GET", f"/v1/jobs/{theirs}/trace"),
        ("POST", f"/v1/jobs/{theirs}/cancel"),
        ("DELETE", f"/v1/jobs/{theirs}"),
    ):
        found = problem(await client.request(method, path), 404, "not_found")
        unknown = problem(
            await client.request(method, path.replace(theirs, "nope").replace("falcon-x", "nope")), 404, "not_found"
        )
        assert found.title == unknown.title
    assert theirs not in (await client.get("/v1/jobs")).text
    problem(await client.get("/v1/jobs", params={"tenant": "team-b"}), 403, "forbidden")
    problem(await client.get("/v1/quota", params={"tenant": "team-b"}), 403, "forbidden")
    actions = {told.action for told in api.world.store.told if isinstance(told, AccessDenied)}
    assert {"read_job", "read_why", "read_logs", "cancel_job", "list_jobs"} <= actions


async def test_a_denial_is_recorded_once_a_minute(api: Caller) -> None:
    theirs = await api.submit("other")
    for _ in range(5):
        await api().get(f"/v1/jobs/{theirs}")
    assert len(api.world.store.told) == 1


async def test_a_member_submits_for_its_own_tenant_only(api: Caller) -> None:
    problem(await api().post("/v1/jobs", json=JOB | {"tenant": "team-b"}), 403, "forbidden")
    assert (await api("operator").post("/v1/jobs", json=JOB | {"tenant": "team-b"})).status_code == 201
    missing = problem(await api("operator").post("/v1/jobs", json=JOB), 422, "missing_field")
    assert missing.field == "tenant"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/v1/policy", {"document": {}}),
        ("POST", "/v1/policy/check", {"document": {}}),
        ("GET", "/v1/policy", None),
        ("POST", "/v1/nodes/n1/cordon", {"cordoned": True}),
        ("GET", "/v1/tokens", None),
        ("POST", "/v1/tokens", {"user": "x", "tenant": "team-a"}),
        ("DELETE", "/v1/tokens/id-member", None),
        ("GET", "/v1/parked", None),
        ("POST", "/v1/parked/placement/1/replay", {}),
        ("DELETE", "/v1/parked/placement/1", None),
        ("POST", "/v1/traces", None),
    ],
)
async def test_what_only_operators_may_do(api: Caller, method: str, path: str, body: Any) -> None:
    problem(await api().request(method, path, json=body), 403, "forbidden")


# ----------------------------------------------------------------------------------------------------------- submitting
async def test_a_key_stands_for_one_submission(api: Caller) -> None:
    headers = {"Idempotency-Key": "k1"}
    first = await api().post("/v1/jobs", json=JOB, headers=headers)
    again = await api().post("/v1/jobs", json=JOB, headers=headers)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["job_id"] == again.json()["job_id"]
    assert again.json()["is_repeat"] is True
    found = problem(await api().post("/v1/jobs", json=JOB | {"gpus": 4}, headers=headers), 409, "idempotency_conflict")
    assert found.field == "Idempotency-Key"
    assert (await api("other").post("/v1/jobs", json=JOB | {"gpus": 4}, headers=headers)).status_code == 201


@pytest.mark.parametrize("key", ["", " ", "x" * 201])
async def test_a_bad_key_is_named(api: Caller, key: str) -> None:
    answer = await api().post("/v1/jobs", json=JOB, headers={"Idempotency-Key": key})
    assert problem(answer, 422, "invalid_value").field == "Idempotency-Key"


async def test_a_body_above_the_limit_is_not_read(api: Caller) -> None:
    api.world.deps.max_body_bytes = 1000
    found = problem(await api().post("/v1/jobs", json=JOB | {"env": {"A": "x" * 2000}}), 413, "body_too_large")
    assert "1000 bytes" in found.detail

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 100

    headers = {"Content-Type": "application/json"}
    problem(await api().post("/v1/jobs", content=endless(), headers=headers), 413, "body_too_large")


async def test_bad_input_leaves_no_trace(api: Caller) -> None:
    changes: list[dict[str, Any]] = [{"gpus": -1}, {"types": ["X1"]}, {"priority": 1001}, {"command": []}]
    for change in changes:
        assert (await api().post("/v1/jobs", json=JOB | change)).status_code == 422
    assert api.world.store.jobs == {}
    assert api.world.store.told == []


async def test_an_unavailable_store_is_a_503_with_a_remedy(api: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_: object) -> None:
        raise Unreachable("gone")

    monkeypatch.setattr(api.world.store, "submit", away)
    answer = await api().post("/v1/jobs", json=JOB)
    problem(answer, 503, "store_unavailable")
    assert answer.headers["retry-after"] == "1"


async def test_a_defect_is_a_500_without_details(api: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(_: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(api.world.store, "submit", broken)
    answer = await api().post("/v1/jobs", json=JOB)
    assert "secret detail" not in problem(answer, 500, "internal").model_dump_json()


async def test_a_new_policy_is_looked_up_before_a_refusal(api: Caller) -> None:
    api.world.store.activate({"tenants": {"team-a": {}, "new": {}}, "card_types": {"H100-80G": {}}})
    assert (await api("operator").post("/v1/jobs", json=JOB | {"tenant": "new"})).status_code == 201


# -------------------------------------------------------------------------------------------------------------- reading
async def test_lists_are_paged_and_filtered(api: Caller) -> None:
    ids = [await api.submit(name=f"j{n}", **{"class": "general" if n % 2 else "training"}) for n in range(5)]
    api.world.store.progress(ids[0], state="succeeded")
    page = (await api().get("/v1/jobs", params={"limit": 3})).json()
    assert [job["job_id"] for job in page["jobs"]] == ids[:1:-1]
    rest = (await api().get("/v1/jobs", params={"limit": 3, "after": page["next"]})).json()
    assert [job["job_id"] for job in rest["jobs"]] == ids[1::-1]
    assert rest["next"] is None

    async def names(**params: Any) -> set[str]:
        return {job["name"] for job in (await api().get("/v1/jobs", params=params)).json()["jobs"]}

    assert await names(state="succeeded") == {"j0"}
    assert await names(state="live") == {"j1", "j2", "j3", "j4"}
    assert await names(state=["succeeded", "submitted"]) == {f"j{n}" for n in range(5)}
    assert await names(**{"class": "general"}) == {"j1", "j3"}
    assert await names(name="j3") == {"j3"}
    assert await names(user="nobody") == set()
    assert problem(await api().get("/v1/jobs", params={"state": "asleep"}), 422, "not_a_choice").field == "state"
    assert problem(await api().get("/v1/jobs", params={"limit": 0}), 422, "greater_than_equal").field == "limit"


async def test_a_job_is_found_by_a_name_that_is_its_own(api: Caller) -> None:
    first = await api.submit(name="训练 é")
    assert (await api().get("/v1/jobs/训练 é")).json()["job_id"] == first
    second = await api.submit(name="训练 é")
    found = problem(await api().get("/v1/jobs/训练 é"), 409, "ambiguous_name")
    assert first in found.remedy
    api.world.store.progress(first, state="succeeded")
    assert (await api().get("/v1/jobs/训练 é")).json()["job_id"] == second


async def test_views_are_what_the_contract_says(api: Caller) -> None:
    job = await api.submit(env={"A": "b"})
    api.world.store.progress(job, **waiting("no_free_gpus", needed=2, free=0))
    view = JobView.model_validate((await api().get(f"/v1/jobs/{job}")).json())
    assert view.summary == "waits because not enough GPUs are free (needs 2, free 0)"
    assert view.spec is not None
    assert view.spec.command == ("x",)
    WhyView.model_validate((await api().get(f"/v1/jobs/{job}/why")).json())


async def test_why_asks_placement_for_numbers_of_now(api: Caller) -> None:
    mine = await api.submit(name="mine")
    theirs = await api.submit("other", name="falcon-x")
    api.world.store.progress(mine, **waiting("no_free_gpus", needed=2, free=0))
    reason = because(Code.NO_FREE_GPUS, blocked_by=(theirs, mine), needed=2, free=1, tenant="team-b")
    explained = JobExplained(
        job_id=mine, is_known=True, reasons=(reason,), place=2, waiting=7, policy_version=3, as_of=datetime.now(UTC)
    )
    api.world.bus.answers["berth.req.default.placement.explain"] = lambda _: explained
    why = (await api().get(f"/v1/jobs/{mine}/why")).json()
    assert (why["place"], why["waiting"], why["policy_version"]) == (2, 7, 3)
    assert why["reasons"][0]["facts"] == {"needed": 2, "free": 1}
    assert why["text"][0].startswith("not enough GPUs are free (needs 2, free 1); held by mine")
    assert "falcon-x" not in str(why)
    assert "held by falcon-x" in (await api("operator").get(f"/v1/jobs/{mine}/why")).text


async def test_why_shows_the_last_known_reasons_while_placement_is_away(api: Caller) -> None:
    job = await api.submit()
    api.world.store.progress(job, **waiting("quota_full", quota=8, used=8))
    why = (await api().get(f"/v1/jobs/{job}/why")).json()
    assert why["reasons"][0]["code"] == "quota_full"
    assert why["place"] is None


# ----------------------------------------------------------------------------------------------------------------- logs
def _with_log(api: Caller, job: str, answers: list[LogAnswer]) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []
    assignments = [{"worker": 0, "node": "n1", "gpus": ["G0"]}, {"worker": 1, "node": "n2", "gpus": ["G1"]}]
    api.world.store.progress(
        job, state="running", attempt=1, phase=2, attempts=[{"attempt": 1, "fence": 1, "assignments": assignments}]
    )

    def answer(question: Any) -> LogAnswer:
        asked.append(question)
        return answers[min(len(asked), len(answers)) - 1]

    api.world.bus.answers["berth.req.default.node.n2.logs"] = answer
    return asked


async def test_logs_come_from_the_workers_node(api: Caller) -> None:
    job = await api.submit()
    asked = _with_log(api, job, [LogAnswer(is_known=True, text="hé\n", next_offset=4, is_over=True)])
    answer = await api().get(f"/v1/jobs/{job}/logs", params={"worker": 1, "offset": -100})
    assert (answer.text, answer.headers["berth-next-offset"]) == ("hé\n", "4")
    assert (asked[0]["worker"], asked[0]["attempt"], asked[0]["offset"]) == (1, 1, -100)


async def test_following_ends_with_the_worker(api: Caller) -> None:
    job = await api.submit()
    parts = [
        LogAnswer(is_known=True, text="one\n", next_offset=4),
        LogAnswer(is_known=True, text="", next_offset=4),
        LogAnswer(is_known=True, text="two\n", next_offset=8, is_over=True),
    ]
    _with_log(api, job, parts)
    answer = await api().get(f"/v1/jobs/{job}/logs", params={"worker": 1, "follow": True})
    assert answer.text == "one\ntwo\n"
    assert api.world.deps.open_streams == 0


async def test_logs_that_cannot_be_had_say_why(api: Caller) -> None:
    job = await api.submit()
    assert "has not started" in problem(await api().get(f"/v1/jobs/{job}/logs"), 404, "not_found").detail
    _with_log(api, job, [LogAnswer(is_known=False)])
    found = problem(await api().get(f"/v1/jobs/{job}/logs"), 503, "service_unavailable")
    assert "n1" in found.detail
    assert problem(await api().get(f"/v1/jobs/{job}/logs?worker=7"), 404, "not_found").remedy == "use 0 to 1"
    assert problem(await api().get(f"/v1/jobs/{job}/logs?attempt=9"), 404, "not_found").remedy == "use one of 1"
    problem(await api().get(f"/v1/jobs/{job}/logs?worker=1"), 404, "not_found")


async def test_open_streams_are_bounded(api: Caller) -> None:
    job = await api.submit()
    _with_log(api, job, [LogAnswer(is_known=True, text="x", next_offset=1)])
    api.world.deps.max_streams = 0
    problem(await api().get(f"/v1/jobs/{job}/logs?worker=1&follow=true"), 429, "too_many_requests")


# ----------------------------------------------------------------------------------------------------------------- pool
def _with_pool(api: Caller, *holders: tuple[str, str]) -> None:
    gpus = tuple(GpuDescription(uuid=f"G{n}", index=n, card_type="H100-80G", memory_mib=81920) for n in range(2))
    status = NodeStatus(
        node="n1",
        epoch=1,
        state=NodeState.READY,
        description=NodeDescription(node="n1", gpus=gpus),
        readings=(GpuReading(uuid="G0", utilization_percent=50),),
    )
    holdings = tuple(
        Holding(node="n1", gpu=f"G{n}", job_id=job, attempt=1, fence=1, worker=0, tenant=tenant)
        for n, (job, tenant) in enumerate(holders)
    )

    def nodes(question: Any) -> NodesAnswer:
        return NodesAnswer(nodes=(status,) if question["node"] in {None, "n1"} else ())

    api.world.bus.answers["berth.req.default.inventory.nodes"] = nodes
    api.world.bus.answers["berth.req.default.placement.ledger"] = lambda _: LedgerAnswer(holdings=holdings)


async def test_cards_show_holders_but_not_those_of_others(api: Caller) -> None:
    _with_pool(api, ("j-mine", "team-a"), ("j-theirs", "team-b"))
    gpus = [GpuView.model_validate(gpu) for gpu in (await api().get("/v1/gpus")).json()["gpus"]]
    assert [gpu.held_by for gpu in gpus] == [("j-mine",), ("someone else",)]
    assert gpus[0].utilization_percent == 50
    everything = (await api("operator").get("/v1/gpus")).json()["gpus"]
    assert [gpu["held_by"] for gpu in everything] == [["j-mine"], ["j-theirs"]]
    [node] = (await api().get("/v1/nodes")).json()["nodes"]
    assert NodeView.model_validate(node).gpus_held == 2
    problem(await api().get("/v1/nodes/nope"), 404, "not_found")


async def test_a_cordon_is_told_each_time_under_an_id_of_its_own(api: Caller) -> None:
    _with_pool(api)
    tells: list[Tell] = []
    api.world.store.on_tell = tells.append
    for cordoned in (True, False):
        answer = await api("operator").post("/v1/nodes/n1/cordon", json={"cordoned": cordoned, "why": "disk"})
        assert answer.status_code == 202
    assert [t.data.cordoned for t in tells if isinstance(t.data, NodeCordonRequested)] == [True, False]
    assert tells[0].version != tells[1].version
    problem(await api("operator").post("/v1/nodes/n1/cordon", json={"cordoned": 7}), 422, "not_a_truth_value")
    problem(await api("operator").post("/v1/nodes/nope/cordon", json={"cordoned": True}), 404, "not_found")


async def test_tenants_join_quota_and_jobs(api: Caller) -> None:
    await api.submit()
    lines = (QuotaLine(tenant="team-a", card_type="H100-80G", quota=8, used=2),)
    api.world.bus.answers["berth.req.default.placement.quota"] = lambda _: QuotaAnswer(lines=lines)
    [tenant] = (await api().get("/v1/tenants")).json()["tenants"]
    assert tenant == {
        "tenant": "team-a",
        "quota": {"H100-80G": 8},
        "used": {"H100-80G": 2},
        "jobs_waiting": 1,
        "jobs_running": 0,
    }
    names = [t["tenant"] for t in (await api("operator").get("/v1/tenants")).json()["tenants"]]
    assert names == ["team-a", "team-b", "视觉组"]


async def test_a_service_that_is_away_is_a_503(api: Caller) -> None:
    for path in ("/v1/nodes", "/v1/gpus", "/v1/quota", "/v1/tenants"):
        problem(await api().get(path), 503, "service_unavailable")


# ---------------------------------------------------------------------------------------------------- administration
async def test_a_proposal_that_gets_no_answer_stays_proposed(api: Caller) -> None:
    answer = await api("operator").put("/v1/policy", json={"document": {"tenants": {}}, "why": "x"})
    assert (answer.status_code, answer.json()["state"]) == (202, "proposed")
    assert isinstance(api.world.store.told[-1], PolicyProposed)


async def test_a_rejected_proposal_lists_every_fault(api: Caller) -> None:
    problems = [
        {"path": "tenants.a", "fault": "is wrong", "remedy": "mend it"},
        {"path": "b", "fault": "too", "remedy": "too"},
    ]

    def reject(tell: Tell) -> None:
        assert isinstance(tell.data, PolicyProposed)
        api.world.store.proposals[tell.data.proposal_id] = (None, problems)

    api.world.store.on_tell = reject
    found = problem(await api("operator").put("/v1/policy", json={"document": {}}), 422, "policy_rejected")
    assert (found.field, found.remedy, len(found.errors)) == ("tenants.a", "mend it", 2)


async def test_a_tenant_admin_makes_tokens_of_the_own_tenant(api: Caller) -> None:
    made = await api("admin-a").post("/v1/tokens", json={"user": "new"})
    assert (made.status_code, made.json()["tenant"]) == (201, "team-a")
    assert (await api(made.json()["token"]).get("/v1/whoami")).json()["user"] == "new"
    for body in ({"user": "x", "tenant": "team-b"}, {"user": "x", "role": "operator"}):
        problem(await api("admin-a").post("/v1/tokens", json=body), 403, "forbidden")
    listed = (await api("admin-a").get("/v1/tokens")).json()["tokens"]
    assert {token["tenant"] for token in listed} == {"team-a"}
    assert made.json()["token"] not in str(listed)
    assert problem(await api("operator").post("/v1/tokens", json={"user": "x"}), 422, "missing_field").field == "tenant"
    assert problem(
        await api("operator").post("/v1/tokens", json={"user": "x", "role": "king"}), 422, "not_a_name"
    ).field


async def test_parked_messages_are_gathered_from_the_services(api: Caller) -> None:
    view = {
        "id": 1,
        "entity": "j1",
        "event_id": "e",
        "subject": "s",
        "reason": "broken",
        "parked_at": "2026-03-02T08:00:00Z",
        "status": "parked",
    }
    asked: list[Any] = []

    def parked(question: Any) -> Any:
        asked.append(question)
        return [view] if question["do"] == "list" else view if question["do"] == "show" else {"replaying": 1}

    api.world.bus.answers["berth.req.default.placement.parked"] = parked
    listed = (await api("operator").get("/v1/parked")).json()
    assert [(p["service"], p["id"]) for p in listed["parked"]] == [("placement", 1)]
    assert "lifecycle" in listed["unreachable"]
    assert (await api("operator").get("/v1/parked/placement/1")).json()["reason"] == "broken"
    body = {"payload": "{}", "note": "mended"}
    assert (await api("operator").post("/v1/parked/placement/1/replay", json=body)).status_code == 202
    assert asked[-1] == {"do": "replay", "id": 1, "payload": "{}", "note": "operator-1: mended"}
    problem(await api("operator").get("/v1/parked/kitchen/1"), 422, "literal_error")


async def test_spans_are_stored_and_shown_with_their_batches(api: Caller) -> None:
    job = await api.submit()
    trace_id = api.world.store.jobs[job].trace_id
    other = "f" * 32
    import orjson

    def span(trace: str, span_id: str, links: list[dict[str, Any]]) -> bytes:
        return orjson.dumps(
            {
                "trace_id": trace,
                "span_id": span_id,
                "parent_id": "",
                "name": "x",
                "service": "placement",
                "started_ns": 1,
                "ended_ns": 2,
                "links": links,
            }
        )

    link = {"trace_id": other, "span_id": "b1", "attributes": {}}
    foreign = {"trace_id": "e" * 32, "span_id": "c1", "attributes": {}}
    back = {"trace_id": trace_id, "span_id": "a1", "attributes": {}}
    await api.world.store.add_spans(
        [(trace_id, "a1", span(trace_id, "a1", [link])), (other, "b1", span(other, "b1", [back, foreign]))]
    )
    shown = (await api().get(f"/v1/jobs/{job}/trace")).json()
    assert [s["span_id"] for s in shown["spans"]] == ["a1", "b1"]
    assert shown["spans"][1]["links"] == [back]
    for token, content, status in (("internal", b"\xff\xff", 400), ("internal", b"", 200)):
        headers = {"Content-Type": "application/x-protobuf"}
        assert (await api(token).post("/v1/traces", content=content, headers=headers)).status_code == status
    problem(await api("internal").get("/v1/events"), 403, "forbidden")


# --------------------------------------------------------------------------------------------------------------- events
async def test_events_are_the_tenants_own(api: Caller) -> None:
    api.world.source.add("berth.job.submitted.v1", tenant="team-a", subject="j1")
    api.world.source.add("berth.job.submitted.v1", tenant="team-b", subject="j2")
    api.world.source.add("berth.node.changed.v1", tenant="", subject="n1")
    assert [e["subject"] for e in (await api().get("/v1/events")).json()["events"]] == ["j1"]
    everything = (await api("operator").get("/v1/events")).json()
    assert ([e["subject"] for e in everything["events"]], everything["next"]) == (["j1", "j2", "n1"], 3)
    found = (await api("operator").get("/v1/events", params={"subject": "j2", "after": 1})).json()["events"]
    assert [e["sequence"] for e in found] == [2]
    assert problem(await api().get("/v1/events", headers={"Last-Event-ID": "x"}), 422, "invalid_value").field


# ---------------------------------------------------------------------------------------------------------- description
async def test_the_description_is_complete(api: Caller) -> None:
    document = (await api(None).get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    operations = {
        f"{method} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert {"post /v1/jobs", "get /v1/jobs", "get /v1/events", "put /v1/policy"} <= set(operations)
    for name, operation in operations.items():
        assert operation["summary"], name
        assert "401" in operation["responses"], name
        for status, answer in operation["responses"].items():
            if int(status) >= 400:
                assert list(answer["content"]) == ["application/problem+json"], (name, status)
    text = str(document)
    for schema in document["components"]["schemas"]:
        assert schema != "HTTPValidationError"
    for reference in {part.split("'")[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in document["components"]["schemas"], reference


async def test_what_is_not_there_is_a_problem_too(api: Caller) -> None:
    problem(await api().get("/nowhere"), 404, "not_found")
    answer = await api().patch("/v1/jobs")
    problem(answer, 405, "method_not_allowed")
    assert answer.headers["allow"] == "GET, POST"
    assert len(describe(api.app)["paths"]) > 15


async def test_nul_characters_never_get_far(api: Caller) -> None:
    for path in ("/v1/jobs/a%00b", "/v1/jobs?name=%00", "/v1/jobs?tenant=a%00"):
        problem(await api("operator").get(path), 400, "invalid")
    job = await api.submit()
    problem(await api().post(f"/v1/jobs/{job}/cancel", json={"why": "a\x00"}), 422, "invalid_value")


@pytest.mark.parametrize(
    ("text", "field", "code"),
    [
        ("document: {a: .nan}", "document.a", "not_finite"),
        ("document: {a: [1, 99999999999999999999999]}", "document.a[1]", "too_large"),
        ('document: {a: "\\0"}', "document.a", "invalid_value"),
        ("document: []", "document", "not_a_mapping"),
        ("documents: {}", "document", "missing_field"),
    ],
)
async def test_a_policy_that_could_not_be_sent_on_is_refused(api: Caller, text: str, field: str, code: str) -> None:
    headers = {"Content-Type": "application/yaml"}
    answer = await api("operator").put("/v1/policy", content=text.encode(), headers=headers)
    assert problem(answer, 422, code).field == field
    assert api.world.store.told == []


async def test_requests_are_measured_by_route(api: Caller) -> None:
    job = await api.submit()
    await api().get(f"/v1/jobs/{job}")
    labels = set(api.world.deps.metrics.requests._metrics)
    assert ("POST /v1/jobs", "201") in labels
    assert ("GET /v1/jobs/{job}", "200") in labels
    assert not any(job in str(label) for label in labels)


async def test_a_caller_that_goes_away_does_not_stop_the_others(api: Caller) -> None:
    task = asyncio.create_task(api().post("/v1/jobs", json=JOB))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await api.submit()
