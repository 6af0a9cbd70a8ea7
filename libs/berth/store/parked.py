"""Parked messages: what could not have its effect, and everything of the same entity that came after it.

An operator lists and shows them, drops them, or asks for a replay, with a mended payload if that is what it takes. The
service's own batch loop takes up what was asked for (`BatchTransaction.take_replays`) before the messages that arrive,
in the transaction that also holds the effect: a replay happens once, and in the order in which the messages came.

A replay always covers the first open message of an entity and all behind it. So an entity is either parked as a whole
or not at all, and its messages cannot overtake each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING

import asyncpg

from berth.store.errors import NoSuchParked, OutOfOrder

if TYPE_CHECKING:
    from berth.store.batch import BatchTransaction
    from berth.store.database import Database

PARKED_CHANNEL = "berth_parked"
REPLAYED_ENTITIES = 100  # at most in one batch; the next one takes the others


class ParkedStatus(StrEnum):
    """`parked` -> `replay_requested` -> `replayed`, or from either of the first two `dropped`. The last two are
    final."""

    PARKED = "parked"
    REPLAY_REQUESTED = "replay_requested"
    REPLAYED = "replayed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class ParkedMessage:
    """A message that cannot have its effect now. `entity` is what waits behind it; `headers` is opaque here."""

    entity: str
    event_id: str
    subject: str
    headers: bytes
    payload: bytes
    stream_seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class Parked:
    """A parked message as it is stored. `mended`: the payload to replay instead of the original one."""

    id: int
    message: ParkedMessage
    parked_at: datetime
    status: ParkedStatus
    note: str
    mended: bytes | None

    @property
    def payload(self) -> bytes:
        """What a replay applies."""
        return self.message.payload if self.mended is None else self.mended


@dataclass(frozen=True, slots=True)
class Replays:
    """What a batch has taken up. `messages` in order; `still_parked`: entities that stay parked; `more`: not all
    taken."""

    messages: Sequence[Parked]
    still_parked: frozenset[str]
    more: bool


async def list_parked(
    database: Database, *, entity: str | None = None, include_closed: bool = False, limit: int = 200
) -> list[Parked]:
    """Parked messages in the order of their arrival, of one entity if given."""
    async with database.reader() as connection:
        rows = await connection.fetch(
            f"SELECT {_COLUMNS} FROM {database.settings.schema}.parked WHERE ($1::text IS NULL OR entity = $1) "
            f"AND ($2 OR {_OPEN}) ORDER BY id LIMIT $3",
            entity,
            include_closed,
            limit,
        )
    return [_parked(row) for row in rows]


async def show_parked(database: Database, parked_id: int) -> Parked:
    """One parked message, whatever its status.

    Raises:
        NoSuchParked: there is none of that number.
    """
    async with database.reader() as connection:
        row = await connection.fetchrow(
            f"SELECT {_COLUMNS} FROM {database.settings.schema}.parked WHERE id = $1", parked_id
        )
    if row is None:
        raise NoSuchParked(parked_id)
    return _parked(row)


async def request_replay(
    database: Database, parked_id: int, *, payload: bytes | None = None, note: str = ""
) -> list[int]:
    """Ask for a replay of a message and of all of its entity behind it; returns their ids, in order.

    Asking again before the service has taken it up changes payload and note.

    Args:
        parked_id: the first open message of its entity.
        payload: replaces the payload of that message; the original stays on record.
        note: why, and by whom.

    Raises:
        NoSuchParked: it is not parked (any more).
        OutOfOrder: an earlier message of the entity is open; replay or drop that one.
    """
    schema = database.settings.schema
    async with database.reader() as connection, connection.transaction():
        entity = await _entity_of_open(connection, schema, parked_id)
        rows = await connection.fetch(
            f"SELECT id FROM {schema}.parked WHERE entity = $1 AND {_OPEN} ORDER BY id FOR UPDATE", entity
        )
        if rows[0][0] != parked_id:
            raise OutOfOrder(parked_id, rows[0][0], entity)
        await connection.execute(
            f"UPDATE {schema}.parked SET mended = $2, note = $3 WHERE id = $1", parked_id, payload, note
        )
        await connection.execute(
            f"UPDATE {schema}.parked SET status = 'replay_requested' WHERE entity = $1 AND {_OPEN}", entity
        )
        await _tell(connection, schema)
    return [row[0] for row in rows]


async def drop_parked(database: Database, parked_id: int, *, note: str = "") -> None:
    """Give a message up for good; what is parked behind it stays until it is replayed or dropped too.

    Raises:
        NoSuchParked: it is not parked (any more).
    """
    schema = database.settings.schema
    async with database.reader() as connection, connection.transaction():
        await _entity_of_open(connection, schema, parked_id)
        await connection.execute(
            f"UPDATE {schema}.parked SET status = 'dropped', note = $2 WHERE id = $1", parked_id, note
        )
        await _tell(connection, schema)


async def take_replays(tx: BatchTransaction) -> list[Parked]:
    """As `BatchTransaction.take_replays`."""
    return await tx.take_replays()


async def open_entities(connection: asyncpg.Connection[asyncpg.Record], schema: str) -> dict[str, bool]:
    """Entities with parked messages; whether their replay has been asked for."""
    rows = await connection.fetch(
        f"SELECT entity, bool_or(status = 'replay_requested') FROM {schema}.parked WHERE {_OPEN} "
        "GROUP BY entity ORDER BY min(id)"
    )
    return {row[0]: row[1] for row in rows}


async def take(connection: asyncpg.Connection[asyncpg.Record], schema: str, entities: dict[str, bool]) -> Replays:
    """Mark the replays asked for as done, inside the transaction of the batch that applies them.

    Also those messages that were parked behind the others after the operator had asked.
    """
    wanted = [entity for entity, is_wanted in entities.items() if is_wanted]
    taken = wanted[:REPLAYED_ENTITIES]
    rows = await connection.fetch(
        f"UPDATE {schema}.parked SET status = 'replayed' WHERE entity = ANY ($1) AND {_OPEN} RETURNING {_COLUMNS}",
        taken,
    )
    messages = sorted((_parked(row) for row in rows), key=lambda message: message.id)
    return Replays(messages, frozenset(entities).difference(taken), len(wanted) > len(taken))


async def _entity_of_open(connection: asyncpg.Connection[asyncpg.Record], schema: str, parked_id: int) -> str:
    entity = await connection.fetchval(
        f"SELECT entity FROM {schema}.parked WHERE id = $1 AND {_OPEN} FOR UPDATE", parked_id
    )
    if entity is None:
        raise NoSuchParked(parked_id)
    return str(entity)


async def _tell(connection: asyncpg.Connection[asyncpg.Record], schema: str) -> None:
    await connection.execute("SELECT pg_notify($1, $2)", PARKED_CHANNEL, schema)


_OPEN = "status IN ('parked', 'replay_requested')"  # as in the index `parked_open`
_COLUMNS = "id, entity, event_id, subject, headers, payload, stream_seq, reason, parked_at, status, note, mended"


def _parked(row: asyncpg.Record) -> Parked:
    return Parked(row[0], ParkedMessage(*row[1:8]), row[8], ParkedStatus(row[9]), row[10], row[11])
