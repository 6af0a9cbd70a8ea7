"""Jobs: submit, list, show, why, cancel, logs, trace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Depends, Query, Request
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from berth.bus.errors import NoResponders, RequestFailed
from berth.client import texts
from berth.contracts import subjects
from berth.contracts.api import CancelRequest, JobList, JobView, Submitted, SubmittedBatch, WhyView
from berth.contracts.base import TOKEN, JobClass
from berth.contracts.jobs import JobSpec, JobState
from berth.contracts.requests import ExplainJob, JobExplained, LogAnswer, LogQuestion
from berth.store.errors import TransientError
from berth.telemetry.traceparent import thinned
from berth.telemetry.tracing import RootSpan, start_root_span
from services.gateway.api.deps import (
    SERVICE,
    Deps,
    body_of,
    deps_of,
    json_answer,
    unavailable,
)
from services.gateway.intake import Accepted, Cancel, KeyConflict, NewJob, Submission
from services.gateway.principals import Principal
from services.gateway.problems import ApiError, Fault, faults_of, invalid, problem_schema_responses, refused
from services.gateway.rendering import job_view, seen_by
from services.gateway.store.queries import JobFilter, StoredJob
from services.gateway.submissions import (
    Asked,
    check_jobs,
    digest_of,
    read_body,
    read_submission,
    sound_faults,
    split_secrets,
)
from services.gateway.visibility import jobs_named_in, reason_for

router = APIRouter(tags=["jobs"])

MAX_PAGE: Final = 1000
MAX_KEY_CHARS: Final = 200
LOG_CHUNK_BYTES: Final = 262_144
LOG_CHUNKS: Final = 64  # of one answer; it is held in memory
LOG_POLL_SECONDS: Final = 0.25
LOG_SECONDS: Final = 3.0


async def caller(request: Request) -> Principal:
    """Whose request it is."""
    return await deps_of(request).caller(request)


Caller = Annotated[Principal, Depends(caller)]
Parts = Annotated[Deps, Depends(deps_of)]


# --------------------------------------------------------------------------------------------------------- submitting
async def submit(request: Request) -> Response:
    """`POST /v1/jobs`; a plain Starlette route, because this is the busiest one and dependencies cost 0.1 ms each."""
    deps = deps_of(request)
    span = start_root_span(SERVICE, "submit", traceparent=request.headers.get("traceparent"))
    try:
        response = await _submit(request, deps, span)
    except ApiError as error:
        deps.metrics.refused.labels(error.problem.code).inc()
        span.failed(error.problem.code)
        raise
    finally:
        span.end()
    return response


async def _submit(request: Request, deps: Deps, span: RootSpan) -> Response:
    who = await deps.caller(request)
    key = _key(request.headers.get("idempotency-key"))
    body = await body_of(request, deps.max_body_bytes)
    content_type = request.headers.get("content-type", "")
    if len(body) > 65536:  # long texts take long to read: elsewhere, so that others are answered meanwhile
        asked = await asyncio.to_thread(read_submission, body, content_type, max_batch=deps.max_batch)
        specs = await asyncio.to_thread(check_jobs, asked, tenant=who.tenant)
    else:
        asked = read_submission(body, content_type, max_batch=deps.max_batch)
        specs = check_jobs(asked, tenant=who.tenant)
    for spec in specs:
        if not who.may_change(spec.tenant):
            await deps.deny(who, "submit_job", spec.tenant, remedy=_whose(who))
    submission = _submission(deps, who, specs, key, span)
    faults = await deps.catalogue.faults(specs)
    if faults:
        # A repeat of what was taken in before stays what it was, whatever the policy says by now.
        raise invalid([fault.below(asked.path(place)) for place, fault in faults], asked.document)
    try:
        accepted = await deps.changes.submit(submission)
    except KeyConflict:
        raise refused(
            "idempotency_conflict",
            "this key was used for other content",
            remedy="use a new key for a new submission, or send the first content again",
            field="Idempotency-Key",
            value=key,
        ) from None
    if not accepted.is_repeat:
        for spec in specs:
            deps.metrics.job(spec.tenant, spec.job_class.value)
    if accepted.jobs:
        span.set("berth.job_id", accepted.jobs[0][0])
        span.set("berth.jobs", len(accepted.jobs))
    return _answer(accepted, asked)


def _submission(deps: Deps, who: Principal, specs: list[JobSpec], key: str, span: RootSpan) -> Submission:
    jobs = []
    for spec, trace in zip(specs, thinned(span.traceparent, len(specs)), strict=True):
        public, secrets = split_secrets(spec)
        jobs.append(NewJob(deps.ids(), public, secrets, trace or span.traceparent))
    return Submission(
        jobs,
        who.user,
        datetime.now(UTC),
        scope=who.scope,
        key=key,
        digest=digest_of(specs, salt=f"{who.scope}\n{key}") if key else b"",
        key_seconds=deps.catalogue.view.key_seconds,
    )


def _answer(accepted: Accepted, asked: Asked) -> Response:
    status = 200 if accepted.is_repeat else 201
    jobs = [
        {"job_id": job_id, "name": name, "state": state, "is_repeat": accepted.is_repeat}
        for job_id, name, state in accepted.jobs
    ]
    if asked.is_batch:
        return json_answer({"jobs": jobs}, status=status)
    return json_answer(jobs[0], status=status, headers={"Location": f"/v1/jobs/{jobs[0]['job_id']}"})


def _key(header: str | None) -> str:
    if header is None:
        return ""
    key = header.strip().strip('"')
    if not key or len(key) > MAX_KEY_CHARS or not key.isprintable():
        fault = f"must be 1 to {MAX_KEY_CHARS} visible characters"
        raise invalid([Fault("invalid_value", ("Idempotency-Key",), fault, "use for example a UUID")])
    return key


def _whose(who: Principal) -> str:
    if who.tenant is None:
        return "ask an operator for a token that may submit"
    return f"submit for {who.tenant}, or ask an operator for a token of the other tenant"


SUBMIT_OPERATION: Final[dict[str, Any]] = {
    "tags": ["jobs"],
    "operationId": "submit_jobs",
    "summary": "Submit a job, or a batch that is taken whole or not at all",
    "description": (
        "One job, or `{jobs: [...]}`. YAML may hold several documents, which are a batch. With `Idempotency-Key`, the "
        "same content again is answered with the first jobs (200, `is_repeat`), other content with 409. The answer is "
        "given when the submission is durable."
    ),
    "parameters": [
        {
            "name": "Idempotency-Key",
            "in": "header",
            "required": False,
            "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_CHARS},
        }
    ],
    "requestBody": {
        "required": True,
        "content": {
            media: {
                "schema": {
                    "anyOf": [{"$ref": "#/components/schemas/JobSpec"}, {"$ref": "#/components/schemas/JobBatch"}]
                }
            }
            for media in ("application/json", "application/yaml")
        },
    },
    "responses": {
        str(status): {
            "description": words,
            "content": {
                "application/json": {
                    "schema": {
                        "anyOf": [
                            {"$ref": "#/components/schemas/Submitted"},
                            {"$ref": "#/components/schemas/SubmittedBatch"},
                        ]
                    }
                }
            },
        }
        for status, words in ((201, "Taken in"), (200, "Known already: the key stands for these jobs"))
    }
    | {str(k): v for k, v in problem_schema_responses((400, 401, 403, 409, 413, 415, 422, 500, 503)).items()},
}
SUBMIT_MODELS: Final = (JobSpec, Submitted, SubmittedBatch)


# ------------------------------------------------------------------------------------------------------------ reading
@router.get(
    "/v1/jobs",
    summary="Jobs, newest first",
    responses={200: {"model": JobList}, **problem_schema_responses((401, 403, 422, 503))},
)
async def list_jobs(
    deps: Parts,
    who: Caller,
    tenant: Annotated[str | None, Query(max_length=256)] = None,
    state: Annotated[list[str] | None, Query(description="one or several; `live`: not over, `over`: over")] = None,
    job_class: Annotated[JobClass | None, Query(alias="class")] = None,
    name: Annotated[str | None, Query(max_length=1024)] = None,
    user: Annotated[str | None, Query(max_length=256)] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
    after: Annotated[
        str | None, Query(description="`next` of the page before", pattern="^[A-Za-z0-9_-]{1,128}$")
    ] = None,
) -> Response:
    tenants = await _tenants(deps, who, tenant)
    states, is_final = _states(state)
    wanted = JobFilter(tenants, states, None if job_class is None else job_class.value, name, user, after, is_final)
    found = await deps.reads.list_jobs(wanted, limit + 1)
    page = found[:limit]
    views = [job_view(job) for job in page]
    if not who.sees_all:
        views = await _hide(deps, who, views)
    return json_answer({"jobs": views, "next": page[-1].job_id if len(found) > limit else None})


async def _tenants(deps: Deps, who: Principal, asked: str | None) -> tuple[str, ...] | None:
    if who.sees_all:
        return None if asked is None else (asked,)
    if asked is not None and asked != who.tenant:
        await deps.deny(who, "list_jobs", asked, remedy="leave tenant out to see your own")
    return (who.tenant,) if who.tenant else ()


def _states(asked: list[str] | None) -> tuple[tuple[str, ...] | None, bool | None]:
    words = [word for text in asked or () for word in text.split(",") if word]
    if not words:
        return None, None
    if words == ["live"]:
        return None, False
    if words == ["over"]:
        return None, True
    for word in words:
        if word not in set(JobState):
            remedy = f"use live, over, or some of {', '.join(JobState)}"
            raise invalid([Fault("not_a_choice", ("state",), "is no state of a job", remedy, word[:80])])
    return tuple(words), None


async def _hide(deps: Deps, who: Principal, views: list[dict[str, Any]]) -> list[dict[str, Any]]:
    tenant = who.tenant or ""
    owners = await deps.owners_of(jobs_named_in(views))
    own = {job_id for job_id, owner in owners.items() if owner == tenant}
    return [seen_by(view, tenant=tenant, own_jobs=own) for view in views]


@router.get(
    "/v1/jobs/{job}",
    summary="A job by id, or by a name that only one of your jobs has",
    responses={200: {"model": JobView}, **problem_schema_responses((401, 404, 409, 503))},
)
async def show_job(job: str, deps: Parts, who: Caller) -> Response:
    found = await deps.job(who, job, "read_job")
    view = job_view(found, whole=True)
    if not who.sees_all:
        [view] = await _hide(deps, who, [view])
    return json_answer(view)


@router.get(
    "/v1/jobs/{job}/why",
    summary="Why a job waits, now, with numbers and its place in the queue",
    responses={200: {"model": WhyView}, **problem_schema_responses((401, 404, 409, 503))},
)
async def why(job: str, deps: Parts, who: Caller) -> Response:
    found = await deps.job(who, job, "read_why")
    reasons: list[dict[str, Any]] = found.progress.reasons
    place = waiting = version = None
    as_of = datetime.now(UTC)
    if found.state == JobState.WAITING:
        explained = await _explained(deps, found.job_id)
        if explained is not None and explained.is_known and explained.reasons:
            reasons = [reason.model_dump(mode="json", exclude_defaults=True) for reason in explained.reasons]
            place, waiting, version = explained.place, explained.waiting, explained.policy_version
            as_of = explained.as_of or as_of
    blockers = jobs_named_in([{"blocked_by": reason.get("blocked_by", ())} for reason in reasons])
    known = await deps.reads.names_of(sorted(blockers))
    if not who.sees_all:
        own = {job_id for job_id, (tenant, _) in known.items() if tenant == who.tenant}
        reasons = [reason_for(reason, own_jobs=own, tenant=who.tenant or "") for reason in reasons]
        known = {job_id: known[job_id] for job_id in own}
    names = {job_id: name for job_id, (_, name) in known.items()}
    return json_answer(
        {
            "job_id": found.job_id,
            "state": found.state,
            "reasons": reasons,
            "text": [_told(reason, names) for reason in reasons] or [job_view(found)["summary"]],
            "place": place,
            "waiting": waiting,
            "policy_version": version,
            "as_of": as_of.isoformat(),
        }
    )


async def _explained(deps: Deps, job_id: str) -> JobExplained | None:
    """What placement says now; None where it does not answer: then the reasons it gave last are shown."""
    try:
        return await deps.ask("placement", "explain", ExplainJob(job_id=job_id), JobExplained)
    except (ApiError, RequestFailed):
        return None


def _told(reason: dict[str, Any], names: dict[str, str]) -> str:
    help_ = texts.remedy(reason)
    return texts.sentence(reason, names) + (f" → {help_}" if help_ else "")


# --------------------------------------------------------------------------------------------------------- cancelling
@router.post(
    "/v1/jobs/{job}/cancel",
    summary="End a job; may be asked again",
    responses={
        200: {"description": "It was asked before, or the job is over", "model": JobView},
        202: {"description": "Noted; it ends soon", "model": JobView},
        **problem_schema_responses((400, 401, 403, 404, 409, 413, 415, 422, 503)),
    },
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CancelRequest"}}},
        }
    },
)
async def cancel(job: str, request: Request, deps: Parts, who: Caller) -> Response:
    body = await body_of(request, deps.max_body_bytes)
    asked = CancelRequest()
    if body.strip():
        value, _ = read_body(body, request.headers.get("content-type", "application/json"))
        asked = read_model(CancelRequest, value)
    return await _cancel(job, asked.why, deps, who, request)


@router.delete(
    "/v1/jobs/{job}",
    summary="The same as cancel",
    responses={
        200: {"description": "It was asked before, or the job is over", "model": JobView},
        202: {"description": "Noted; it ends soon", "model": JobView},
        **problem_schema_responses((401, 403, 404, 409, 503)),
    },
)
async def delete_job(job: str, request: Request, deps: Parts, who: Caller) -> Response:
    return await _cancel(job, "", deps, who, request)


async def _cancel(job: str, why_: str, deps: Deps, who: Principal, request: Request) -> Response:
    found = await deps.job(who, job, "cancel_job")
    if not who.may_change(found.tenant):
        await deps.deny(who, "cancel_job", found.job_id, remedy="ask a member of the tenant")
    span = start_root_span(SERVICE, "cancel", traceparent=request.headers.get("traceparent"))
    span.set("berth.job_id", found.job_id)
    try:
        is_new = not found.is_final and await deps.changes.cancel(
            Cancel(found.job_id, found.tenant, who.user, why_, span.traceparent)
        )
    finally:
        span.end()
    after = await deps.reads.job(found.job_id)
    view = job_view(after or found, whole=True)
    if not who.sees_all:
        [view] = await _hide(deps, who, [view])
    return json_answer(view, status=202 if is_new else 200)


def read_model(model: Any, value: object) -> Any:
    """A small body as its model.

    Raises:
        ApiError: 422.
    """
    faults = sound_faults(value)
    if faults:
        raise invalid(faults)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise invalid(faults_of(error, value)) from None


# ----------------------------------------------------------------------------------------------------------------- logs
@router.get(
    "/v1/jobs/{job}/logs",
    summary="What a worker has written",
    description=(
        "Plain text. With follow, goes on until the worker has ended. `Berth-Offset` is where the text begins. Of an "
        "answer without follow, `Berth-Next-Offset` is where to go on, and `Berth-Is-Cut` is true where there is more."
    ),
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Output, as text"},
        **problem_schema_responses((401, 404, 409, 422, 429, 503)),
    },
)
async def logs(
    job: str,
    deps: Parts,
    who: Caller,
    worker: Annotated[int, Query(ge=0, le=1_000_000)] = 0,
    attempt: Annotated[int | None, Query(ge=1, le=2_147_483_647)] = None,
    offset: Annotated[int, Query(description="negative: so many bytes from the end", ge=-(1 << 40), le=1 << 40)] = 0,
    follow: bool = False,
) -> Response:
    found = await deps.job(who, job, "read_logs")
    source = await _log_source(deps, found, worker, attempt)
    first = await source.read(offset)
    if first is None:
        raise refused(
            "not_found",
            f"no output of worker {worker}, attempt {source.attempt}",
            remedy="it may not have begun; the node may have dropped it",
            field="worker",
            value=worker,
        )
    headers = {
        "Berth-Offset": str(max(0, first.next_offset - len(first.text.encode()))),
        "Berth-Next-Offset": str(first.next_offset),
        "Berth-Attempt": str(source.attempt),
    }
    if not follow:
        parts = [first.text]
        answer = first
        is_cut = False
        while not answer.is_over and answer.text:
            is_cut = len(parts) >= LOG_CHUNKS
            if is_cut:
                break
            more = await source.read(answer.next_offset)
            if more is None or not more.text:
                break
            answer = more
            parts.append(more.text)
        headers["Berth-Next-Offset"] = str(answer.next_offset)
        headers["Berth-Is-Over"] = "true" if answer.is_over else "false"
        headers["Berth-Is-Cut"] = "true" if is_cut else "false"
        return Response("".join(parts).encode(), 200, headers, "text/plain; charset=utf-8")
    open_stream(deps)
    return StreamingResponse(_follow(deps, source, first), 200, headers, "text/plain; charset=utf-8")


def open_stream(deps: Deps) -> None:
    """Count one more open stream; the stream's own `finally` counts it down.

    Raises:
        ApiError: 429.
    """
    if deps.open_streams >= deps.max_streams:
        raise refused("too_many_requests", f"{deps.max_streams} streams are open", remedy="close some, or try later")
    deps.open_streams += 1
    deps.metrics.streams.set(deps.open_streams)


def close_stream(deps: Deps) -> None:
    """Count one less."""
    deps.open_streams -= 1
    deps.metrics.streams.set(deps.open_streams)


class LogSource:
    """Where the output of one worker is read: the agent of the node it was placed on."""

    def __init__(self, deps: Deps, *, node: str, job_id: str, attempt: int, worker: int) -> None:
        self._deps = deps
        self._subject = subjects.node_request(deps.pool, node, "logs")
        self._node = node
        self.job_id = job_id
        self.attempt = attempt
        self.worker = worker

    async def read(self, offset: int) -> LogAnswer | None:
        """Output from `offset`; None: the node knows of none.

        Raises:
            ApiError: 503, the node does not answer.
        """
        question = LogQuestion(
            job_id=self.job_id, attempt=self.attempt, worker=self.worker, offset=offset, max_bytes=LOG_CHUNK_BYTES
        )
        try:
            data = await self._deps.ask_raw(
                self._subject, question.model_dump_json().encode(), f"node {self._node}", timeout=LOG_SECONDS
            )
        except RequestFailed as error:
            raise unavailable(f"node {self._node}", str(error)) from error
        except ApiError as error:
            if isinstance(error.__cause__, NoResponders):
                raise unavailable(
                    f"node {self._node}", "its agent is not there; the output lies on the node"
                ) from error
            raise
        answer = LogAnswer.model_validate_json(data)
        return answer if answer.is_known else None


async def _log_source(deps: Deps, job: StoredJob, worker: int, number: int | None) -> LogSource:
    attempts = job.progress.attempts
    if not attempts:
        raise refused(
            "not_found", f"{job.job_id} has not started yet", remedy=f"see berth why {job.job_id}", field="job"
        )
    chosen = attempts[-1] if number is None else next((a for a in attempts if a["attempt"] == number), None)
    if chosen is None:
        known = ", ".join(str(a["attempt"]) for a in attempts)
        raise refused("not_found", f"no attempt {number}", remedy=f"use one of {known}", field="attempt", value=number)
    for assignment in chosen.get("assignments", ()):
        if assignment["worker"] == worker:
            return LogSource(deps, node=assignment["node"], job_id=job.job_id, attempt=chosen["attempt"], worker=worker)
    workers = len(chosen.get("assignments", ()))
    raise refused("not_found", f"no worker {worker}", remedy=f"use 0 to {workers - 1}", field="worker", value=worker)


async def _follow(deps: Deps, source: LogSource, first: LogAnswer) -> AsyncIterator[bytes]:
    """Output until the worker has ended, or its job is over and the node has no more to say."""
    try:
        answer = first
        failures = 0
        quiet = 0
        while True:
            if answer.text:
                quiet = 0
                yield answer.text.encode()
            if answer.is_over:
                return
            if not answer.text:
                quiet += 1
                if quiet % 8 == 0 and await _is_past(deps, source):
                    return
                await asyncio.sleep(LOG_POLL_SECONDS)
            try:
                more = await source.read(answer.next_offset)
                failures = 0
            except ApiError:
                failures += 1
                if failures > 20 or await _is_past(deps, source):
                    return
                await asyncio.sleep(1.0)
                continue
            if more is None:
                return
            answer = more
    finally:
        close_stream(deps)


async def _is_past(deps: Deps, source: LogSource) -> bool:
    """Whether the attempt that is followed is over."""
    try:
        job = await deps.reads.job(source.job_id)
    except TransientError:
        return False
    if job is None or job.is_final:
        return True
    return any(a["attempt"] == source.attempt and a.get("ended_at") for a in job.progress.attempts)


# ---------------------------------------------------------------------------------------------------------------- trace
@router.get(
    "/v1/jobs/{job}/trace",
    summary="The spans of a job's trace, and of the batches they are linked to",
    responses={
        200: {
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/TraceView"}}},
            "description": "Spans; none where the job was not sampled or they are gone",
        },
        **problem_schema_responses((401, 404, 409, 503)),
    },
)
async def trace(job: str, deps: Parts, who: Caller) -> Response:
    found = await deps.job(who, job, "read_trace")
    spans = [orjson.loads(body) for body in await deps.reads.spans([found.trace_id])] if found.trace_id else []
    linked = {link["trace_id"] for span in spans for link in span.get("links", ())} - {found.trace_id}
    if linked:
        batches = [orjson.loads(body) for body in await deps.reads.spans(sorted(linked)[:200])]
        if not who.sees_all:
            batches = [_only_own_links(span, found.trace_id) for span in batches]
        spans += batches
    return json_answer({"job_id": found.job_id, "trace_id": found.trace_id, "spans": spans})


def _only_own_links(span: dict[str, Any], trace_id: str) -> dict[str, Any]:
    links = [link for link in span.get("links", ()) if link["trace_id"] == trace_id]
    return {**span, "links": links}


def is_id(text: str) -> bool:
    """Whether a text may be an id."""
    return TOKEN.match(text) is not None
