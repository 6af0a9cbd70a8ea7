"""The application: routes, problem documents for everything that goes wrong, metrics, and its own description."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final, cast

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from berth.contracts.api import (
    CancelRequest,
    CordonRequest,
    PolicyDecision,
    PolicyDiffRequest,
    PolicyProposal,
    Problem,
    QuotaChange,
    Submitted,
    SubmittedBatch,
    TokenRequest,
)
from berth.contracts.jobs import JobSpec
from berth.store.errors import TransientError
from berth.telemetry.logs import get_logger
from services.gateway.api import admin, cluster, feeds, jobs, policies, receipts, record
from services.gateway.api.admin import ReplayRequest
from services.gateway.api.deps import SERVICE, Deps
from services.gateway.problems import MEDIA_TYPE, ApiError, Fault, invalid, refused, shown

VERSION: Final = "1"
_log: Final = get_logger(SERVICE)


class JobBatch(BaseModel):
    """Several jobs, taken whole or not at all."""

    jobs: tuple[JobSpec, ...]


class TraceView(BaseModel):
    """A job's spans, and the batches they are linked to; each as `berth.telemetry.trace_store.SpanRecord`."""

    job_id: str
    trace_id: str
    spans: tuple[dict[str, Any], ...]


_MORE_MODELS: Final[tuple[type[BaseModel], ...]] = (
    Problem,
    JobSpec,
    JobBatch,
    Submitted,
    SubmittedBatch,
    CancelRequest,
    CordonRequest,
    PolicyDecision,
    PolicyDiffRequest,
    PolicyProposal,
    QuotaChange,
    TokenRequest,
    ReplayRequest,
    TraceView,
)


def make_app(deps: Deps) -> FastAPI:
    """The API over given parts; starts nothing."""
    app = FastAPI(title="Berth", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.deps = deps
    for module in (jobs, receipts, cluster, policies, admin, record, feeds):
        app.include_router(module.router)
    app.add_route("/v1/jobs", jobs.submit, methods=["POST"])
    app.add_route("/openapi.json", _describe, methods=["GET"])
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(RequestValidationError, _on_bad_parameters)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(TransientError, _on_store_away)
    app.add_exception_handler(Exception, _on_defect)
    app.add_middleware(Measured, deps=deps)
    return app


# ------------------------------------------------------------------------------------------------------------ problems
def problem_answer(error: ApiError, request: Request) -> Response:
    """An error as `application/problem+json`."""
    problem = error.problem.model_copy(
        update={"instance": request.url.path[:200], "type": f"urn:berth:problem:{error.problem.code}"}
    )
    body = problem.model_dump_json(exclude_defaults=False).encode()
    return Response(body, problem.status, error.headers, MEDIA_TYPE)


async def _on_api_error(request: Request, error: Exception) -> Response:
    return problem_answer(cast("ApiError", error), request)


async def _on_bad_parameters(request: Request, error: Exception) -> Response:
    """Query, path and header parameters."""
    faults = []
    for entry in cast("RequestValidationError", error).errors():
        place = entry["loc"][1:] or entry["loc"]
        kind = str(entry["type"])
        remedy = "see GET /openapi.json for what is accepted"
        faults.append(Fault(kind, tuple(place), str(entry["msg"]).lower(), remedy, shown(entry.get("input"))))
    return problem_answer(invalid(faults), request)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    found = cast("HTTPException", error)
    headers: Mapping[str, str] = found.headers or {}
    if found.status_code == 404:
        made = refused("not_found", f"nothing at {request.url.path[:200]}", remedy="see GET /openapi.json")
    elif found.status_code == 405:
        detail = f"{request.method[:20]} is not allowed here"
        allowed = ", ".join(_methods_at(request)) or headers.get("Allow", "")
        headers = {**headers, "Allow": allowed}
        made = refused("method_not_allowed", detail, remedy=f"use {allowed}")
    else:
        made = refused("invalid", str(found.detail), remedy="see GET /openapi.json", status=found.status_code)
    made.headers.update(headers)
    return problem_answer(made, request)


def _methods_at(request: Request) -> list[str]:
    """Methods at a path by the description; Starlette names those of the first route only."""
    found: set[str] = set()
    for template, operations in describe(request.app)["paths"].items():
        if re.fullmatch(re.sub(r"\{[^}]+\}", "[^/]+", template), request.url.path):
            found.update(method.upper() for method in operations)
    return sorted(found)


async def _on_store_away(request: Request, error: Exception) -> Response:
    _log.warning("the database is away", path=request.url.path, reason=str(error))
    made = refused(
        "store_unavailable",
        "the database did not answer; whether anything was stored is not known",
        remedy="try again with the same Idempotency-Key",
        headers={"Retry-After": "1"},
    )
    return problem_answer(made, request)


async def _on_defect(request: Request, error: Exception) -> Response:
    _log.error("request failed", error=error, method=request.method, path=request.url.path)
    made = refused("internal", "a defect of the platform", remedy="tell an operator; the gateway's log has the cause")
    return problem_answer(made, request)


class Measured:
    """Counts and times requests by route template, never by path."""

    def __init__(self, app: ASGIApp, *, deps: Deps) -> None:
        self._app = app
        self._metrics = deps.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            route = getattr(scope.get("route"), "path", None) or (scope["path"] if scope["path"] in _PLAIN else "none")
            label = f"{scope['method'] if scope['method'] in _METHODS else 'other'} {route}"
            self._metrics.requests.labels(label, str(status)).inc()
            self._metrics.seconds.labels(label).observe(time.perf_counter() - started)


_PLAIN: Final = frozenset({"/v1/jobs", "/openapi.json"})
"""Plain Starlette routes, which leave no trace in the scope."""
_METHODS: Final = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


# --------------------------------------------------------------------------------------------------------- description
async def _describe(request: Request) -> Response:
    from services.gateway.api.deps import json_answer

    return json_answer(describe(cast("FastAPI", request.app)))


def describe(app: FastAPI) -> dict[str, Any]:
    """OpenAPI 3.1 of everything, the plain route and the problem documents included."""
    cached = getattr(app.state, "description", None)
    if cached is not None:
        return cast("dict[str, Any]", cached)
    document = get_openapi(
        title="Berth",
        version=VERSION,
        openapi_version="3.1.0",
        description="Who gets which GPU, and why. Every error is a problem document (RFC 9457) with a stable code.",
        routes=app.routes,
    )
    _, definitions = models_json_schema(
        [(model, "validation") for model in _MORE_MODELS], ref_template="#/components/schemas/{model}"
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name, schema in definitions.get("$defs", {}).items():
        schemas.setdefault(name, schema)
    document["paths"].setdefault("/v1/jobs", {})["post"] = jobs.SUBMIT_OPERATION
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"token": []}]
    for path in document["paths"].values():
        for operation in path.values():
            responses = operation.get("responses", {})
            problem = responses.get("422", {}).get("content", {})
            if "application/json" in problem:  # FastAPI's own form of errors is never sent
                responses["422"] = dict(_PROBLEM_RESPONSE)
            responses.setdefault("500", dict(_PROBLEM_RESPONSE))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    app.state.description = document
    return document


_PROBLEM_RESPONSE: Final = {
    "description": "problem",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}
