"""What leaves the common tables again, and when.

| table | kept | leaves by |
| --- | --- | --- |
| outbox | 15 to 20 minutes after publishing; unpublished rows for ever | TRUNCATE of one slot |
| inbox | 8 days, a day longer than the stream keeps messages | DELETE of the oldest, a few thousand at a time |
| commits | 30 days | DELETE of the oldest |
| checkpoint | 30 days, one a day | DELETE of the oldest |
| parked | for good | |

Deletes are small so that they never hold up a batch; what one round leaves is the next round's.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

import asyncpg

from berth.store.common_v1 import SLOT_SECONDS, SLOTS
from berth.store.database import Database
from berth.store.errors import TransientError
from berth.store.recorded import drop_checkpoints

log = logging.getLogger(__name__)

INBOX_KEPT = timedelta(days=8)
COMMITS_KEPT = timedelta(days=30)
WRITE_OFF_EVERY_S = 5.0
PRUNE_EVERY_S = 60.0
ROWS_AT_ONCE = 5000


async def keep_house(database: Database, *, has_checkpoints: bool = False) -> None:
    """Write off what was published and prune, until cancelled. One for each process; several do not disturb each other.

    has_checkpoints: the schema is a deciding service's.
    """
    since_prune_s = PRUNE_EVERY_S
    while True:
        try:
            if database.outbox.not_written_off():
                await database.mark_published()
            if since_prune_s >= PRUNE_EVERY_S:
                since_prune_s = 0.0
                await prune(database)
                if has_checkpoints:
                    await drop_checkpoints(database)
        except TransientError as error:
            log.warning("housekeeping of %s will be tried again: %s", database.settings.schema, error)
        await asyncio.sleep(WRITE_OFF_EVERY_S)
        since_prune_s += WRITE_OFF_EVERY_S


async def prune(
    database: Database, *, inbox_kept: timedelta = INBOX_KEPT, commits_kept: timedelta = COMMITS_KEPT
) -> dict[str, int]:
    """One round; returns rows removed by table (for the outbox: 1 when a slot was emptied)."""
    schema = database.settings.schema
    async with database.reader() as connection:
        return {
            "outbox": await _empty_oldest_slot(connection, schema),
            "inbox": await _delete_oldest(connection, f"{schema}.inbox", "received_at", inbox_kept),
            "commits": await _delete_oldest(connection, f"{schema}.commits", "clock", commits_kept),
        }


async def _empty_oldest_slot(connection: asyncpg.Connection[asyncpg.Record], schema: str) -> int:
    """Empty the slot that is written next, unless something in it still waits to be published."""
    async with connection.transaction():
        slot = int(
            await connection.fetchval(f"SELECT ((extract(epoch FROM now())::bigint / {SLOT_SECONDS}) + 1) % {SLOTS}")
        )
        if await connection.fetchval(f"SELECT NOT EXISTS (SELECT 1 FROM {schema}.outbox_{slot})"):
            return 0
        await connection.execute(f"LOCK TABLE {schema}.outbox_{slot} IN ACCESS EXCLUSIVE MODE")
        if await connection.fetchval(f"SELECT EXISTS (SELECT 1 FROM {schema}.outbox_pending WHERE slot = $1)", slot):
            return 0
        await connection.execute(f"TRUNCATE {schema}.outbox_{slot}")
        return 1


async def _delete_oldest(
    connection: asyncpg.Connection[asyncpg.Record], table: str, column: str, kept: timedelta
) -> int:
    done = await connection.execute(
        f"DELETE FROM {table} WHERE ctid = ANY (ARRAY("
        f"SELECT ctid FROM {table} WHERE {column} < now() - $1::interval LIMIT {ROWS_AT_ONCE}))",
        kept,
    )
    return int(done.removeprefix("DELETE "))
