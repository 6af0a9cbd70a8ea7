"""What is asked of the record: events of an entity, the chain's soundness, use and waiting by group."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from berth.store.database import Database
from services.audit.chain import START, Link, first_break

_PAGE = 5000
_PAGE_BYTES = 1 << 20
_PAGE_ROWS = 1000
"""About a mebibyte of usual events: more would be read in vain."""


async def events_of(database: Database, *, entity: str | None, after: int, limit: int) -> list[dict[str, Any]]:
    """Recorded events behind number `after`, of one entity if given, oldest first."""
    async with database.reader() as connection:
        rows = await connection.fetch(
            "SELECT number, stream_seq, recorded_at, event_id, type, entity, tenant, payload FROM audit.record "
            "WHERE number > $1 AND ($2::text IS NULL OR entity = $2) ORDER BY number LIMIT $3",
            after,
            entity,
            limit,
        )
    return [
        {
            "number": row["number"],
            "stream_seq": row["stream_seq"],
            "recorded_at": row["recorded_at"].isoformat(),
            "event_id": row["event_id"],
            "type": row["type"],
            "entity": row["entity"],
            "tenant": row["tenant"],
            "payload": row["payload"].decode(errors="replace"),
        }
        for row in rows
    ]


async def record_page(database: Database, *, after: int) -> dict[str, Any]:
    """Events behind stream sequence `after`, in order, about a mebibyte, and the last sequence recorded by now."""
    async with database.reader() as connection:
        last = await connection.fetchval("SELECT stream_seq FROM audit.record ORDER BY number DESC LIMIT 1")
        rows = await connection.fetch(
            "SELECT stream_seq, recorded_at, type, payload FROM audit.record WHERE stream_seq > $1 "
            "ORDER BY stream_seq LIMIT $2",
            after,
            _PAGE_ROWS,
        )
    events: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        size += 120 + len(row["payload"])
        if events and size > _PAGE_BYTES:
            break
        events.append(
            {
                "seq": row["stream_seq"],
                "recorded_at": row["recorded_at"].isoformat(),
                "type": row["type"],
                "payload": row["payload"].decode(errors="replace"),
            }
        )
    return {"events": events, "last_seq": last or 0}


async def verify_chain(database: Database) -> dict[str, int | None]:
    """Read the whole record and check every link: `rows` read, `broken_at` the first bad number or None."""
    previous, number = START, 1
    while True:
        async with database.reader() as connection:
            rows = await connection.fetch(
                "SELECT number, recorded_at, payload, hash FROM audit.record WHERE number >= $1 ORDER BY number LIMIT $2",
                number,
                _PAGE,
            )
        if not rows:
            return {"rows": number - 1, "broken_at": None}
        links = [Link(row["number"], row["recorded_at"], row["payload"], row["hash"]) for row in rows]
        broken = first_break(links, previous=previous, number=number)
        if broken is not None:
            return {"rows": number - 1, "broken_at": broken}
        previous, number = links[-1].hash, links[-1].number + 1


async def usage(database: Database, *, since: datetime, until: datetime) -> list[dict[str, Any]]:
    """GPU-seconds used and seconds waited between two instants, by tenant, class and card type.

    What is still held counts up to `until`. Waiting is counted for attempts placed in the range.
    """
    async with database.reader() as connection:
        rows = await connection.fetch(_USAGE, since, until)
    return [dict(row) for row in rows]


_USAGE = """
SELECT tenant, class, card_type,
    count(*) FILTER (WHERE taken_at >= $1)::bigint AS starts,
    coalesce(sum(gpu_milli * greatest(0, extract(epoch FROM
        least(coalesce(released_at, $2), $2) - greatest(taken_at, $1)))) / 1000, 0)::float8 AS gpu_seconds,
    coalesce(sum(waited_seconds) FILTER (WHERE taken_at >= $1), 0)::float8 AS waited_seconds,
    coalesce(max(waited_seconds) FILTER (WHERE taken_at >= $1), 0)::float8 AS longest_wait_seconds
FROM audit.use
WHERE taken_at < $2 AND (released_at IS NULL OR released_at > $1)
GROUP BY tenant, class, card_type
ORDER BY tenant, class, card_type
"""
