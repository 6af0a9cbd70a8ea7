"""What the API reads from the gateway's schema, and the few rare writes that are no events. Plain asyncpg."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import asyncpg
import orjson

from berth.store.database import Database
from services.gateway.principals import Principal, Role
from services.gateway.progress import JobProgress

_COLUMNS: Final = (
    "job_id, tenant, name, class, state, is_final, priority, gpus, workers, submitted_at, submitted_by, "
    "cancel_requested, trace_id, view"
)


@dataclass(frozen=True, slots=True)
class StoredJob:
    """A job's row. `spec`: JSON, only where it was asked for."""

    job_id: str
    tenant: str
    name: str
    job_class: str
    state: str
    is_final: bool
    priority: int
    gpus: int
    workers: int
    submitted_at: datetime
    submitted_by: str
    cancel_requested: bool
    trace_id: str
    progress: JobProgress
    spec: bytes | None = None


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs a list holds; None: whatever. `before`: continues a page. tenants None: all."""

    tenants: tuple[str, ...] | None = None
    states: tuple[str, ...] | None = None
    job_class: str | None = None
    name: str | None = None
    user: str | None = None
    before: str | None = None
    is_final: bool | None = None


@dataclass(frozen=True, slots=True)
class StoredToken:
    """A token without itself."""

    token_id: str
    principal: Principal
    created_at: datetime
    created_by: str
    is_revoked: bool


@dataclass(frozen=True, slots=True)
class Activated:
    """A policy version. approver: the second operator, where one was needed."""

    version: int
    document: dict[str, Any]
    author: str
    why: str
    activated_at: datetime
    approver: str = ""


@dataclass(frozen=True, slots=True)
class HeldProposal:
    """A proposed policy that waits for a second operator. based_on: the version that was in force."""

    proposal_id: str
    document: dict[str, Any]
    author: str
    why: str
    proposed_at: datetime
    based_on: int
    required_for: str


_SELECT_POLICY = "SELECT version, document, author, why, activated_at, approver FROM gateway.policy"


def _activated(row: asyncpg.Record) -> Activated:
    return Activated(row[0], orjson.loads(row[1]), *row[2:])


class Queries:
    """Reads over the pool of connections. Raises `TransientError` while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- jobs -------------------------------------------------------------------------------------------------------

    async def job(self, job_id: str) -> StoredJob | None:
        """A job by its id, with its specification."""
        async with self._database.reader() as connection:
            row = await connection.fetchrow(f"SELECT {_COLUMNS}, spec FROM gateway.job WHERE job_id = $1", job_id)
        return None if row is None else _job(row)

    async def jobs_named(self, name: str, tenants: Sequence[str] | None, *, limit: int = 20) -> list[StoredJob]:
        """Jobs of this name, newest first, with specifications."""
        async with self._database.reader() as connection:
            rows = await connection.fetch(
                f"SELECT {_COLUMNS}, spec FROM gateway.job WHERE name = $1 AND ($2::text[] IS NULL OR tenant = ANY ($2)) "
                "ORDER BY job_id DESC LIMIT $3",
                name,
                None if tenants is None else list(tenants),
                limit,
            )
        return [_job(row) for row in rows]

    async def list_jobs(self, wanted: JobFilter, limit: int) -> list[StoredJob]:
        """A page, newest first."""
        tests, values = _where(wanted)
        where = f"WHERE {' AND '.join(tests)} " if tests else ""
        query = f"SELECT {_COLUMNS} FROM gateway.job {where}ORDER BY job_id DESC LIMIT {int(limit)}"
        async with self._database.reader() as connection:
            return [_job(row) for row in await connection.fetch(query, *values)]

    async def names_of(self, job_ids: Sequence[str]) -> dict[str, tuple[str, str]]:
        """job id -> (tenant, name), for those that exist."""
        if not job_ids:
            return {}
        async with self._database.reader() as connection:
            rows = await connection.fetch(
                "SELECT job_id, tenant, name FROM gateway.job WHERE job_id = ANY ($1)", list(job_ids)
            )
        return {row[0]: (row[1], row[2]) for row in rows}

    async def counts(self) -> dict[str, dict[str, int]]:
        """tenant -> state -> number of jobs that are not over."""
        async with self._database.reader() as connection:
            rows = await connection.fetch(
                "SELECT tenant, state, count(*) FROM gateway.job WHERE NOT is_final GROUP BY tenant, state"
            )
        found: dict[str, dict[str, int]] = {}
        for tenant, state, count in rows:
            found.setdefault(tenant, {})[state] = count
        return found

    async def secrets(self, job_id: str, names: Sequence[str]) -> dict[str, str]:
        """Secret values of a job that is not over."""
        async with self._database.reader() as connection:
            rows = await connection.fetch(
                "SELECT name, value FROM gateway.secret WHERE job_id = $1 AND name = ANY ($2)", job_id, list(names)
            )
        return {row[0]: row[1] for row in rows}

    # --- policy and nodes -------------------------------------------------------------------------------------------

    async def policy_version(self) -> int:
        """Version of the newest policy; 0: none."""
        async with self._database.reader() as connection:
            return int(await connection.fetchval("SELECT coalesce(max(version), 0) FROM gateway.policy"))

    async def policy(self, version: int | None = None) -> Activated | None:
        """The newest policy, or one by its version."""
        async with self._database.reader() as connection:
            row = await connection.fetchrow(
                f"{_SELECT_POLICY} WHERE $1::bigint IS NULL OR version = $1 ORDER BY version DESC LIMIT 1", version
            )
        return None if row is None else _activated(row)

    async def policy_versions(self, before: int | None, limit: int) -> list[Activated]:
        """Versions below `before` (None: from the newest on), newest first."""
        async with self._database.reader() as connection:
            rows = await connection.fetch(
                f"{_SELECT_POLICY} WHERE $1::bigint IS NULL OR version < $1 ORDER BY version DESC LIMIT $2",
                before,
                limit,
            )
        return [_activated(row) for row in rows]

    async def held_proposals(self, proposal_id: str | None = None) -> list[HeldProposal]:
        """Proposals that wait for a second operator, oldest first; or the one of this id, if it does."""
        async with self._database.reader() as connection:
            rows = await connection.fetch(
                "SELECT proposal_id, document, author, why, proposed_at, based_on, required_for "
                "FROM gateway.open_proposal WHERE is_held AND ($1::text IS NULL OR proposal_id = $1) "
                "ORDER BY proposed_at, proposal_id LIMIT 1000",
                proposal_id,
            )
        return [HeldProposal(row[0], orjson.loads(row[1]), *row[2:]) for row in rows]

    async def card_types(self) -> frozenset[str]:
        """What nodes have reported."""
        async with self._database.reader() as connection:
            rows = await connection.fetch("SELECT DISTINCT unnest(card_types) FROM gateway.node")
        return frozenset(row[0] for row in rows)

    async def proposal(self, proposal_id: str) -> tuple[int | None, list[dict[str, str]]] | None:
        """What became of a proposal: version, or None and problems; None while it is open."""
        async with self._database.reader() as connection:
            row = await connection.fetchrow(
                "SELECT policy_version, problems FROM gateway.proposal WHERE proposal_id = $1", proposal_id
            )
        return None if row is None else (row[0], orjson.loads(row[1]) if row[1] else [])

    # --- tokens -----------------------------------------------------------------------------------------------------

    async def principal(self, token_hash: bytes) -> Principal | None:
        """Whose token it is; None: nobody's, or revoked."""
        async with self._database.reader() as connection:
            row = await connection.fetchrow(
                "SELECT user_name, tenant, role FROM gateway.token WHERE token_hash = $1 AND revoked_at IS NULL",
                token_hash,
            )
        return None if row is None else Principal(row[0], row[1], Role(row[2]))

    async def tokens(self, tenant: str | None) -> list[StoredToken]:
        """All tokens, or those of one tenant, newest first."""
        async with self._database.reader() as connection:
            rows = await connection.fetch(
                "SELECT token_id, user_name, tenant, role, created_at, created_by, revoked_at IS NOT NULL "
                "FROM gateway.token WHERE role <> 'internal' AND ($1::text IS NULL OR tenant = $1) "
                "ORDER BY created_at DESC, token_id LIMIT 1000",
                tenant,
            )
        return [StoredToken(row[0], Principal(row[1], row[2], Role(row[3])), row[4], row[5], row[6]) for row in rows]

    async def add_token(self, token_hash: bytes, token_id: str, principal: Principal, *, created_by: str) -> None:
        """Store a token by its hash; one that is there already is renewed."""
        async with self._database.reader() as connection:
            await connection.execute(
                "INSERT INTO gateway.token (token_hash, token_id, user_name, tenant, role, created_by) "
                "VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (token_hash) DO UPDATE "
                "SET user_name = excluded.user_name, tenant = excluded.tenant, role = excluded.role, revoked_at = NULL",
                token_hash,
                token_id,
                principal.user,
                principal.tenant,
                principal.role.value,
                created_by,
            )

    async def revoke_token(self, token_id: str, tenant: str | None) -> bool:
        """Whether there was such a token (of this tenant, if given)."""
        async with self._database.reader() as connection:
            done = await connection.fetchval(
                "UPDATE gateway.token SET revoked_at = coalesce(revoked_at, now()) "
                "WHERE token_id = $1 AND role <> 'internal' AND ($2::text IS NULL OR tenant = $2) RETURNING 1",
                token_id,
                tenant,
            )
        return done is not None

    # --- spans ------------------------------------------------------------------------------------------------------

    async def add_spans(self, spans: Sequence[tuple[str, str, bytes]]) -> None:
        """Store (trace id, span id, JSON); repeats change nothing."""
        async with self._database.reader() as connection:
            await connection.execute(
                "INSERT INTO gateway.span (trace_id, span_id, body) "
                "SELECT * FROM unnest($1::text[], $2::text[], $3::bytea[]) ON CONFLICT DO NOTHING",
                [span[0] for span in spans],
                [span[1] for span in spans],
                [span[2] for span in spans],
            )

    async def spans(self, trace_ids: Sequence[str], *, limit: int = 5000) -> list[bytes]:
        """Spans of traces, as stored."""
        async with self._database.reader() as connection:
            rows = await connection.fetch(
                "SELECT body FROM gateway.span WHERE trace_id = ANY ($1) LIMIT $2", list(trace_ids), limit
            )
        return [row[0] for row in rows]

    async def prune(self, *, spans_kept: int, spans_hours: int) -> None:
        """Drop spans past their time or number, and expired keys."""
        async with self._database.reader() as connection:
            await connection.execute(
                "DELETE FROM gateway.span WHERE received_at < now() - make_interval(hours => $1)", spans_hours
            )
            estimate = await connection.fetchval(
                "SELECT greatest(reltuples, 0)::bigint FROM pg_class WHERE oid = 'gateway.span'::regclass"
            )
            if int(estimate) > spans_kept:
                await connection.execute(
                    "DELETE FROM gateway.span WHERE received_at <= "
                    "(SELECT received_at FROM gateway.span ORDER BY received_at DESC OFFSET $1 LIMIT 1)",
                    spans_kept,
                )
            await connection.execute("DELETE FROM gateway.idempotency WHERE expires_at < now()")


def _where(wanted: JobFilter) -> tuple[list[str], list[object]]:
    columns: list[tuple[str, object]] = [
        ("tenant = ANY (${})", None if wanted.tenants is None else list(wanted.tenants)),
        ("state = ANY (${})", None if wanted.states is None else list(wanted.states)),
        ("class = ${}", wanted.job_class),
        ("name = ${}", wanted.name),
        ("submitted_by = ${}", wanted.user),
        ("job_id < ${}", wanted.before),
    ]
    tests: list[str] = []
    values: list[object] = []
    for test, value in columns:
        if value is not None:
            values.append(value)
            tests.append(test.format(len(values)))
    if wanted.is_final is not None:
        tests.append("is_final" if wanted.is_final else "NOT is_final")
    return tests, values


def _job(row: asyncpg.Record) -> StoredJob:
    return StoredJob(
        job_id=row["job_id"],
        tenant=row["tenant"],
        name=row["name"],
        job_class=row["class"],
        state=row["state"],
        is_final=row["is_final"],
        priority=row["priority"],
        gpus=row["gpus"],
        workers=row["workers"],
        submitted_at=row["submitted_at"],
        submitted_by=row["submitted_by"],
        cancel_requested=row["cancel_requested"],
        trace_id=row["trace_id"],
        progress=JobProgress.from_json(row["view"]),
        spec=row["spec"] if len(row) > 14 else None,
    )
