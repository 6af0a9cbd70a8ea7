"""The pool: nodes, cards, quota, tenants, cordon."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from berth.contracts.api import CordonRequest, GpuView, NodeView, TenantView
from berth.contracts.base import TOKEN
from berth.contracts.events import NodeCordonRequested
from berth.contracts.jobs import JobState
from berth.contracts.requests import (
    Holding,
    LedgerAnswer,
    LedgerQuestion,
    NodesAnswer,
    NodesQuestion,
    NodeStatus,
    QuotaAnswer,
    QuotaQuestion,
)
from services.gateway.api.deps import Deps, body_of, json_answer
from services.gateway.api.jobs import Caller, Parts, read_model
from services.gateway.intake import Tell
from services.gateway.principals import Principal
from services.gateway.problems import ApiError, problem_schema_responses, refused
from services.gateway.rendering import gpu_views, node_view
from services.gateway.submissions import read_body

router = APIRouter(tags=["pool"])

SOMEONE_ELSE = "someone else"


class NodeList(BaseModel):
    """Nodes by name."""

    nodes: tuple[NodeView, ...]


class GpuList(BaseModel):
    """Cards by node and index."""

    gpus: tuple[GpuView, ...]


class TenantList(BaseModel):
    """Tenants by name."""

    tenants: tuple[TenantView, ...]


class CordonAsked(BaseModel):
    """Answer to a cordon request: noted, and carried out by inventory."""

    node: str
    cordoned: bool


@router.get(
    "/v1/nodes",
    summary="Nodes with state, cards and how many are held",
    responses={200: {"model": NodeList}, **problem_schema_responses((401, 503))},
)
async def list_nodes(deps: Parts, who: Caller) -> Response:
    nodes, ledger = await _pool(deps, None)
    return json_answer({"nodes": [node_view(node, ledger.holdings) for node in nodes.nodes]})


@router.get(
    "/v1/nodes/{node}",
    summary="One node",
    responses={200: {"model": NodeView}, **problem_schema_responses((401, 404, 503))},
)
async def show_node(node: str, deps: Parts, who: Caller) -> Response:
    found, ledger = await _node(deps, node)
    return json_answer(node_view(found, ledger.holdings))


@router.post(
    "/v1/nodes/{node}/cordon",
    summary="Give a node no new work, or work again; what runs there stays",
    status_code=202,
    responses={
        202: {"model": CordonAsked},
        **problem_schema_responses((400, 401, 403, 404, 413, 415, 422, 503)),
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/CordonRequest"}}},
        }
    },
)
async def cordon(node: str, request: Request, deps: Parts, who: Caller) -> Response:
    await deps.require_operator(who, "cordon_node", node)
    body = await body_of(request, deps.max_body_bytes)
    value, _ = read_body(body, request.headers.get("content-type", ""))
    asked: CordonRequest = read_model(CordonRequest, value)
    await _node(deps, node)
    data = NodeCordonRequested(node=node, cordoned=asked.cordoned, requested_by=who.user, why=asked.why)
    # The clock numbers requests about a node: a number that repeats would make the second one a repeat of the first.
    await deps.changes.tell(Tell(data, node, who.user, version=time.time_ns() // 1000))
    return json_answer({"node": node, "cordoned": asked.cordoned}, status=202)


@router.get(
    "/v1/gpus",
    summary="Cards with readings, health and who holds them",
    responses={200: {"model": GpuList}, **problem_schema_responses((401, 404, 503))},
)
async def list_gpus(deps: Parts, who: Caller, node: Annotated[str | None, Query(max_length=128)] = None) -> Response:
    if node is not None:
        status, ledger = await _node(deps, node)
        statuses: tuple[NodeStatus, ...] = (status,)
    else:
        nodes, ledger = await _pool(deps, None)
        statuses = nodes.nodes
    held = _held_by(ledger.holdings, who)
    return json_answer({"gpus": [view for status in statuses for view in gpu_views(status, held)]})


@router.get(
    "/v1/quota",
    summary="Who may hold how much, holds how much, and waits for how much",
    responses={200: {"model": QuotaAnswer}, **problem_schema_responses((401, 403, 503))},
)
async def quota(deps: Parts, who: Caller, tenant: Annotated[str | None, Query(max_length=256)] = None) -> Response:
    if not who.sees_all:
        if tenant is not None and tenant != who.tenant:
            await deps.deny(who, "read_quota", tenant, remedy="leave tenant out to see your own")
        tenant = who.tenant
    return json_answer(await deps.ask("placement", "quota", QuotaQuestion(tenant=tenant), QuotaAnswer))


@router.get(
    "/v1/tenants",
    summary="Tenants you may see, with quota, use and jobs",
    responses={200: {"model": TenantList}, **problem_schema_responses((401, 503))},
)
async def tenants(deps: Parts, who: Caller) -> Response:
    answer, counts = await asyncio.gather(
        deps.ask("placement", "quota", QuotaQuestion(tenant=None if who.sees_all else who.tenant), QuotaAnswer),
        deps.reads.counts(),
    )
    names = set(deps.catalogue.view.tenants) | set(counts) | {line.tenant for line in answer.lines}
    if not who.sees_all:
        names &= {who.tenant or ""}
    views: dict[str, dict[str, Any]] = {
        name: {"tenant": name, "quota": {}, "used": {}, **_job_counts(counts.get(name, {}))} for name in sorted(names)
    }
    for line in answer.lines:
        if line.tenant in views:
            if line.quota is not None:
                views[line.tenant]["quota"][line.card_type] = line.quota
            views[line.tenant]["used"][line.card_type] = line.used
    return json_answer({"tenants": list(views.values())})


def _job_counts(states: dict[str, int]) -> dict[str, int]:
    waiting = states.get(JobState.SUBMITTED, 0) + states.get(JobState.WAITING, 0)
    return {"jobs_waiting": waiting, "jobs_running": sum(states.values()) - waiting}


async def _pool(deps: Deps, node: str | None) -> tuple[NodesAnswer, LedgerAnswer]:
    """What inventory and the ledger say. Without placement nodes are shown all the same, with nothing held."""
    nodes = asyncio.ensure_future(deps.ask("inventory", "nodes", NodesQuestion(node=node), NodesAnswer))
    try:
        ledger = await deps.ask("placement", "ledger", LedgerQuestion(node=node), LedgerAnswer)
    except ApiError:
        ledger = LedgerAnswer()
    return await nodes, ledger


async def _node(deps: Deps, node: str) -> tuple[NodeStatus, LedgerAnswer]:
    if TOKEN.match(node):
        nodes, ledger = await _pool(deps, node)
        if nodes.nodes:
            return nodes.nodes[0], ledger
    raise refused("not_found", f"no node {node}", remedy="see berth nodes", field="node", value=node)


def _held_by(holdings: tuple[Holding, ...], who: Principal) -> dict[str, list[str]]:
    held: dict[str, list[str]] = {}
    for holding in holdings:
        shown = holding.job_id if who.may_read(holding.tenant) else SOMEONE_ELSE
        jobs = held.setdefault(holding.gpu, [])
        if shown not in jobs:
            jobs.append(shown)
    return held
