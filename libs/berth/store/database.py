"""One service's way to its schema: a dedicated connection for batches, a small pool for reads, an engine for the rest.

Batches hold a connection of their own because every release to a pool costs a reset round trip, which doubles the
price of a short statement. The SQLAlchemy engine is made on first use and meant for administration: the hot path is
plain asyncpg.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Self, TypedDict

import asyncpg

from berth.store.common_v1 import COMMIT_PARAMETERS
from berth.store.outbox import OutboxBacklog, OutboxRow, unpublished_rows
from berth.store.parked import PARKED_CHANNEL, open_entities
from berth.store.retry import as_store_error

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine

    from berth.store.batch import BatchTransaction

READ_POOL_SIZE = 4
SCHEMA_NAME = re.compile(r"[a-z][a-z0-9_]{0,40}")

# Batches look rows up by key in tables that were empty when their plans were made and are never scanned whole. A plan
# made early must still be right when the table has grown, so the planner is left no choice but the index.
_BATCH_PLANS = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where a service keeps its state.

    dsn: `postgresql://role:password@host/database`, straight to the server: session locks and prepared statements do
    not survive a pooler in transaction mode. schema: the service's own. application_name: shown in the server's
    activity view and log.
    """

    dsn: str
    schema: str
    application_name: str = "berth"
    command_timeout_s: float = 10.0
    connect_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if not SCHEMA_NAME.fullmatch(self.schema):
            raise ValueError(f"schema {self.schema!r} is no plain name")  # it is written into statements as it is


class Database:
    """A service's connections. Make one for each process, `open` it, `close` it."""

    def __init__(self, settings: StoreSettings) -> None:
        self.settings = settings
        self.outbox = OutboxBacklog()
        self.parked_entities: set[str] = set()
        self.parked_changed = asyncio.Event()
        """Set when an operator asked for a replay or dropped something, and after each reconnect."""
        self._batch_lock = asyncio.Lock()
        self._batch_connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._commit_statement: asyncpg.prepared_stmt.PreparedStatement[asyncpg.Record] | None = None
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None
        self._engine: AsyncEngine | None = None

    async def open(self) -> Self:
        """Connect once, so that a wrong address or password shows at start.

        Raises:
            Unreachable: the server is away; worth another try.
        """
        async with self._batch_lock:
            await self.connection()
        return self

    async def close(self) -> None:
        """Close everything; a batch that is still running fails."""
        if self._batch_connection is not None:
            await _close(self._batch_connection)
            self._batch_connection = None
        if self._pool is not None:
            pool, self._pool = self._pool, None
            try:
                async with asyncio.timeout(self.settings.connect_timeout_s):
                    await pool.close()
            except (TimeoutError, OSError, asyncpg.InterfaceError):
                pool.terminate()
        if self._engine is not None:
            await self._engine.dispose()
            self._engine = None

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- batches ----------------------------------------------------------------------------------------------------

    def batch(self) -> BatchTransaction:
        """A transaction on the dedicated connection; a second one waits until the first is done."""
        from berth.store.batch import BatchTransaction

        return BatchTransaction(self, self._batch_lock)

    async def connection(self) -> asyncpg.Connection[asyncpg.Record]:
        """The dedicated connection, connected again when it was lost. For whoever holds the batch lock."""
        if self._batch_connection is None or self._batch_connection.is_closed():
            with store_errors():
                connection = await connect(self.settings, "batch", **_BATCH_PLANS)
                try:
                    await connection.add_listener(PARKED_CHANNEL, self._on_parked_changed)
                    await self._load_parked_entities(connection)
                except BaseException:
                    connection.terminate()
                    raise
            self._batch_connection, self._commit_statement = connection, None
            self.parked_changed.set()
        return self._batch_connection

    async def commit_statement(
        self, connection: asyncpg.Connection[asyncpg.Record]
    ) -> asyncpg.prepared_stmt.PreparedStatement[asyncpg.Record]:
        """The call of `berth_commit`, prepared once for each connection."""
        if self._commit_statement is None:
            places = ", ".join(f"${n}" for n in range(1, len(COMMIT_PARAMETERS) + 1))
            self._commit_statement = await connection.prepare(f"SELECT {self.settings.schema}.berth_commit({places})")
        return self._commit_statement

    def drop_connection(self) -> None:
        """Forget the dedicated connection after an error that leaves its state unknown."""
        if self._batch_connection is not None:
            self._batch_connection.terminate()
            self._batch_connection = None

    # --- reads ------------------------------------------------------------------------------------------------------

    async def pool(self) -> asyncpg.Pool[asyncpg.Record]:
        """The pool for reads and rare writes. Its connections are not reset on release: set nothing on a session."""
        if self._pool is None:
            with store_errors():
                self._pool = await asyncpg.create_pool(
                    self.settings.dsn,
                    min_size=0,
                    max_size=READ_POOL_SIZE,
                    max_inactive_connection_lifetime=300.0,
                    reset=_keep_as_is,
                    **_connect_options(self.settings, "read"),
                )
        return self._pool

    @contextlib.asynccontextmanager
    async def reader(self) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
        """A pooled connection for the block, with errors of the world turned into `TransientError`."""
        with store_errors():
            pool = await self.pool()
            async with pool.acquire(timeout=self.settings.connect_timeout_s) as connection:
                yield connection  # type: ignore[misc]  # a proxy with the methods of a connection

    async def records(self, kinds: Collection[str] | None = None) -> AsyncIterator[tuple[str, str, bytes]]:
        """All records (of `kinds`, if given) as (kind, key, body), in the order of their keys, from one snapshot."""
        schema = self.settings.schema
        async with self.reader() as connection, connection.transaction(isolation="repeatable_read", readonly=True):
            which = "$1::text[] IS NULL OR kind = ANY ($1)"
            query = f"SELECT kind, key, body FROM {schema}.records WHERE {which} ORDER BY kind, key"
            async for row in connection.cursor(query, None if kinds is None else list(kinds), prefetch=2000):
                yield row[0], row[1], row[2]

    async def position(self, consumer: str, stream: str) -> int:
        """Sequence of the last message whose effect is stored; 0 before the first."""
        async with self.reader() as connection:
            found = await connection.fetchval(
                f"SELECT stream_seq FROM {self.settings.schema}.position WHERE consumer = $1 AND stream = $2",
                consumer,
                stream,
            )
        return int(found or 0)

    async def reset_position(self, consumer: str, stream: str, stream_seq: int) -> None:
        """Set a position also backwards: after the broker lost its stream and numbers messages from 1 again."""
        async with self.reader() as connection:
            await connection.execute(
                f"INSERT INTO {self.settings.schema}.position AS p (consumer, stream, stream_seq) VALUES ($1, $2, $3) "
                "ON CONFLICT (consumer, stream) DO UPDATE SET stream_seq = excluded.stream_seq, updated_at = now()",
                consumer,
                stream,
                stream_seq,
            )

    # --- outbox -----------------------------------------------------------------------------------------------------

    async def unpublished(self, *, older_than_s: float = 1.0, limit: int = 1000) -> list[OutboxRow]:
        """Rows that are committed and not known to be published, in order; what a crash or an outage left behind.

        Rows that this process has published and not yet marked are not among them.
        """
        async with self.reader() as connection:
            return await unpublished_rows(
                connection, self.settings.schema, self.outbox, older_than=timedelta(seconds=older_than_s), limit=limit
            )

    async def mark_published(self, ids: Collection[int] = ()) -> None:
        """Record rows as published now, in a transaction of their own; with those remembered by `forget_outbox`."""
        self.outbox.published(ids)
        async with self.reader() as connection:
            await self.outbox.write_off(connection, self.settings.schema)

    def forget_outbox(self, ids: Collection[int]) -> None:
        """Remember rows as published; the next batch writes it down, without a commit of its own."""
        self.outbox.published(ids)

    # --- administration ---------------------------------------------------------------------------------------------

    @property
    def engine(self) -> AsyncEngine:
        """SQLAlchemy's engine over the same schema, for the SQLModel tables."""
        if self._engine is None:
            import orjson
            from sqlalchemy.ext.asyncio import create_async_engine

            self._engine = create_async_engine(
                "postgresql+asyncpg://",
                async_creator=lambda: connect(self.settings, "admin"),
                pool_size=4,
                max_overflow=0,
                pool_pre_ping=True,
                json_serializer=lambda value: orjson.dumps(value).decode(),
                json_deserializer=orjson.loads,
            )
        return self._engine

    async def refresh_parked(self) -> None:
        """Read again which entities have parked messages."""
        async with self.reader() as connection:
            await self._load_parked_entities(connection)

    async def _load_parked_entities(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        self.parked_entities = set(await open_entities(connection, self.settings.schema))

    def _on_parked_changed(self, _connection: object, _pid: int, _channel: str, schema: object) -> None:
        if schema == self.settings.schema:
            self.parked_changed.set()


async def connect(settings: StoreSettings, purpose: str, **server_settings: str) -> asyncpg.Connection[asyncpg.Record]:
    """A connection of its own, named `<application>/<purpose>` in the server's activity view."""
    return await asyncpg.connect(settings.dsn, **_connect_options(settings, purpose, **server_settings))


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn what a failing world raises into `TransientError`, a lost lease into `Deposed`; leave defects as they
    are."""
    try:
        yield
    except Exception as error:
        known = as_store_error(error)
        if known is None:
            raise
        raise known from error


class _Options(TypedDict):
    timeout: float
    command_timeout: float
    server_settings: dict[str, str]


def _connect_options(settings: StoreSettings, purpose: str, **server_settings: str) -> _Options:
    return {
        "timeout": settings.connect_timeout_s,
        "command_timeout": settings.command_timeout_s,
        "server_settings": {
            "application_name": f"{settings.application_name}/{purpose}",
            "search_path": settings.schema,
            "jit": "off",
            **server_settings,
        },
    }


async def _keep_as_is(_connection: object) -> None:
    return None


async def _close(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    try:
        await connection.close(timeout=2.0)
    except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        connection.terminate()
