"""For operators: tokens, parked messages. Tenant admins hand out tokens of their own tenant."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final, Literal

import orjson
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from berth.bus.errors import RequestFailed
from berth.contracts import subjects
from berth.contracts.api import TokenRequest
from services.gateway.api.deps import Deps, body_of, json_answer, unavailable
from services.gateway.api.jobs import Caller, Parts, read_model
from services.gateway.principals import Principal, Role
from services.gateway.problems import ApiError, Fault, invalid, problem_schema_responses, refused
from services.gateway.submissions import read_body

router = APIRouter(tags=["administration"])

PARKING: Final = ("inventory", "admission", "placement", "lifecycle", "audit", "gateway")
ParkingService = Literal["inventory", "admission", "placement", "lifecycle", "audit", "gateway"]


class TokenView(BaseModel):
    """A token without itself."""

    token_id: str
    user: str
    tenant: str | None
    role: str
    created_at: str
    created_by: str
    is_revoked: bool


class TokenList(BaseModel):
    """Tokens, newest first."""

    tokens: tuple[TokenView, ...]


class NewToken(BaseModel):
    """A token, shown this once."""

    token_id: str
    token: str
    user: str
    tenant: str | None
    role: str


class ParkedView(BaseModel):
    """A message that a service could not take in."""

    service: str
    id: int
    entity: str
    event_id: str
    subject: str
    reason: str
    parked_at: str
    status: str
    note: str = ""
    stream_seq: int = 0
    payload: str | None = None
    mended: str | None = None


class ParkedList(BaseModel):
    """Parked messages; `unreachable`: services that did not answer."""

    parked: tuple[ParkedView, ...]
    unreachable: tuple[str, ...] = ()


class ReplayRequest(BaseModel):
    """Body of a replay: `payload` replaces what was sent, where it has to be mended."""

    model_config = {"extra": "forbid"}

    payload: str | None = None
    note: str = ""


# ------------------------------------------------------------------------------------------------------------- tokens
@router.get(
    "/v1/whoami",
    summary="Whose token this is",
    responses={200: {"model": TokenRequest}, **problem_schema_responses((401, 503))},
)
async def whoami(who: Caller) -> Response:
    return json_answer({"user": who.user, "tenant": who.tenant, "role": who.role.value})


@router.get(
    "/v1/tokens",
    summary="Tokens, without themselves",
    responses={200: {"model": TokenList}, **problem_schema_responses((401, 403, 503))},
)
async def list_tokens(deps: Parts, who: Caller) -> Response:
    tenant = await _token_tenant(deps, who, "list_tokens")
    found = await deps.reads.tokens(tenant)
    return json_answer(
        {
            "tokens": [
                {
                    "token_id": token.token_id,
                    "user": token.principal.user,
                    "tenant": token.principal.tenant,
                    "role": token.principal.role.value,
                    "created_at": token.created_at.isoformat(),
                    "created_by": token.created_by,
                    "is_revoked": token.is_revoked,
                }
                for token in found
            ]
        }
    )


@router.post(
    "/v1/tokens",
    summary="A new token; it is shown this once",
    status_code=201,
    responses={201: {"model": NewToken}, **problem_schema_responses((400, 401, 403, 413, 415, 422, 503))},
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/TokenRequest"}}},
        }
    },
)
async def create_token(request: Request, deps: Parts, who: Caller) -> Response:
    own_tenant = await _token_tenant(deps, who, "create_token")
    value, _ = read_body(await body_of(request, deps.max_body_bytes), request.headers.get("content-type", ""))
    asked: TokenRequest = read_model(TokenRequest, value)
    tenant = asked.tenant if own_tenant is None else (asked.tenant or own_tenant)
    if own_tenant is not None and (tenant != own_tenant or asked.role == Role.OPERATOR):
        await deps.deny(who, "create_token", tenant or "", remedy="ask an operator of the pool")
    if tenant is None and asked.role in {Role.MEMBER, Role.TENANT_ADMIN}:
        raise invalid([Fault("missing_field", ("tenant",), "is missing", f"a {asked.role} belongs to a tenant")])
    principal = Principal(asked.user, tenant, Role(asked.role))
    token_id = deps.ids()
    token = await deps.access.create(principal, token_id=token_id, created_by=who.user)
    return json_answer(
        {"token_id": token_id, "token": token, "user": asked.user, "tenant": tenant, "role": asked.role}, status=201
    )


@router.delete(
    "/v1/tokens/{token_id}",
    summary="Revoke a token; it may work for a few seconds more",
    status_code=204,
    responses={204: {"description": "Revoked"}, **problem_schema_responses((401, 403, 404, 503))},
)
async def revoke_token(token_id: str, deps: Parts, who: Caller) -> Response:
    tenant = await _token_tenant(deps, who, "revoke_token")
    if not await deps.reads.revoke_token(token_id, tenant):
        raise refused("not_found", f"no token {token_id}", remedy="see berth token list", field="token_id")
    deps.access.forget()
    return Response(status_code=204)


async def _token_tenant(deps: Deps, who: Principal, action: str) -> str | None:
    """Whose tokens the caller may touch: None for all."""
    if who.is_operator:
        return None
    if who.role is not Role.TENANT_ADMIN or who.tenant is None:
        await deps.deny(who, action, who.tenant or "", remedy="ask a tenant admin or an operator")
    return who.tenant


# ------------------------------------------------------------------------------------------------------------- parked
@router.get(
    "/v1/parked",
    summary="Messages that services could not take in",
    responses={200: {"model": ParkedList}, **problem_schema_responses((401, 403, 422, 503))},
)
async def list_parked(
    deps: Parts,
    who: Caller,
    service: Annotated[ParkingService | None, Query()] = None,
    closed: Annotated[bool, Query(description="also those replayed or dropped")] = False,
) -> Response:
    await deps.require_operator(who, "read_parked")
    services = PARKING if service is None else (service,)
    asked = [_parked(deps, name, {"do": "list", "closed": closed}) for name in services]
    found: list[dict[str, Any]] = []
    unreachable = []
    for name, answer in zip(services, await asyncio.gather(*asked, return_exceptions=True), strict=True):
        if isinstance(answer, ApiError):
            unreachable.append(name)
        elif isinstance(answer, BaseException):
            raise answer
        else:
            found += [{"service": name, **message} for message in answer]
    return json_answer({"parked": found, "unreachable": unreachable})


_PARKED_ID = Annotated[int, Path(ge=1, le=2**62)]


@router.get(
    "/v1/parked/{service}/{parked_id}",
    summary="One parked message with what was sent",
    responses={200: {"model": ParkedView}, **problem_schema_responses((401, 403, 404, 422, 503))},
)
async def show_parked(service: ParkingService, parked_id: _PARKED_ID, deps: Parts, who: Caller) -> Response:
    await deps.require_operator(who, "read_parked", service)
    return json_answer({"service": service, **await _parked(deps, service, {"do": "show", "id": parked_id})})


@router.post(
    "/v1/parked/{service}/{parked_id}/replay",
    summary="Try a parked message again, mended or as it was",
    status_code=202,
    responses={
        202: {"description": "It is tried with the service's next batch"},
        **problem_schema_responses((400, 401, 403, 404, 409, 413, 415, 422, 503)),
    },
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ReplayRequest"}}},
        }
    },
)
async def replay_parked(
    service: ParkingService, parked_id: _PARKED_ID, request: Request, deps: Parts, who: Caller
) -> Response:
    await deps.require_operator(who, "replay_parked", service)
    asked = await _replay_request(request, deps)
    question = {"do": "replay", "id": parked_id, "payload": asked.payload, "note": f"{who.user}: {asked.note}"}
    return json_answer(await _parked(deps, service, question), status=202)


@router.delete(
    "/v1/parked/{service}/{parked_id}",
    summary="Give a parked message up",
    responses={200: {"description": "Dropped"}, **problem_schema_responses((401, 403, 404, 409, 422, 503))},
)
async def drop_parked(
    service: ParkingService,
    parked_id: _PARKED_ID,
    deps: Parts,
    who: Caller,
    note: Annotated[str, Query(max_length=1000)] = "",
) -> Response:
    await deps.require_operator(who, "drop_parked", service)
    question = {"do": "drop", "id": parked_id, "note": f"{who.user}: {note}"}
    return json_answer(await _parked(deps, service, question))


async def _replay_request(request: Request, deps: Deps) -> ReplayRequest:
    body = await body_of(request, deps.max_body_bytes)
    if not body.strip():
        return ReplayRequest()
    value, _ = read_body(body, request.headers.get("content-type", ""))
    asked: ReplayRequest = read_model(ReplayRequest, value)
    return asked


async def _parked(deps: Deps, service: str, question: dict[str, Any]) -> Any:
    subject = subjects.request(deps.pool, service, "parked")
    try:
        return orjson.loads(await deps.ask_raw(subject, orjson.dumps(question), service))
    except RequestFailed as error:
        if error.code == "not_found":
            raise refused("not_found", str(error), remedy="see berth parked list", field="parked_id") from None
        if error.code == "out_of_order":
            raise refused("out_of_order", str(error), remedy="replay or drop the earlier one first") from None
        if error.code == "bad_request":
            raise invalid([Fault("invalid_value", ("payload",), str(error), "mend the payload")]) from None
        raise unavailable(service, str(error)) from error
