"""What a deciding service keeps so that its decisions can be run again: its commit log, and checkpoints of its records.

A checkpoint is a copy of the records as they were after one commit. Replay begins at one: the first of a new schema is
empty, and later ones make it possible to begin at a later day, or after the oldest commits are gone. They are taken only
where the service rebuilds its core from the records anyway, so that replay begins with exactly what the service had.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import asyncpg
import orjson

from berth.store.database import Database

CHECKPOINT_EVERY = timedelta(days=1)
CHECKPOINTS_KEPT = timedelta(days=29)
"""A day less than commits: a replay that begins at the oldest one finds every commit behind it."""
PAGE_BYTES = 1 << 20
PAGE_ROWS = 2000


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The records as they were after commit `commit_id` (0: before the first), with the position in the stream.

    last_commit_id, last_seq: how far the commit log goes, up to the instant asked for.
    """

    commit_id: int
    taken_at: datetime
    stream_seq: int
    last_commit_id: int
    last_seq: int


async def take_checkpoint(database: Database, consumer: str, *, every: timedelta = CHECKPOINT_EVERY) -> bool:
    """Copy the records unless that was done within `every`; whether it was. Cost: one scan of the records, in the
    database. Others may commit meanwhile: the copy is of one snapshot."""
    schema = database.settings.schema
    async with database.reader() as connection, connection.transaction(isolation="repeatable_read"):
        if await connection.fetchval(f"SELECT max(taken_at) > now() - $1::interval FROM {schema}.checkpoint", every):
            return False
        commit_id = await connection.fetchval(
            f"INSERT INTO {schema}.checkpoint (commit_id, stream_seq) SELECT "
            f"(SELECT coalesce(max(id), 0) FROM {schema}.commits), "
            f"coalesce((SELECT stream_seq FROM {schema}.position WHERE consumer = $1), 0) "
            "ON CONFLICT DO NOTHING RETURNING commit_id",
            consumer,
        )
        if commit_id is None:
            return False
        await connection.execute(
            f"INSERT INTO {schema}.checkpoint_record (commit_id, kind, key, body) "
            f"SELECT $1, kind, key, body FROM {schema}.records",
            commit_id,
        )
    return True


async def drop_checkpoints(database: Database, *, kept: timedelta = CHECKPOINTS_KEPT) -> None:
    """Drop old ones, but never the newest."""
    schema = database.settings.schema
    async with database.reader() as connection:
        await connection.execute(
            f"DELETE FROM {schema}.checkpoint WHERE taken_at < now() - $1::interval "
            f"AND commit_id < (SELECT max(commit_id) FROM {schema}.checkpoint)",
            kept,
        )


async def find_checkpoint(
    database: Database, *, since: datetime | None, until: datetime | None = None
) -> Checkpoint | None:
    """The newest checkpoint taken by `since`, the oldest where that is earlier than all; with None the oldest.

    None: there is none yet.
    """
    schema = database.settings.schema
    async with database.reader() as connection:
        row = await connection.fetchrow(
            "SELECT commit_id, taken_at, stream_seq, coalesce(c.id, commit_id), coalesce(c.last_seq, stream_seq) "
            f"FROM {schema}.checkpoint LEFT JOIN (SELECT id, last_seq FROM {schema}.commits "
            "WHERE $2::timestamptz IS NULL OR clock <= $2 ORDER BY id DESC LIMIT 1) c "
            f"ON true WHERE commit_id = coalesce((SELECT max(commit_id) FROM {schema}.checkpoint WHERE taken_at <= $1), "
            f"(SELECT min(commit_id) FROM {schema}.checkpoint))",
            since,
            until,
        )
    return None if row is None else Checkpoint(*row)


async def checkpoint_page(database: Database, commit_id: int, *, kind: str, key: str) -> list[dict[str, str]]:
    """Records of a checkpoint behind (kind, key), in order, about a mebibyte; empty at the end."""
    schema = database.settings.schema
    async with database.reader() as connection:
        rows = await connection.fetch(
            f"SELECT kind, key, body FROM {schema}.checkpoint_record "
            "WHERE commit_id = $1 AND (kind, key) > ($2, $3) ORDER BY kind, key LIMIT $4",
            commit_id,
            kind,
            key,
            PAGE_ROWS,
        )
    page: list[dict[str, str]] = []
    size = 0
    for row in rows:
        size += len(row[2])
        if page and size > PAGE_BYTES:
            break
        page.append({"kind": row[0], "key": row[1], "body": row[2].decode()})
    return page


async def commits_page(database: Database, *, after: int) -> list[dict[str, Any]]:
    """Commits behind number `after`, in order, about a mebibyte; empty at the end."""
    schema = database.settings.schema
    async with database.reader() as connection:
        rows = await connection.fetch(
            "SELECT id, first_seq, last_seq, timers, clock, emitted, decisions_version, policy_version, digest, events "
            f"FROM {schema}.commits WHERE id > $1 ORDER BY id LIMIT $2",
            after,
            PAGE_ROWS,
        )
    page: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        size += 300 + len(row["events"] or b"")
        if page and size > PAGE_BYTES:
            break
        page.append(_commit(row))
    return page


def _commit(row: asyncpg.Record) -> dict[str, Any]:
    return {
        **{name: row[name] for name in ("id", "first_seq", "last_seq", "timers", "emitted")},
        "clock": row["clock"].isoformat(),
        "decisions_version": row["decisions_version"],
        "policy_version": row["policy_version"],
        "digest": row["digest"].hex(),
        "note": None if row["events"] is None else orjson.loads(row["events"]),
    }
