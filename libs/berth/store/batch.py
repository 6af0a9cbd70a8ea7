"""One batch, one transaction: what has arrived goes in, what follows from it goes out, or nothing happened.

Usage, in this order (`notes` of the protocol are in DESIGN section 5):

    async with database.batch() as tx:
        tx.check_epoch("placement", epoch)                  # Deposed when another process leads by now
        fresh = await tx.new_ids(event_ids)                 # repeats are left out
        ...                                                 # apply the fresh events, decide
        tx.upsert_records(...); tx.add_outbox(...); tx.set_position(...); tx.log_commit(...)
    publish(...); database.forget_outbox(tx.outbox_ids)     # written off by the next batch

Nothing but `new_ids` talks to the server before the end of the block. Then one function call (`berth_commit`) writes
everything, checks the epoch and is its own transaction: two round trips for a batch instead of nine. Measured in
memory: 0.5 ms for one event in and one message out, 12 ms for 500 of each; a single statement of data-modifying CTEs
costs the same. Looking ids up before the transaction is safe because the function inserts them and refuses the batch
when one of them came in elsewhere in between (`InboxConflict`: run the batch again).

A service with statements of its own asks for `await tx.con()`: from then on everything runs in an explicit
transaction on that connection, still with the one call at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Self

import asyncpg
from asyncpg.transaction import Transaction

from berth.store.common_v1 import COMMIT_PARAMETERS
from berth.store.database import store_errors
from berth.store.errors import Unreachable
from berth.store.outbox import OutboxRow
from berth.store.parked import Parked, ParkedMessage, open_entities, take

if TYPE_CHECKING:
    from berth.store.database import Database

__all__ = ["BatchTransaction", "CommitEntry", "OutboxRow", "Parked", "ParkedMessage"]

PARAMETER_ORDER = tuple(name for name, _ in COMMIT_PARAMETERS)


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """What replay needs to know about a batch.

    first_seq, last_seq: of the messages taken; first behind last where there were none. digest: over the emissions.
    events: what the range does not tell, see `berth.decisions.recording.Note`.
    """

    first_seq: int
    last_seq: int
    timers: int
    clock: datetime
    emitted: int
    decisions_version: str
    policy_version: str
    digest: bytes
    events: bytes | None = None


class BatchTransaction:
    """Made by `Database.batch`. Commits at the end of its block, unless the block raises or `roll_back` was called."""

    def __init__(self, database: Database, lock: asyncio.Lock) -> None:
        self._database = database
        self._lock = lock
        self._schema = database.settings.schema
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._explicit: Transaction | None = None
        self._fence: tuple[str, int] | None = None
        self._seen: set[str] = set()
        self._records: dict[tuple[str, str], bytes | None] = {}
        self._outbox: list[OutboxRow] = []
        self._positions: dict[tuple[str, str], int] = {}
        self._parked: list[ParkedMessage] = []
        self._parked_now: set[str] = set()
        self._still_parked: frozenset[str] | None = None
        self._replays_left = False
        self._more_replays = False
        self._entry: CommitEntry | None = None
        self._is_abandoned = False
        self.outbox_ids: list[int] = []
        """After the commit: the ids of the rows of `add_outbox`, in order."""

    # --- reading ----------------------------------------------------------------------------------------------------

    async def new_ids(self, event_ids: Iterable[str]) -> set[str]:
        """Those of `event_ids` that had no effect yet; each counts once, however often it is given.

        They enter the inbox with this batch. An id asked for a second time in the same batch is not new any more.
        """
        asked = set(event_ids) - self._seen
        if not asked:
            return asked
        with store_errors():
            known = await self._open().fetch(
                f"SELECT event_id FROM {self._schema}.inbox WHERE event_id = ANY ($1)", list(asked)
            )
        asked.difference_update([row[0] for row in known])
        self._seen |= asked
        return asked

    async def take_replays(self) -> list[Parked]:
        """The parked messages whose replay was asked for, in order; replayed when this batch commits.

        Call it when `Database.parked_changed` is set; a batch that fails sets it again. Apply what it returns before
        the messages that arrive and without asking `new_ids`, which knows their ids; like for those,
        `is_entity_parked` tells whether an earlier one of the entity was parked again in this very batch.
        """
        self._database.parked_changed.clear()
        self._replays_left = True  # until the commit says otherwise
        with store_errors():
            entities = await open_entities(self._open(), self._schema)
            if not any(entities.values()):
                self._still_parked = frozenset(entities)
                return []
            replays = await take(await self.con(), self._schema, entities)
        self._still_parked = replays.still_parked
        self._more_replays = replays.more
        return list(replays.messages)

    def is_entity_parked(self, entity: str) -> bool:
        """Whether messages of `entity` must be parked behind earlier ones. From memory."""
        if entity in self._parked_now:
            return True
        return entity in (self._database.parked_entities if self._still_parked is None else self._still_parked)

    # --- collecting -------------------------------------------------------------------------------------------------

    def check_epoch(self, lease: str, epoch: int) -> None:
        """Commit only while `lease` is at `epoch`; otherwise the end of the block raises `Deposed`."""
        self._fence = (lease, epoch)

    def upsert_records(self, records: Iterable[tuple[str, str, bytes]]) -> None:
        """Store (kind, key, body). Within a batch the last word on a key wins, of this and `delete_records`."""
        for kind, key, body in records:
            self._records[kind, key] = body

    def delete_records(self, keys: Iterable[tuple[str, str]]) -> None:
        """Delete (kind, key); one that is not there is no error."""
        for kind, key in keys:
            self._records[kind, key] = None

    def add_outbox(self, rows: Iterable[OutboxRow]) -> None:
        """Store messages to publish after the commit; `outbox_ids` has their ids then."""
        self._outbox.extend(rows)

    def forget_outbox(self, ids: Collection[int]) -> None:
        """Rows of earlier batches that are published; as `Database.forget_outbox`."""
        self._database.forget_outbox(ids)

    def set_position(self, consumer: str, stream_seq: int, *, stream: str = "BERTH_EVENTS") -> None:
        """The last message of `stream` whose effect is stored with this batch. It never goes back here."""
        self._positions[consumer, stream] = max(stream_seq, self._positions.get((consumer, stream), 0))

    def park(self, message: ParkedMessage) -> None:
        """Keep a message for an operator. Later ones of its entity must be parked too: `is_entity_parked`."""
        self._parked.append(replace(message, reason=message.reason.replace("\x00", "")))
        self._parked_now.add(message.entity)

    def log_commit(self, entry: CommitEntry) -> None:
        """Describe this batch in the commit log."""
        self._entry = entry

    async def con(self) -> asyncpg.Connection[asyncpg.Record]:
        """The connection inside this batch's transaction, for statements of the service's own.

        Plans on it use indexes only (see `Database`): meant for bulk writes and look-ups by key. Turn errors of the
        world into `TransientError` with `store_errors`.
        """
        connection = self._open()
        if self._explicit is None:
            with store_errors():
                transaction = connection.transaction()
                await transaction.start()
            self._explicit = transaction
        return connection

    def roll_back(self) -> None:
        """Leave no trace of this batch, though its block ends well."""
        self._is_abandoned = True

    @property
    def stored_outbox(self) -> list[OutboxRow]:
        """After the commit: the rows of `add_outbox` with their ids, in order."""
        return [
            OutboxRow(row.event_id, row.subject, row.headers, row.payload, row_id)
            for row, row_id in zip(self._outbox, self.outbox_ids, strict=True)
        ]

    # --- the block --------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._lock.acquire()
        try:
            self._connection = await self._database.connection()
        except BaseException:
            self._lock.release()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._is_abandoned:
                await self._commit()
            else:
                await self._undo(error)
        finally:
            self._connection = None
            if self._replays_left:
                self._database.parked_changed.set()
            self._lock.release()

    async def _commit(self) -> None:
        published = self._database.outbox.whole_batches()
        arguments = self._arguments(published)
        connection = self._open()
        try:
            with store_errors():
                ids = await self._write(connection, arguments) if arguments else None
                if self._explicit is not None:
                    await self._explicit.commit()
        except BaseException as error:
            if isinstance(error, asyncpg.PostgresError) or isinstance(error.__cause__, asyncpg.PostgresError):
                await self._undo()
            else:
                self._database.drop_connection()  # cut off in the middle: what the server did is unknown
            raise
        self._database.outbox.written_off(published)
        if ids:
            self.outbox_ids = list(ids)
            self._database.outbox.stored(ids)
        if self._still_parked is not None:
            self._database.parked_entities = set(self._still_parked)
        self._database.parked_entities |= self._parked_now
        self._replays_left = self._more_replays

    async def _write(
        self, connection: asyncpg.Connection[asyncpg.Record], arguments: Mapping[str, object]
    ) -> Sequence[int] | None:
        statement = await self._database.commit_statement(connection)
        ids: Sequence[int] | None = await statement.fetchval(*map(arguments.get, PARAMETER_ORDER))
        return ids

    async def _undo(self, error: BaseException | None = None) -> None:
        if isinstance(error, Unreachable):
            self._database.drop_connection()
        elif self._explicit is not None:
            try:
                with store_errors():
                    await self._explicit.rollback()
            except Exception:
                self._database.drop_connection()

    def _open(self) -> asyncpg.Connection[asyncpg.Record]:
        if self._connection is None:
            raise RuntimeError("a batch is used inside its block only")
        return self._connection

    # --- arguments of berth_commit ----------------------------------------------------------------------------------

    def _arguments(self, published: list[int]) -> dict[str, object]:
        """What is to be written, by parameter; empty when there is nothing worth a transaction.

        Write-offs alone are not: they wait for company, or for `Database.mark_published`.
        """
        arguments = self._inbox_and_position() | self._record_arrays() | self._outbox_arrays() | self._parked_arrays()
        if self._entry is not None:
            entry = self._entry
            arguments |= {f"log_{name}": getattr(entry, name) for name in CommitEntry.__slots__}
        if not arguments and self._explicit is None:
            return {}
        if self._fence is not None:
            arguments |= {"lease": self._fence[0], "epoch": self._fence[1]}
        if published:
            arguments["published"] = published
        return arguments

    def _inbox_and_position(self) -> dict[str, object]:
        arguments: dict[str, object] = {}
        if self._seen:
            arguments["seen"] = sorted(self._seen)  # one order everywhere: two writers wait, but never for each other
        if self._positions:
            arguments["consumers"] = [consumer for consumer, _ in self._positions]
            arguments["streams"] = [stream for _, stream in self._positions]
            arguments["stream_seqs"] = list(self._positions.values())
        return arguments

    def _record_arrays(self) -> dict[str, object]:
        kept = sorted((kind, key, body) for (kind, key), body in self._records.items() if body is not None)
        gone = sorted(key for key, body in self._records.items() if body is None)
        arguments: dict[str, object] = {}
        if kept:
            kinds, keys, bodies = zip(*kept, strict=True)
            arguments |= {"kinds": kinds, "keys": keys, "bodies": bodies}
        if gone:
            gone_kinds, gone_keys = zip(*gone, strict=True)
            arguments |= {"gone_kinds": gone_kinds, "gone_keys": gone_keys}
        return arguments

    def _outbox_arrays(self) -> dict[str, object]:
        if not self._outbox:
            return {}
        return {
            "out_event_ids": [row.event_id for row in self._outbox],
            "out_subjects": [row.subject for row in self._outbox],
            "out_headers": [row.headers for row in self._outbox],
            "out_payloads": [row.payload for row in self._outbox],
        }

    def _parked_arrays(self) -> dict[str, object]:
        if not self._parked:
            return {}
        return {
            "parked_entities": [message.entity for message in self._parked],
            "parked_event_ids": [message.event_id for message in self._parked],
            "parked_subjects": [message.subject for message in self._parked],
            "parked_headers": [message.headers for message in self._parked],
            "parked_payloads": [message.payload for message in self._parked],
            "parked_seqs": [message.stream_seq for message in self._parked],
            "parked_reasons": [message.reason for message in self._parked],
        }
