"""The one write of the intake: a group of requests in one call of `gateway.take_in`, which is its own transaction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import asyncpg

from berth.store.database import Database, store_errors
from berth.store.outbox import OutboxRow

ALWAYS: Final = 0
WITH_CANCEL: Final = -1

KeyTuple = tuple[int, str, str, bytes, datetime]
JobTuple = tuple[int, str, str, str, str, int, int, int, datetime, str, str, bytes]
SecretTuple = tuple[int, str, str, str]
_KEYS: Final = 5
_JOBS: Final = 12
_SECRETS: Final = 4


@dataclass(slots=True)
class GroupRows:
    """What a group of requests wants stored, in the order of the function's parameters.

    outgoing: (number of the submission, `ALWAYS`, or `WITH_CANCEL`; entity; row).
    """

    keys: list[KeyTuple] = field(default_factory=list)
    jobs: list[JobTuple] = field(default_factory=list)
    secrets: list[SecretTuple] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    outgoing: list[tuple[int, str, OutboxRow]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Written:
    """What was stored: submissions that lost their key to an earlier one, jobs newly marked, and outbox rows by id."""

    lost: frozenset[int]
    cancelled: frozenset[str]
    rows: Sequence[tuple[int, OutboxRow]]


class GroupWriter:
    """Holds the prepared call. For one task at a time; the database's batch connection is its own."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._statement: asyncpg.prepared_stmt.PreparedStatement[asyncpg.Record] | None = None

    async def write(self, rows: GroupRows) -> Written:
        """Store a group, all or nothing.

        Raises:
            TransientError: whether it is stored is not known; the same rows may be written again.
        """
        outbox = self._database.outbox
        published = outbox.whole_batches()
        arguments = [
            *_columns(rows.keys, _KEYS),
            *_columns(rows.jobs, _JOBS),
            *_columns(rows.secrets, _SECRETS),
            sorted(set(rows.cancels)) or None,
            *_columns(
                [(n, e, r.event_id, r.subject, r.headers, r.payload) for n, e, r in rows.outgoing],
                6,
            ),
            published or None,
        ]
        try:
            with store_errors():
                statement = await self._prepared(len(arguments))
                row = await statement.fetchrow(*arguments)
        except BaseException as error:
            if not isinstance(error.__cause__ or error, asyncpg.PostgresError):
                self._database.drop_connection()  # cut off in the middle: what the server did is unknown
            raise
        assert row is not None
        outbox.written_off(published)
        lost, cancelled, ids = frozenset(row[0]), frozenset(row[1]), list(row[2])
        told = [r for n, e, r in rows.outgoing if _is_told(n, e, lost, cancelled)]
        if ids:
            outbox.stored(ids)
        return Written(lost, cancelled, list(zip(ids, told, strict=True)))

    async def _prepared(self, count: int) -> asyncpg.prepared_stmt.PreparedStatement[asyncpg.Record]:
        connection = await self._database.connection()
        if self._statement is None or self._connection is not connection:
            places = ", ".join(f"${n}" for n in range(1, count + 1))
            self._statement = await connection.prepare(f"SELECT * FROM gateway.take_in({places})")
            self._connection = connection
        return self._statement


def _is_told(number: int, entity: str, lost: frozenset[int], cancelled: frozenset[str]) -> bool:
    """As the function decides."""
    if number == WITH_CANCEL:
        return entity in cancelled
    return number == ALWAYS or number not in lost


def _columns(rows: Sequence[tuple[object, ...]], count: int) -> list[list[object] | None]:
    """Rows as one array for each column; None for each where there are no rows."""
    if not rows:
        return [None] * count
    return [list(column) for column in zip(*rows, strict=True)]
