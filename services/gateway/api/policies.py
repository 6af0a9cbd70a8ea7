"""The policy: show, check, compare, propose, approve; and a tenant's quota, which is a policy version of its own."""

from __future__ import annotations

import asyncio
import copy
import time
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from berth.bus.errors import RequestFailed
from berth.contracts import subjects
from berth.contracts.api import (
    HeldProposalList,
    HeldProposalView,
    PolicyChangeView,
    PolicyDecision,
    PolicyDiffRequest,
    PolicyDiffView,
    PolicyHistoryView,
    PolicyProposal,
    PolicyVersionView,
    QuotaChange,
)
from berth.contracts.envelope import Fact
from berth.contracts.events import PolicyApproved, PolicyProposed, PolicyWithdrawn
from berth.contracts.requests import PolicyCheckAnswer, PolicyCheckQuestion, PolicyEffects, PolicyEffectsQuestion
from berth.decisions.policy.approval import needs_approval
from berth.decisions.policy.check import read
from berth.decisions.policy.diff import Change, changes, in_short
from berth.decisions.policy.schema import policy_schema
from services.gateway.api.deps import Deps, body_of, json_answer, unavailable
from services.gateway.api.jobs import Caller, Parts, read_model
from services.gateway.intake import Tell
from services.gateway.principals import Principal
from services.gateway.problems import ApiError, Fault, invalid, problem_schema_responses, refused
from services.gateway.store.queries import Activated, HeldProposal
from services.gateway.submissions import read_body

router = APIRouter(tags=["policy"])

WAIT_STEP_SECONDS: Final = 0.05
EFFECTS_SECONDS: Final = 30.0
"""A trial of a large pool takes seconds."""
QUOTA_TRIES: Final = 5
"""How often a quota is set anew because another version came into force meanwhile."""


class PolicyView(BaseModel):
    """The policy in force."""

    version: int
    document: dict[str, Any]
    author: str
    approver: str = ""
    why: str
    activated_at: str


class PolicyAnswer(BaseModel):
    """What became of a proposal. state: activated; held until a second operator approves it; or proposed, where the
    answer is not in yet."""

    proposal_id: str
    state: Literal["activated", "held", "proposed"]
    version: int | None = None


# ---------------------------------------------------------------------------------------------------------------- show
@router.get(
    "/v1/policy",
    summary="The policy in force, or an earlier version",
    responses={200: {"model": PolicyView}, **problem_schema_responses((401, 403, 404, 422, 503))},
)
async def show_policy(
    deps: Parts, who: Caller, version: Annotated[int | None, Query(ge=1, le=2**62)] = None
) -> Response:
    if not who.sees_all:
        await deps.deny(who, "read_policy", "policy", remedy="see berth quota for what is yours")
    found = await _version(deps, version)
    return json_answer(
        {
            "version": found.version,
            "document": found.document,
            "author": found.author,
            "approver": found.approver,
            "why": found.why,
            "activated_at": found.activated_at.isoformat(),
        }
    )


async def _version(deps: Deps, version: int | None) -> Activated:
    found = await deps.reads.policy(version)
    if found is None:
        what = "no policy yet" if version is None else f"no policy version {version}"
        remedy = "berth policy apply FILE" if version is None else "see berth policy history"
        raise refused("not_found", what, remedy=remedy, field="version", value=version)
    return found


@router.get(
    "/v1/policy/schema",
    summary="JSON Schema of the policy document",
    responses={200: {"description": "JSON Schema, draft 2020-12"}, **problem_schema_responses((401,))},
)
async def show_schema(who: Caller) -> Response:
    return json_answer(policy_schema())


@router.get(
    "/v1/policy/history",
    summary="Versions: when, by whom, why, and what changed in short",
    responses={200: {"model": PolicyHistoryView}, **problem_schema_responses((401, 403, 422, 503))},
)
async def show_history(
    deps: Parts,
    who: Caller,
    before: Annotated[int | None, Query(ge=1, le=2**62, description="only older ones")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
) -> Response:
    if not who.sees_all:
        await deps.deny(who, "read_policy", "policy", remedy="ask an operator of the pool")
    found = await deps.reads.policy_versions(before, limit + 1)
    views = []
    for place, activated in enumerate(found[:limit]):
        older = found[place + 1].document if place + 1 < len(found) else {}
        changed = _changes(older, activated.document)
        views.append(
            PolicyVersionView(
                version=activated.version,
                activated_at=activated.activated_at,
                author=activated.author,
                approver=activated.approver,
                why=activated.why,
                changed=in_short(changed) if place + 1 < len(found) else "the first policy",
                changes=len(changed),
            )
        )
    return json_answer(PolicyHistoryView(versions=tuple(views), next=views[-1].version if len(found) > limit else None))


def _changes(old: dict[str, Any], new: dict[str, Any]) -> list[Change]:
    """Differences; none where this program cannot read one of the two (a newer one wrote it)."""
    if read(old)[0] is None or read(new)[0] is None:
        return []
    return changes(old, new)


# ----------------------------------------------------------------------------------------------------- check, compare
def _body(model: str) -> dict[str, Any]:
    return {
        "requestBody": {
            "required": True,
            "content": {
                media: {"schema": {"$ref": f"#/components/schemas/{model}"}}
                for media in ("application/json", "application/yaml")
            },
        }
    }


@router.post(
    "/v1/policy/check",
    summary="Is a policy document right? Changes nothing",
    responses={200: {"model": PolicyCheckAnswer}, **problem_schema_responses((400, 401, 403, 413, 415, 422, 503))},
    openapi_extra=_body("PolicyProposal"),
)
async def check_policy(request: Request, deps: Parts, who: Caller) -> Response:
    await deps.require_operator(who, "check_policy", "policy")
    asked: PolicyProposal = await _read(request, deps, PolicyProposal)
    return json_answer(await _check(deps, asked.document))


async def _check(deps: Deps, document: dict[str, Any]) -> PolicyCheckAnswer:
    return await deps.ask("admission", "check_policy", PolicyCheckQuestion(document=document), PolicyCheckAnswer)


@router.post(
    "/v1/policy/diff",
    summary="What a document or a version changes, and what would follow at once; changes nothing",
    responses={200: {"model": PolicyDiffView}, **problem_schema_responses((400, 401, 403, 404, 413, 415, 422, 503))},
    openapi_extra=_body("PolicyDiffRequest"),
)
async def diff_policy(request: Request, deps: Parts, who: Caller) -> Response:
    await deps.require_operator(who, "compare_policy", "policy")
    asked: PolicyDiffRequest = await _read(request, deps, PolicyDiffRequest)
    if (asked.document is None) == (asked.version is None):
        fault = Fault("invalid", ("document",), "give either a document or a version", "leave one of them out")
        raise invalid([fault])
    base = await _version(deps, asked.base)
    document = asked.document if asked.document is not None else (await _version(deps, asked.version)).document
    return json_answer(await _diff(deps, base, document, asked))


async def _diff(deps: Deps, base: Activated, document: dict[str, Any], asked: PolicyDiffRequest) -> PolicyDiffView:
    current = await _version(deps, None)
    checked = await _check(deps, document)
    effects = None
    if checked.is_valid and base.version == current.version:
        effects = await _effects(deps, document)
    policies = read(base.document)[0], read(document)[0]
    return PolicyDiffView(
        from_version=base.version,
        to_version=asked.version,
        changes=_views(_changes(base.document, document)),
        problems=checked.problems,
        warnings=checked.warnings,
        needs_approval=policies[0] is not None and policies[1] is not None and needs_approval(policies[0], policies[1]),
        effects=effects,
    )


def _views(found: list[Change]) -> tuple[PolicyChangeView, ...]:
    return tuple(PolicyChangeView.model_validate(change.to_json()) for change in found)


async def _effects(deps: Deps, document: dict[str, Any]) -> PolicyEffects:
    question = PolicyEffectsQuestion(document=document)
    subject = subjects.request(deps.pool, "placement", "policy_effects")
    try:
        answer = await deps.ask_raw(subject, question.model_dump_json().encode(), "placement", timeout=EFFECTS_SECONDS)
    except RequestFailed as error:
        raise unavailable("placement", str(error)) from error
    return PolicyEffects.model_validate_json(answer)


async def _read(request: Request, deps: Deps, model: type[Any]) -> Any:
    value, document = read_body(await body_of(request, deps.max_body_bytes), request.headers.get("content-type", ""))
    if not isinstance(value, dict):
        raise invalid([Fault("not_a_mapping", (), "the body is a mapping", "write name: value pairs")], document)
    return read_model(model, value)


# ------------------------------------------------------------------------------------------------------------- propose
_PROPOSED: Final[dict[int | str, dict[str, Any]]] = {
    200: {"model": PolicyAnswer, "description": "In force"},
    202: {"model": PolicyAnswer, "description": "Held for a second operator, or the answer is not in yet"},
}


@router.put(
    "/v1/policy",
    summary="Propose a policy; the answer waits for its activation",
    responses={**_PROPOSED, **problem_schema_responses((400, 401, 403, 413, 415, 422, 503))},
    openapi_extra=_body("PolicyProposal"),
)
async def propose_policy(request: Request, deps: Parts, who: Caller) -> Response:
    await deps.require_operator(who, "change_policy", "policy")
    asked: PolicyProposal = await _read(request, deps, PolicyProposal)
    proposal_id = deps.ids()
    proposed = PolicyProposed(
        proposal_id=proposal_id, document=asked.document, author=who.user, why=asked.why, based_on=asked.based_on
    )
    return await _told(deps, who, proposed, proposal_id)


async def _told(deps: Deps, who: Principal, fact: Fact, proposal_id: str, *, was_held: bool = False) -> Response:
    """Tell it, and wait for what admission makes of the proposal."""
    await deps.changes.tell(Tell(fact, proposal_id, who.user))
    answer = await _outcome(deps, proposal_id, was_held=was_held)
    if answer is None:
        return json_answer({"proposal_id": proposal_id, "state": "proposed", "version": None}, status=202)
    if answer == "held":
        return json_answer({"proposal_id": proposal_id, "state": "held", "version": None}, status=202)
    version, problems = answer
    if version is None:
        raise rejected(problems)
    await deps.catalogue.refresh()
    return json_answer({"proposal_id": proposal_id, "state": "activated", "version": version})


Outcome = tuple[int | None, list[dict[str, str]]] | Literal["held"] | None


async def _outcome(deps: Deps, proposal_id: str, *, was_held: bool = False) -> Outcome:
    """Version, problems, or held; None where it is not known in time."""
    deadline = time.monotonic() + deps.policy_wait_seconds
    while True:
        answer = await deps.reads.proposal(proposal_id)
        if answer is not None:
            return answer
        if not was_held and await deps.reads.held_proposals(proposal_id):
            return "held"
        if time.monotonic() >= deadline:
            return None
        await asyncio.sleep(WAIT_STEP_SECONDS)


def rejected(problems: list[dict[str, str]]) -> ApiError:
    """Every fault of a document, the first in front."""
    listed = [
        {
            "code": "policy_rejected",
            "field": problem.get("path"),
            "detail": problem.get("fault", ""),
            "remedy": problem.get("remedy", ""),
        }
        for problem in problems
    ]
    first = listed[0] if listed else {"field": None, "detail": "it was rejected", "remedy": ""}
    more = f" (and {len(listed) - 1} more)" if len(listed) > 1 else ""
    return refused(
        "policy_rejected",
        f"{first['field']}: {first['detail']}{more}" if first["field"] else f"{first['detail']}{more}",
        remedy=first["remedy"] or "mend the document; berth policy check FILE lists every fault",
        field=first["field"],
        errors=listed,
    )


# ------------------------------------------------------------------------------------------------------------- approve
@router.get(
    "/v1/policy/proposals",
    summary="Proposals that wait for a second operator",
    responses={200: {"model": HeldProposalList}, **problem_schema_responses((401, 403, 503))},
)
async def list_proposals(deps: Parts, who: Caller) -> Response:
    await deps.require_operator(who, "read_proposals", "policy")
    found = await deps.reads.held_proposals()
    current = await deps.reads.policy() if found else None
    views = [_held_view(held, current) for held in found]
    return json_answer(HeldProposalList(proposals=tuple(views)))


def _held_view(held: HeldProposal, current: Activated | None) -> HeldProposalView:
    return HeldProposalView(
        proposal_id=held.proposal_id,
        author=held.author,
        why=held.why,
        proposed_at=held.proposed_at,
        based_on=held.based_on,
        required_for=held.required_for,
        changes=_views(_changes(current.document if current else {}, held.document)),
    )


_PROPOSAL_ID = Annotated[str, Path(pattern=r"^[A-Za-z0-9_-]{1,128}$")]


@router.post(
    "/v1/policy/proposals/{proposal_id}/approve",
    summary="Approve a held proposal of another operator; the answer waits for its activation",
    responses={**_PROPOSED, **problem_schema_responses((400, 401, 403, 404, 409, 413, 415, 422, 503))},
    openapi_extra=_body("PolicyDecision"),
)
async def approve_proposal(proposal_id: _PROPOSAL_ID, request: Request, deps: Parts, who: Caller) -> Response:
    await deps.require_operator(who, "approve_policy", proposal_id)
    asked: PolicyDecision = await _read(request, deps, PolicyDecision)
    held = await _held(deps, proposal_id)
    if held.author == who.user:
        await deps.deny(who, "approve_policy", proposal_id, remedy="another operator has to approve what you proposed")
    approved = PolicyApproved(proposal_id=proposal_id, approver=who.user, why=asked.why)
    return await _told(deps, who, approved, proposal_id, was_held=True)


@router.post(
    "/v1/policy/proposals/{proposal_id}/withdraw",
    summary="Turn a held proposal down",
    status_code=202,
    responses={
        202: {"description": "It is turned down"},
        **problem_schema_responses((400, 401, 403, 404, 413, 415, 422, 503)),
    },
    openapi_extra=_body("PolicyDecision"),
)
async def withdraw_proposal(proposal_id: _PROPOSAL_ID, request: Request, deps: Parts, who: Caller) -> Response:
    await deps.require_operator(who, "withdraw_policy", proposal_id)
    asked: PolicyDecision = await _read(request, deps, PolicyDecision)
    await _held(deps, proposal_id)
    withdrawn = PolicyWithdrawn(proposal_id=proposal_id, withdrawn_by=who.user, why=asked.why)
    await deps.changes.tell(Tell(withdrawn, proposal_id, who.user))
    await _outcome(deps, proposal_id, was_held=True)
    return json_answer({"proposal_id": proposal_id, "state": "withdrawn"}, status=202)


async def _held(deps: Deps, proposal_id: str) -> HeldProposal:
    found = await deps.reads.held_proposals(proposal_id)
    if not found:
        raise refused(
            "not_found", f"no proposal {proposal_id} waits", remedy="see berth policy proposals", field="proposal_id"
        )
    return found[0]


# --------------------------------------------------------------------------------------------------------------- quota
@router.patch(
    "/v1/tenants/{tenant}/quota",
    summary="Set a tenant's quota: a policy version of its own",
    responses={**_PROPOSED, **problem_schema_responses((400, 401, 403, 404, 409, 413, 415, 422, 503))},
    openapi_extra=_body("QuotaChange"),
)
async def set_quota(
    tenant: Annotated[str, Path(max_length=256)], request: Request, deps: Parts, who: Caller
) -> Response:
    await deps.require_operator(who, "change_quota", tenant)
    asked: QuotaChange = await _read(request, deps, QuotaChange)
    for _ in range(QUOTA_TRIES):
        current = await _version(deps, None)
        document = with_quota(current.document, tenant, asked.quota)
        if read(document)[0] == read(current.document)[0]:
            return json_answer({"proposal_id": "", "state": "activated", "version": current.version})
        proposal_id = deps.ids()
        proposed = PolicyProposed(
            proposal_id=proposal_id,
            document=document,
            author=who.user,
            why=asked.why or f"quota of {tenant}",
            based_on=current.version,
        )
        try:
            return await _told(deps, who, proposed, proposal_id)
        except ApiError as error:
            is_overtaken = error.problem.field == "(document)"
            if not is_overtaken:
                raise
            await asyncio.sleep(WAIT_STEP_SECONDS)
    raise refused("stale", "other versions keep coming into force", remedy="try again in a moment")


def with_quota(document: dict[str, Any], tenant: str, quota: dict[str, float | None]) -> dict[str, Any]:
    """The document with some of a tenant's quotas set anew.

    Raises:
        ApiError: 404, the policy has no such tenant.
    """
    made = copy.deepcopy(document)
    tenants = made.get("tenants", {})
    if tenant not in tenants:
        known = ", ".join(sorted(tenants)) or "none"
        raise refused(
            "not_found", f"no tenant {tenant}", remedy=f"the policy has {known}", field="tenant", value=tenant
        )
    settings = tenants[tenant] = tenants[tenant] or {}
    owned = settings.setdefault("quota", {})
    for card_type, amount in quota.items():
        if amount is None:
            owned.pop(card_type, None)
        else:
            owned[card_type] = int(amount) if amount == int(amount) else amount
    return made
