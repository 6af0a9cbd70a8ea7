"""Rows to publish: written with the state change, published after the commit, written off with the next one.

`outbox_pending` holds one row for each committed batch with the ids that nobody has marked as published. The process
that published them remembers so (`OutboxBacklog`) and tells the database with its next transaction. After a crash the
sweeper finds them there and publishes them again, which is harmless: their message ids are the event ids.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

import asyncpg


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """A message to publish. `headers` is opaque here; `id` is 0 until it is stored."""

    event_id: str
    subject: str
    headers: bytes
    payload: bytes
    id: int = 0


class OutboxBacklog:
    """What this process has stored, and what of it has been published but not yet written off."""

    def __init__(self) -> None:
        self._open: dict[int, list[int]] = {}
        self._published: set[int] = set()

    def stored(self, ids: Sequence[int]) -> None:
        """A batch of ids was committed; its first one names it."""
        self._open[ids[0]] = list(ids)

    def published(self, ids: Collection[int]) -> None:
        """These were accepted by the broker."""
        self._published.update(ids)

    def not_written_off(self) -> list[int]:
        """Rows that this process knows as published, though the database does not yet."""
        return list(self._published)

    def whole_batches(self) -> list[int]:
        """Batches of this process whose every row is published: their `outbox_pending` rows can go."""
        if not self._published:
            return []
        return [batch for batch, ids in self._open.items() if self._published.issuperset(ids)]

    def written_off(self, batches: Collection[int]) -> None:
        """The database has committed that these batches are published."""
        for batch in batches:
            self._published.difference_update(self._open.pop(batch, ()))

    async def write_off(self, connection: asyncpg.Connection[asyncpg.Record], schema: str) -> None:
        """Mark everything that was published, also parts of a batch and rows that another process stored."""
        batches = self.whole_batches()
        parts = self._published.difference(*(self._open[batch] for batch in batches))
        if batches:
            await connection.execute(f"DELETE FROM {schema}.outbox_pending WHERE batch = ANY ($1)", batches)
            self.written_off(batches)
        if parts:
            async with connection.transaction():
                await connection.execute(_MARK.format(s=schema), sorted(parts))
                await connection.execute(f"DELETE FROM {schema}.outbox_pending WHERE ids = '{{}}'")
            self._published -= parts
            for members in self._open.values():
                members[:] = [member for member in members if member not in parts]


_MARK = """
UPDATE {s}.outbox_pending
SET ids = ARRAY(SELECT id FROM unnest(ids) AS id WHERE id <> ALL ($1::bigint[]) ORDER BY id)
WHERE ids && $1::bigint[]
"""

_UNPUBLISHED = """
SELECT o.id, o.event_id, o.subject, o.headers, o.payload
FROM {s}.outbox_pending p
CROSS JOIN LATERAL unnest(p.ids) AS wanted (id)
JOIN {s}.outbox o ON o.id = wanted.id AND o.slot = p.slot
WHERE p.created_at <= now() - $1::interval AND o.id <> ALL ($3::bigint[])
ORDER BY o.id
LIMIT $2
"""


async def unpublished_rows(
    connection: asyncpg.Connection[asyncpg.Record],
    schema: str,
    backlog: OutboxBacklog,
    *,
    older_than: timedelta,
    limit: int,
) -> list[OutboxRow]:
    """Rows waiting for at least `older_than`, in order of their ids, without those `backlog` knows as published."""
    rows = await connection.fetch(_UNPUBLISHED.format(s=schema), older_than, limit, backlog.not_written_off())
    return [OutboxRow(row[1], row[2], row[3], row[4], row[0]) for row in rows]
