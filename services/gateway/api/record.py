"""The record for replay, in pages: events from audit, and from each deciding service its commit log and checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Query
from pydantic import AwareDatetime, BaseModel
from starlette.responses import Response

from berth.bus.errors import RequestFailed
from berth.contracts import subjects
from berth.contracts.requests import CheckpointQuestion, CommitsQuestion, RecordPageQuestion
from services.gateway.api.deps import Deps, unavailable
from services.gateway.api.jobs import Caller, Parts
from services.gateway.principals import Principal
from services.gateway.problems import problem_schema_responses, refused

router = APIRouter(tags=["administration"])

ANSWER_SECONDS: Final = 15.0
NUMBER: Final = 2**62

DecidingService = Literal["admission", "placement", "lifecycle"]


class RecordedEventView(BaseModel):
    """An event as audit keeps it. payload: the bytes that travelled, as text."""

    seq: int
    recorded_at: str
    type: str
    payload: str


class RecordedEvents(BaseModel):
    """Events in stream order; `last_seq`: where the record ends by now."""

    events: tuple[RecordedEventView, ...]
    last_seq: int


class CommitView(BaseModel):
    """One batch of a deciding service. note: what its stream range does not tell."""

    id: int
    first_seq: int
    last_seq: int
    timers: int
    emitted: int
    clock: str
    decisions_version: str
    policy_version: str
    digest: str
    note: dict[str, Any] | None


class CheckpointView(BaseModel):
    """Where a replay can begin, and how far the commit log goes, up to the instant asked for."""

    commit_id: int
    taken_at: str
    stream_seq: int
    last_commit_id: int
    last_seq: int


class CheckpointRecord(BaseModel):
    """One record of a checkpoint, its body as JSON text."""

    kind: str
    key: str
    body: str


@router.get(
    "/v1/record/events",
    summary="Recorded events in stream order, a page at a time",
    responses={200: {"model": RecordedEvents}, **problem_schema_responses((401, 403, 422, 503))},
)
async def record_events(
    deps: Parts, who: Caller, after: Annotated[int, Query(ge=0, le=NUMBER, description="behind this sequence")] = 0
) -> Response:
    return await _page(deps, who, "audit", "page", RecordPageQuestion(after=after))


@router.get(
    "/v1/record/{service}/commits",
    summary="Commit log of a deciding service, a page at a time",
    responses={200: {"model": list[CommitView]}, **problem_schema_responses((401, 403, 422, 503))},
)
async def record_commits(
    service: Annotated[DecidingService, Path()],
    deps: Parts,
    who: Caller,
    after: Annotated[int, Query(ge=0, le=NUMBER, description="behind this number")] = 0,
) -> Response:
    return await _page(deps, who, service, "commits", CommitsQuestion(after=after))


@router.get(
    "/v1/record/{service}/checkpoint",
    summary="Where a replay of a deciding service can begin",
    responses={200: {"model": CheckpointView}, **problem_schema_responses((401, 403, 404, 422, 503))},
)
async def record_checkpoint(
    service: Annotated[DecidingService, Path()],
    deps: Parts,
    who: Caller,
    since: Annotated[AwareDatetime | None, Query(description="cover all from this instant; as early as can be")] = None,
    until: Annotated[AwareDatetime | None, Query(description="only commits up to it are of interest")] = None,
) -> Response:
    return await _page(deps, who, service, "checkpoint", CheckpointQuestion(since=since, until=until))


@router.get(
    "/v1/record/{service}/checkpoint/{commit_id}",
    summary="Records of a checkpoint, a page at a time",
    responses={200: {"model": list[CheckpointRecord]}, **problem_schema_responses((401, 403, 422, 503))},
)
async def record_checkpoint_records(
    service: Annotated[DecidingService, Path()],
    commit_id: Annotated[int, Path(ge=0, le=NUMBER)],
    deps: Parts,
    who: Caller,
    kind: Annotated[str, Query(max_length=200, description="behind this kind and key")] = "",
    key: Annotated[str, Query(max_length=200)] = "",
) -> Response:
    return await _page(deps, who, service, "checkpoint", CheckpointQuestion(commit_id=commit_id, kind=kind, key=key))


async def _page(deps: Deps, who: Principal, service: str, verb: str, question: BaseModel) -> Response:
    """The answer of a service, as it is: it is JSON of the shape that is described."""
    await deps.require_operator(who, "read_record", service)
    subject = subjects.request(deps.pool, service, verb)
    try:
        answer = await deps.ask_raw(subject, question.model_dump_json().encode(), service, timeout=ANSWER_SECONDS)
    except RequestFailed as error:
        if error.code == "not_found":
            raise refused("not_found", f"{service}: {error}", remedy="try again when it has started") from None
        raise unavailable(service, str(error)) from error
    return Response(answer, media_type="application/json")
