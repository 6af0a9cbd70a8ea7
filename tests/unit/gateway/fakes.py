"""The gateway's parts in memory, so that the API can be tried without servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from prometheus_client import CollectorRegistry

from berth.bus.connection import Reply
from berth.bus.errors import NoResponders
from berth.contracts.envelope import Fact
from berth.contracts.jobs import JobState
from services.gateway.access import Access
from services.gateway.api.deps import Deps
from services.gateway.catalogue import Catalogue
from services.gateway.event_feed import EventFeed, StoredEvent
from services.gateway.intake import Accepted, Cancel, KeyConflict, Submission, Tell
from services.gateway.metrics import GatewayMetrics
from services.gateway.principals import Principal, Role
from services.gateway.progress import JobProgress
from services.gateway.store.queries import Activated, HeldProposal, JobFilter, StoredJob, StoredToken

TOKENS = {
    "member": Principal("member-a", "team-a", Role.MEMBER),
    "admin-a": Principal("boss-a", "team-a", Role.TENANT_ADMIN),
    "viewer": Principal("viewer-a", "team-a", Role.VIEWER),
    "other": Principal("member-b", "team-b", Role.MEMBER),
    "operator": Principal("operator-1", None, Role.OPERATOR),
    "internal": Principal("berth", None, Role.INTERNAL),
}
POLICY: dict[str, Any] = {
    "card_types": {"H100-80G": {}, "A100-40G": {}},
    "tenants": {"team-a": {}, "team-b": {}, "视觉组": {}},
    "defaults": {"limits": {"gpus_per_job": 64, "workers_per_job": 64, "priority_max": 1000, "name_length": 100}},
}


class FakeStore:
    """Jobs, keys, tokens, policy and spans; reads and changes in one."""

    def __init__(self) -> None:
        self.jobs: dict[str, StoredJob] = {}
        self.job_secrets: dict[str, dict[str, str]] = {}
        self.keys: dict[tuple[str, str], tuple[bytes, list[str]]] = {}
        self.told: list[Fact] = []
        self.cancelled: list[Cancel] = []
        self.principals: dict[bytes, Principal] = {}
        self.token_rows: list[StoredToken] = []
        self.policies: list[Activated] = []
        self.proposals: dict[str, tuple[int | None, list[dict[str, str]]]] = {}
        self.held: list[HeldProposal] = []
        self.span_rows: dict[tuple[str, str], bytes] = {}
        self.on_tell: Callable[[Tell], None] = lambda _: None

    def activate(self, document: dict[str, Any]) -> int:
        version = len(self.policies) + 1
        self.policies.append(Activated(version, document, "operator-1", "", datetime.now(UTC)))
        return version

    def progress(self, job_id: str, **changes: Any) -> None:
        """Set what became of a job."""
        progress = JobProgress(**changes)
        self.jobs[job_id] = dataclasses.replace(
            self.jobs[job_id], state=progress.state, is_final=progress.is_final, progress=progress
        )

    # --- changes
    async def submit(self, submission: Submission) -> Accepted:
        slot = (submission.scope, submission.key)
        if submission.key and slot in self.keys:
            digest, ids = self.keys[slot]
            if digest != submission.digest:
                raise KeyConflict(submission.key)
            return Accepted(tuple((i, self.jobs[i].name, self.jobs[i].state) for i in ids), is_repeat=True)
        for job in submission.jobs:
            spec = job.spec
            self.jobs[job.job_id] = StoredJob(
                job_id=job.job_id,
                tenant=spec.tenant,
                name=spec.name,
                job_class=spec.job_class.value,
                state="submitted",
                is_final=False,
                priority=spec.priority,
                gpus=spec.total_gpus,
                workers=spec.total_workers,
                submitted_at=submission.submitted_at,
                submitted_by=submission.user,
                cancel_requested=False,
                trace_id=job.traceparent[3:35],
                progress=JobProgress(),
                spec=spec.model_dump_json(exclude_defaults=True).encode(),
            )
            if job.secrets:
                self.job_secrets[job.job_id] = dict(job.secrets)
        if submission.key:
            self.keys[slot] = (submission.digest, [job.job_id for job in submission.jobs])
        return Accepted(tuple((job.job_id, job.spec.name, "submitted") for job in submission.jobs))

    async def cancel(self, cancel: Cancel) -> bool:
        job = self.jobs[cancel.job_id]
        if job.cancel_requested or job.is_final:
            return False
        self.jobs[cancel.job_id] = dataclasses.replace(job, cancel_requested=True)
        self.cancelled.append(cancel)
        return True

    async def tell(self, tell: Tell) -> None:
        self.told.append(tell.data)
        self.on_tell(tell)

    # --- reads
    async def job(self, job_id: str) -> StoredJob | None:
        return self.jobs.get(job_id)

    async def jobs_named(self, name: str, tenants: Sequence[str] | None, *, limit: int = 20) -> list[StoredJob]:
        found = [j for j in self.jobs.values() if j.name == name and (tenants is None or j.tenant in tenants)]
        return sorted(found, key=lambda j: j.job_id, reverse=True)[:limit]

    async def list_jobs(self, wanted: JobFilter, limit: int) -> list[StoredJob]:
        def fits(job: StoredJob) -> bool:
            return (
                (wanted.tenants is None or job.tenant in wanted.tenants)
                and (wanted.states is None or job.state in wanted.states)
                and wanted.job_class in {None, job.job_class}
                and wanted.name in {None, job.name}
                and wanted.user in {None, job.submitted_by}
                and (wanted.before is None or job.job_id < wanted.before)
                and wanted.is_final in {None, job.is_final}
            )

        return sorted(filter(fits, self.jobs.values()), key=lambda j: j.job_id, reverse=True)[:limit]

    async def names_of(self, job_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
        return {i: (self.jobs[i].tenant, self.jobs[i].name) for i in job_ids if i in self.jobs}

    async def counts(self) -> dict[str, dict[str, int]]:
        counts: dict[str, dict[str, int]] = {}
        for job in self.jobs.values():
            if not job.is_final:
                states = counts.setdefault(job.tenant, {})
                states[job.state] = states.get(job.state, 0) + 1
        return counts

    async def secrets(self, job_id: str, names: Sequence[str]) -> dict[str, str]:
        return {n: v for n, v in self.job_secrets.get(job_id, {}).items() if n in names}

    async def policy_version(self) -> int:
        return len(self.policies)

    async def policy(self, version: int | None = None) -> Activated | None:
        found = [p for p in self.policies if version in {None, p.version}]
        return found[-1] if found else None

    async def policy_versions(self, before: int | None, limit: int) -> list[Activated]:
        return [p for p in reversed(self.policies) if before is None or p.version < before][:limit]

    async def held_proposals(self, proposal_id: str | None = None) -> list[HeldProposal]:
        return [held for held in self.held if proposal_id in {None, held.proposal_id}]

    async def card_types(self) -> frozenset[str]:
        return frozenset()

    async def proposal(self, proposal_id: str) -> tuple[int | None, list[dict[str, str]]] | None:
        return self.proposals.get(proposal_id)

    async def principal(self, token_hash: bytes) -> Principal | None:
        return self.principals.get(token_hash)

    async def add_token(self, token_hash: bytes, token_id: str, principal: Principal, *, created_by: str) -> None:
        self.principals[token_hash] = principal
        self.token_rows.append(StoredToken(token_id, principal, datetime.now(UTC), created_by, False))

    async def tokens(self, tenant: str | None) -> list[StoredToken]:
        return [row for row in self.token_rows if tenant in {None, row.principal.tenant}]

    async def revoke_token(self, token_id: str, tenant: str | None) -> bool:
        return any(row.token_id == token_id for row in await self.tokens(tenant))

    async def add_spans(self, spans: Sequence[tuple[str, str, bytes]]) -> None:
        self.span_rows.update({(trace, span): body for trace, span, body in spans})

    async def spans(self, trace_ids: Sequence[str], *, limit: int = 5000) -> list[bytes]:
        return [body for (trace, _), body in self.span_rows.items() if trace in trace_ids][:limit]


class FakeBus:
    """Answers requests from a table subject -> function of the parsed question."""

    def __init__(self) -> None:
        self.answers: dict[str, Callable[[Any], Any]] = {}

    async def request(
        self, subject: str, data: bytes = b"", timeout: float = 2.0, headers: Mapping[str, str] | None = None
    ) -> Reply:
        answer = self.answers.get(subject)
        if answer is None:
            raise NoResponders(f"nobody serves {subject}")
        found = answer(orjson.loads(data))
        return Reply(found.model_dump_json().encode() if hasattr(found, "model_dump_json") else orjson.dumps(found))


class FakeSource:
    """A stream in a list."""

    def __init__(self) -> None:
        self.events: list[StoredEvent] = []

    def add(self, type_: str, *, tenant: str, subject: str = "j1", data: dict[str, Any] | None = None) -> None:
        number = len(self.events) + 1
        body = {
            "id": f"e{number}",
            "type": type_,
            "time": "2026-03-02T08:00:00Z",
            "subject": subject,
            "tenant": tenant,
            "data": data or {},
        }
        self.events.append(StoredEvent(number, tenant, type_, orjson.dumps(body)))

    async def last_sequence(self) -> int:
        return len(self.events)

    async def read(self, after: int, limit: int) -> list[StoredEvent]:
        return self.events[after : after + limit]


@dataclasses.dataclass
class World:
    """A gateway whose surroundings are in memory."""

    store: FakeStore
    bus: FakeBus
    source: FakeSource
    deps: Deps


async def make_world(*, policy: dict[str, Any] | None = POLICY) -> World:
    """With a token for each of `TOKENS`, and a policy."""
    store, bus, source = FakeStore(), FakeBus(), FakeSource()
    access = Access(store)
    for token, principal in TOKENS.items():
        from services.gateway.access import hash_of

        await store.add_token(hash_of(token), f"id-{token}", principal, created_by="test")
    catalogue = Catalogue(store)
    if policy is not None:
        store.activate(policy)
        await catalogue.refresh()
    deps = Deps(
        pool="default",
        reads=store,
        changes=store,
        bus=bus,
        access=access,
        catalogue=catalogue,
        feed=EventFeed(source),
        metrics=GatewayMetrics(CollectorRegistry()),
        policy_wait_seconds=0.5,
    )
    return World(store, bus, source, deps)


def waiting(code: str, *, blocked_by: Sequence[str] = (), **facts: Any) -> dict[str, Any]:
    """Progress of a job that waits."""
    reason: dict[str, Any] = {"code": code, "facts": facts}
    if blocked_by:
        reason["blocked_by"] = list(blocked_by)
    return {"state": JobState.WAITING.value, "reasons": [reason], "waits_since": datetime.now(UTC).isoformat()}
