"""What routes are given, and what nearly all of them do: who asks, may they, ask another service, note a denial."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NoReturn, Protocol, TypeVar, cast

import orjson
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from berth.bus.connection import Reply
from berth.bus.errors import BusError, RequestFailed
from berth.contracts import subjects
from berth.contracts.events import AccessDenied
from berth.store.errors import TransientError
from berth.telemetry.logs import get_logger
from services.gateway.access import Access
from services.gateway.catalogue import Catalogue
from services.gateway.event_feed import EventFeed
from services.gateway.ids import IdMaker
from services.gateway.intake import Accepted, Cancel, Submission, Tell
from services.gateway.metrics import GatewayMetrics
from services.gateway.principals import Principal
from services.gateway.problems import ApiError, refused
from services.gateway.store.queries import Activated, HeldProposal, JobFilter, StoredJob, StoredToken

SERVICE: Final = "gateway"
ASK_SECONDS: Final = 2.0
DENIAL_SECONDS: Final = 60.0
KEPT_DENIALS: Final = 10_000
KEPT_OWNERS: Final = 50_000
JSON: Final = "application/json"

M = TypeVar("M", bound=BaseModel)
_log: Final = get_logger(SERVICE)


class Reads(Protocol):
    """Reads of the gateway's own schema; `store.queries.Queries`."""

    async def job(self, job_id: str) -> StoredJob | None: ...
    async def jobs_named(self, name: str, tenants: Sequence[str] | None, *, limit: int = 20) -> list[StoredJob]: ...
    async def list_jobs(self, wanted: JobFilter, limit: int) -> list[StoredJob]: ...
    async def names_of(self, job_ids: Sequence[str]) -> dict[str, tuple[str, str]]: ...
    async def counts(self) -> dict[str, dict[str, int]]: ...
    async def secrets(self, job_id: str, names: Sequence[str]) -> dict[str, str]: ...
    async def policy(self, version: int | None = None) -> Activated | None: ...
    async def policy_versions(self, before: int | None, limit: int) -> list[Activated]: ...
    async def held_proposals(self, proposal_id: str | None = None) -> list[HeldProposal]: ...
    async def proposal(self, proposal_id: str) -> tuple[int | None, list[dict[str, str]]] | None: ...
    async def tokens(self, tenant: str | None) -> list[StoredToken]: ...
    async def revoke_token(self, token_id: str, tenant: str | None) -> bool: ...
    async def add_spans(self, spans: Sequence[tuple[str, str, bytes]]) -> None: ...
    async def spans(self, trace_ids: Sequence[str], *, limit: int = 5000) -> list[bytes]: ...


class Changes(Protocol):
    """Where changes are taken in; `intake.Intake`."""

    async def submit(self, submission: Submission) -> Accepted: ...
    async def cancel(self, cancel: Cancel) -> bool: ...
    async def tell(self, tell: Tell) -> None: ...


class Asks(Protocol):
    """Requests over the bus; `berth.bus.Connection`."""

    async def request(
        self, subject: str, data: bytes = b"", timeout: float = 2.0, headers: Mapping[str, str] | None = None
    ) -> Reply: ...


@dataclass(slots=True)
class Deps:
    """The parts behind the API."""

    pool: str
    reads: Reads
    changes: Changes
    bus: Asks
    access: Access
    catalogue: Catalogue
    feed: EventFeed
    metrics: GatewayMetrics
    ids: IdMaker = field(default_factory=IdMaker)
    max_body_bytes: int = 1 << 20
    max_batch: int = 2000
    max_streams: int = 200
    policy_wait_seconds: float = 5.0
    open_streams: int = 0
    owners: OrderedDict[str, str] = field(default_factory=OrderedDict)
    """job id -> tenant; never changes, so it is kept."""
    denials: OrderedDict[tuple[str, str, str], float] = field(default_factory=OrderedDict)

    # --- who ---------------------------------------------------------------------------------------------------------

    async def caller(self, request: Request) -> Principal:
        """Whose request it is.

        Raises:
            ApiError: 401.
        """
        if "\x00" in request.url.path or b"%00" in request.scope["query_string"]:
            raise refused("invalid", "the address holds a NUL character", remedy="remove it", status=400)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise unauthenticated(
                "no token was sent", "send Authorization: Bearer <token>; `berth up` prints where it is"
            )
        principal = await self.access.principal(token.strip())
        if principal is None:
            raise unauthenticated("the token is not known here", "use the token of this platform, or ask for a new one")
        return principal

    async def deny(self, who: Principal, action: str, target: str, *, hide: bool = False, remedy: str = "") -> NoReturn:
        """Record that somebody asked for what is not theirs, and refuse it. hide: say that it does not exist.

        The same denial is recorded once a minute: whoever asks in a loop does not fill the record.
        """
        key = (who.user, action, target)
        now = time.monotonic()
        if self.denials.get(key, -DENIAL_SECONDS) <= now - DENIAL_SECONDS:
            self.denials[key] = now
            self.denials.move_to_end(key)
            while len(self.denials) > KEPT_DENIALS:
                self.denials.popitem(last=False)
            denied = AccessDenied(actor=who.actor, action=action, target=target, at=datetime.now(UTC))
            try:
                # Of no tenant: who sees it in a feed would learn that what was asked for exists.
                await self.changes.tell(Tell(denied, self.ids(), who.user))
            except TransientError as error:
                _log.warning("a denial could not be recorded", action=action, reason=str(error))
        if hide:
            raise no_job(target)
        raise refused(
            "forbidden",
            f"{who.role.value} {who.user} may not {action.replace('_', ' ')}",
            remedy=remedy or "ask a tenant admin or an operator",
        )

    async def require_operator(self, who: Principal, action: str, target: str = "") -> None:
        """Go on for operators only."""
        if not who.is_operator:
            await self.deny(who, action, target, remedy="ask an operator of the pool")

    # --- jobs --------------------------------------------------------------------------------------------------------

    async def job(self, who: Principal, reference: str, action: str) -> StoredJob:
        """A job by id, or by a name that is unique among those the caller sees.

        Raises:
            ApiError: 404 (also for jobs of others, which is recorded), 409 for several of one name.
        """
        found = await self.reads.job(reference)
        if found is not None:
            if not who.may_read(found.tenant):
                await self.deny(who, action, found.job_id, hide=True)
            return found
        if who.sees_all:
            named = await self.reads.jobs_named(reference, None)
        else:
            named = await self.reads.jobs_named(reference, [who.tenant] if who.tenant else [])
        live = [job for job in named if not job.is_final]
        if len(named) == 1:
            return named[0]
        if len(live) == 1:
            return live[0]
        if not named:
            if not who.sees_all and await self.reads.jobs_named(reference, None, limit=1):
                await self.deny(who, action, reference, hide=True)
            raise no_job(reference)
        ids = ", ".join(job.job_id for job in named[:5])
        raise refused(
            "ambiguous_name",
            f"{len(named)} jobs are called {reference}",
            remedy=f"use one of the ids {ids}",
            field="job",
            value=reference,
        )

    async def owners_of(self, job_ids: set[str]) -> dict[str, str]:
        """job id -> tenant, for those that exist."""
        missing = [job_id for job_id in job_ids if job_id not in self.owners]
        if missing:
            for job_id, (tenant, _) in (await self.reads.names_of(missing)).items():
                self.owners[job_id] = tenant
            while len(self.owners) > KEPT_OWNERS:
                self.owners.popitem(last=False)
        return {job_id: self.owners[job_id] for job_id in job_ids if job_id in self.owners}

    # --- other services ----------------------------------------------------------------------------------------------

    async def ask(self, service: str, verb: str, question: BaseModel, answer: type[M]) -> M:
        """Ask another service.

        Raises:
            ApiError: 503 when it does not answer.
        """
        subject = subjects.request(self.pool, service, verb)
        return answer.model_validate_json(await self.ask_raw(subject, question.model_dump_json().encode(), service))

    async def ask_raw(self, subject: str, data: bytes, service: str, *, timeout: float = ASK_SECONDS) -> bytes:
        """As `ask`, in bytes; what the service itself refuses comes back as `RequestFailed`."""
        try:
            return (await self.bus.request(subject, data, timeout)).data
        except RequestFailed:
            raise
        except BusError as error:
            raise unavailable(service, str(error)) from error


def deps_of(request: Request) -> Deps:
    """The parts, from the application."""
    return cast("Deps", request.app.state.deps)


def unauthenticated(detail: str, remedy: str) -> ApiError:
    """401."""
    return refused("unauthenticated", detail, remedy=remedy, headers={"WWW-Authenticate": 'Bearer realm="berth"'})


def no_job(reference: str) -> ApiError:
    """404, the same for what does not exist and for what is somebody else's."""
    return refused("not_found", f"no job {reference}", remedy="see berth list", field="job", value=reference)


def unavailable(service: str, detail: str) -> ApiError:
    """503."""
    return refused(
        "service_unavailable",
        f"{service}: {detail}",
        remedy="try again in a moment; `berth status` shows what is down",
        headers={"Retry-After": "1"},
    )


def json_answer(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer from plain values or a model."""
    body = value.model_dump_json(by_alias=True).encode() if isinstance(value, BaseModel) else orjson.dumps(value)
    return Response(body, status, dict(headers or {}), JSON)


async def body_of(request: Request, limit: int) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413 above `limit`, without reading on.
    """
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit:
        raise too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise too_large(limit)
        parts.append(chunk)
    return b"".join(parts)


def too_large(limit: int) -> ApiError:
    """413."""
    return refused(
        "body_too_large",
        f"the body has more than {limit} bytes",
        remedy="split the batch, or keep large data in a file and pass its path",
        headers={"Connection": "close"},
    )
