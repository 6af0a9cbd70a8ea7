"""Receipts of what was decided about a job: on which policy and state, what was looked at, with a digest."""

from __future__ import annotations

from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

from berth.contracts import subjects
from berth.contracts.events import (
    JobAdmitted,
    JobHeld,
    JobPlaced,
    JobRefused,
    JobStopping,
    JobWaiting,
    PreemptionPlanned,
    ServiceAdmitted,
)
from berth.contracts.reasons import Code
from berth.contracts.requests import RecordQuestion
from services.gateway.api.deps import Deps, json_answer
from services.gateway.api.jobs import Caller, Parts
from services.gateway.principals import Principal
from services.gateway.problems import problem_schema_responses
from services.gateway.visibility import jobs_named_in, reason_for

router = APIRouter(tags=["jobs"])

PAGE: Final = 500
PAGES: Final = 20
ANSWER_SECONDS: Final = 5.0

_DECISIONS: Final[dict[str, str]] = {
    fact.TYPE: decision
    for fact, decision in (
        (JobAdmitted, "admit"),
        (ServiceAdmitted, "admit"),
        (JobRefused, "refuse"),
        (JobHeld, "hold"),
        (JobPlaced, "place"),
        (JobWaiting, "defer"),
        (JobStopping, "stop"),
        (PreemptionPlanned, "preempt"),
    )
}
_STOPS: Final[dict[str, str]] = {
    Code.IDLE: "reclaim",
    Code.LIFETIME: "reclaim",
    Code.RECLAIM: "reclaim",
    Code.PREEMPTED: "preempt",
    Code.QUOTA_CUT: "preempt",
}


class ReceiptView(BaseModel):
    """One decision. decision: admit, refuse, hold, place, defer, preempt, reclaim, shrink or stop."""

    decision: str
    event_id: str
    service: str
    decided_at: str
    attempt: int | None = None
    policy_version: int
    state_version: int
    decisions_version: str
    candidates: tuple[dict[str, Any], ...] = ()
    filtered: dict[str, int] = {}
    reasons: tuple[dict[str, Any], ...] = ()
    digest: str


class ReceiptList(BaseModel):
    """Decisions about a job, the last one first."""

    job_id: str
    receipts: tuple[ReceiptView, ...]


@router.get(
    "/v1/jobs/{job}/receipts",
    summary="Receipts of what was decided about a job, the last one first",
    description="Members see reasons without names of others, and no candidates that are jobs.",
    responses={200: {"model": ReceiptList}, **problem_schema_responses((401, 404, 409, 422, 503))},
)
async def receipts(
    job: str, deps: Parts, who: Caller, limit: Annotated[int, Query(ge=1, le=200, description="at most")] = 20
) -> Response:
    found = await deps.job(who, job, "read_receipts")
    events = await _decisions(deps, found.job_id)
    for event in list(events):
        plan = ((event["data"].get("cause") or {}).get("facts") or {}).get("plan")
        if isinstance(plan, str):
            events += await _decisions(deps, plan)
    events.sort(key=lambda event: event["number"], reverse=True)
    views = [view for event in events if (view := _view(event)) is not None][:limit]
    if not who.sees_all:
        views = await _hide(deps, who, views)
    return json_answer({"job_id": found.job_id, "receipts": views})


async def _decisions(deps: Deps, entity: str) -> list[dict[str, Any]]:
    """Recorded events of an entity that tell a decision, with their number in the record."""
    found: list[dict[str, Any]] = []
    after = 0
    subject = subjects.request(deps.pool, "audit", "events")
    for _ in range(PAGES):
        question = RecordQuestion(entity=entity, after=after, limit=PAGE).model_dump_json().encode()
        page = orjson.loads(await deps.ask_raw(subject, question, "audit", timeout=ANSWER_SECONDS))
        for row in page:
            if row["type"] in _DECISIONS:
                found.append({**orjson.loads(row["payload"]), "number": row["number"]})
        if len(page) < PAGE:
            break
        after = page[-1]["number"]
    return found


def _view(event: dict[str, Any]) -> dict[str, Any] | None:
    data = event["data"]
    receipt = data.get("receipt") or {}
    if not receipt.get("digest"):
        return None
    cause = data.get("cause")
    reasons = list(data.get("reasons") or ()) + list(receipt.get("reasons") or ()) + ([cause] if cause else [])
    return {
        "decision": _decision(event["type"], data),
        "event_id": event["id"],
        "service": event["source"].rpartition("/")[2],
        "decided_at": event["time"],
        "attempt": data.get("attempt"),
        "policy_version": receipt.get("policy_version", 0),
        "state_version": receipt.get("state_version", 0),
        "decisions_version": receipt.get("decisions_version", ""),
        "candidates": receipt.get("candidates") or [],
        "filtered": receipt.get("filtered") or {},
        "reasons": reasons,
        "digest": receipt["digest"],
    }


def _decision(type_: str, data: dict[str, Any]) -> str:
    if type_ == PreemptionPlanned.TYPE:
        victims = data.get("victims") or ()
        if victims and all(victim.get("workers") is not None for victim in victims):
            return "shrink"
        return "reclaim" if data.get("rule") == "reclaim" else "preempt"
    if type_ != JobStopping.TYPE:
        return _DECISIONS[type_]
    if data.get("workers") is not None:
        return "shrink"
    return _STOPS.get(str((data.get("cause") or {}).get("code")), "stop")


async def _hide(deps: Deps, who: Principal, views: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tenant = who.tenant or ""
    owners = await deps.owners_of(jobs_named_in([view["reasons"] for view in views]))
    own = {job_id for job_id, owner in owners.items() if owner == tenant}
    return [
        {
            **view,
            "reasons": [reason_for(reason, own_jobs=own, tenant=tenant) for reason in view["reasons"]],
            "candidates": [candidate for candidate in view["candidates"] if "job_id" not in candidate],
        }
        for view in views
    ]
