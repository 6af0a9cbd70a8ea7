"""Events for subscribers (Server-Sent Events, resumable), and spans of the services (OTLP)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from berth.bus.errors import BusError
from berth.contracts.api import EventView
from services.gateway.api.deps import Deps, body_of, json_answer, unavailable
from services.gateway.api.jobs import Caller, Parts, close_stream, open_stream
from services.gateway.event_feed import PAGE, StoredEvent
from services.gateway.principals import Principal, Role
from services.gateway.problems import problem_schema_responses, refused
from services.gateway.visibility import data_for, jobs_named_in

router = APIRouter(tags=["events"])

SSE: Final = "text/event-stream; charset=utf-8"
RECENT: Final = 1000
MAX_SPAN_BYTES: Final = 8 << 20
MAX_SEQUENCE: Final = 2**62


class EventList(BaseModel):
    """Events, oldest first; `next`: pass it as `after` to go on."""

    events: tuple[EventView, ...]
    next: int


@router.get(
    "/v1/events",
    summary="Events in order: as a list, or (follow) as Server-Sent Events",
    description=(
        "Members see events of their tenant, operators all. `id` of an SSE event is the sequence; send it back as "
        "`Last-Event-ID` to go on without a gap. Without a place to start from, a list begins among the last thousand, "
        "and a stream at its end."
    ),
    responses={
        200: {
            "model": EventList,
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "A list, or a stream",
        },
        **problem_schema_responses((401, 403, 422, 429, 503)),
    },
)
async def events(
    request: Request,
    deps: Parts,
    who: Caller,
    after: Annotated[int | None, Query(ge=0, le=MAX_SEQUENCE, description="events behind this sequence")] = None,
    last_event_id: Annotated[str | None, Header(max_length=40)] = None,
    follow: bool = False,
    limit: Annotated[int, Query(ge=1, le=5000, description="events in a list at most")] = 500,
    subject: Annotated[str | None, Query(max_length=128, description="of this job or node only")] = None,
    type: Annotated[str | None, Query(max_length=128, description="of this type only, such as job.placed")] = None,
) -> Response:
    if who.role is Role.INTERNAL:
        await deps.deny(who, "read_events", "events")
    wanted = _Wanted(who, subject, type)
    start = _start(after, last_event_id)
    follow = follow or "text/event-stream" in request.headers.get("accept", "")
    try:
        end = await deps.feed.last_sequence()
        if follow:
            open_stream(deps)
            body = _stream(deps, wanted, end if start is None else start)
            return StreamingResponse(body, 200, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}, SSE)
        return await _list(deps, wanted, max(0, end - RECENT) if start is None else start, end, limit)
    except BusError as error:
        raise unavailable("the event stream", str(error)) from error


def _start(after: int | None, last_event_id: str | None) -> int | None:
    if last_event_id is not None:
        text = last_event_id.strip()
        if not text.isdigit() or int(text) > MAX_SEQUENCE:
            raise refused(
                "invalid_value",
                "Last-Event-ID must be a sequence",
                remedy="send back the id of the last event",
                field="Last-Event-ID",
                value=text,
                status=422,
            )
        return int(text)
    return after


class _Wanted:
    """Which events a subscriber gets."""

    def __init__(self, who: Principal, subject: str | None, type_: str | None) -> None:
        self.who = who
        self._subject = subject
        self._type = type_

    def fits(self, event: StoredEvent) -> bool:
        """By what stands in the headers."""
        if not self.who.sees_all and (not event.tenant or event.tenant != self.who.tenant):
            return False
        return self._type is None or self._type in event.type

    def fits_view(self, view: dict[str, Any]) -> bool:
        """By what stands in the envelope."""
        return self._subject is None or self._subject in {view["subject"], view["data"].get("job_id")}


async def _views(deps: Deps, wanted: _Wanted, page: list[StoredEvent]) -> list[dict[str, Any]]:
    views = [event.view() for event in page if wanted.fits(event)]
    views = [view for view in views if wanted.fits_view(view)]
    if wanted.who.sees_all or not views:
        return views
    tenant = wanted.who.tenant or ""
    owners = await deps.owners_of(jobs_named_in([view["data"] for view in views]))
    own = {job_id for job_id, owner in owners.items() if owner == tenant}
    return [{**view, "data": data_for(view["data"], own_jobs=own, tenant=tenant)} for view in views]


async def _list(deps: Deps, wanted: _Wanted, after: int, end: int, limit: int) -> Response:
    found: list[dict[str, Any]] = []
    while after < end and len(found) < limit:
        page = await deps.feed.read(after, PAGE)
        if not page:
            break
        views = await _views(deps, wanted, page)
        found += views[: limit - len(found)]
        after = page[-1].sequence
        if len(found) >= limit:
            after = found[-1]["sequence"]
    return json_answer({"events": found, "next": after})


async def _stream(deps: Deps, wanted: _Wanted, after: int) -> AsyncGenerator[bytes, None]:
    try:
        yield b": berth events\nretry: 1000\n\n"
        while True:
            try:
                async with aclosing(deps.feed.follow(after)) as pages:
                    async for page in pages:
                        for view in await _views(deps, wanted, page):
                            yield _sse(view)
                        if page:
                            after = page[-1].sequence
                        else:
                            yield b": still here\n\n"
            except BusError:
                yield b": the bus is away\n\n"
                await asyncio.sleep(1.0)
    finally:
        close_stream(deps)


def _sse(view: dict[str, Any]) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (view["sequence"], view["type"].encode(), orjson.dumps(view))


# -------------------------------------------------------------------------------------------------------------- spans
@router.post(
    "/v1/traces",
    summary="Deliver spans (OTLP over HTTP, protobuf); for services and operators",
    responses={
        200: {"description": "Stored", "content": {"application/x-protobuf": {"schema": {"type": "string"}}}},
        **problem_schema_responses((400, 401, 403, 413, 415, 503)),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/x-protobuf": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def deliver_spans(request: Request, deps: Parts, who: Caller) -> Response:
    from berth.telemetry.trace_store import MalformedTraces, decode_export_request

    if who.role not in {Role.INTERNAL, Role.OPERATOR}:
        await deps.deny(who, "deliver_spans", "traces", remedy="services deliver spans, users read them")
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/x-protobuf":
        raise refused(
            "unsupported_media_type",
            f"cannot read {media or 'a body without Content-Type'}",
            remedy="send application/x-protobuf",
            field="Content-Type",
        )
    body = await body_of(request, MAX_SPAN_BYTES)
    try:
        spans = await asyncio.to_thread(
            decode_export_request, body, content_encoding=request.headers.get("content-encoding", "")
        )
    except MalformedTraces as error:
        raise refused("malformed_traces", str(error), remedy="send an ExportTraceServiceRequest", status=400) from None
    if spans:
        await deps.reads.add_spans([(s.trace_id, s.span_id, orjson.dumps(s.to_dict(), default=str)) for s in spans])
    return Response(b"", 200, media_type="application/x-protobuf")
