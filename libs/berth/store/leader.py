"""Who writes: one process for each lease, elected by a session lock, fenced by an epoch.

The lock elects: PostgreSQL gives it up the moment the holder's connection dies. The epoch fences: whoever gets the
lock raises it, and every batch checks it (`BatchTransaction.check_epoch`), so a leader that was paused and does not
know that it was replaced cannot write. A leader whose process stands still keeps its connection; the server ends it
when no probe came for `SILENCE_S`. Measured failover after the death of a leader: the standby's poll, 0.1 s on
average.

A standby asks again every 0.2 s instead of waiting inside `pg_advisory_lock`: a waiting statement keeps a snapshot
open, and for as long as it waits no dead row of any table could be cleaned up.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from typing import Self

import asyncpg

from berth.store.database import StoreSettings, connect, store_errors
from berth.store.errors import TransientError, Unreachable

STANDBY_POLL_S = 0.2
PROBE_S = 1.0
PROBE_PATIENCE_S = 2.0
RECONNECT_S = 0.5
SILENCE_S = 10
"""The server ends the session of a leader that has not probed for so long: its process stands still."""


def process_name() -> str:
    """This process in words, as `holder` of a lease: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"


def lock_key(schema: str, lease: str) -> int:
    """The advisory lock of a lease: 63 bits of a hash, since locks of all schemas of a database share one space."""
    return int.from_bytes(hashlib.sha256(f"berth/{schema}/{lease}".encode()).digest()[:8], "big") >> 1


class Leadership:
    """The attempt to lead, and while it succeeds the proof of it. Can be repeated after each release or loss.

    async with Leadership(settings, "placement") as leadership:
        epoch = await leadership.acquired()     # waits as a standby
        ...                                      # work until leadership.lost is set
    """

    def __init__(self, settings: StoreSettings, lease: str, *, holder: str | None = None) -> None:
        self.lease = lease
        self.epoch = 0
        """The epoch to write with; 0 while another leads."""
        self.lost = asyncio.Event()
        """Set when the lock is gone, by loss or release, until it is acquired again."""
        self._settings = settings
        self._holder = holder or process_name()
        self._key = lock_key(settings.schema, lease)
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._probe: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()

    @property
    def is_leader(self) -> bool:
        """Whether this process leads, as far as it can know; only `check_epoch` in a transaction is certain."""
        return self.epoch > 0 and not self.lost.is_set()

    async def acquired(self) -> int:
        """Wait until this process leads, also through outages of the database; returns the epoch to write with."""
        if self.is_leader:
            return self.epoch
        await self.release()
        self.lost.clear()
        while True:
            try:
                epoch = await self._try()
            except TransientError:
                self._drop()
                await asyncio.sleep(RECONNECT_S)
                continue
            if epoch:
                self.epoch = epoch
                return epoch
            await asyncio.sleep(STANDBY_POLL_S)

    async def confirmed(self) -> bool:
        """Whether this process leads, by the word of the server a moment ago: the session that holds the lock answers."""
        connection = self._connection
        if not self.is_leader or connection is None:
            return False
        await self._ask(connection)
        return self.is_leader

    async def release(self) -> None:
        """Give the lease up, so that a standby takes over at its next poll."""
        if self._probe is not None:
            self._probe.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probe
            self._probe = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.remove_termination_listener(self._on_terminated)  # also when it was never added
            try:
                await connection.close(timeout=2.0)
            except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection.terminate()
        if self.epoch:
            self.epoch = 0
            self.lost.set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def _try(self) -> int:
        """One try for the lock; the new epoch, or 0 while another process holds it."""
        with store_errors():
            if self._connection is None or self._connection.is_closed():
                self._connection = await connect(
                    self._settings,
                    "leader",
                    idle_in_transaction_session_timeout="5s",
                    idle_session_timeout=f"{SILENCE_S}s",
                )
            connection = self._connection
            if not await connection.fetchval("SELECT pg_try_advisory_lock($1)", self._key):
                return 0
            epoch = int(await connection.fetchval(_RAISE.format(s=self._settings.schema), self.lease, self._holder))
        connection.add_termination_listener(self._on_terminated)
        if connection.is_closed():  # between the last answer and the listener
            raise Unreachable(f"lease {self.lease}: connection lost at once")
        self._probe = asyncio.create_task(self._probe_forever(connection), name=f"lease-{self.lease}")
        return epoch

    async def _probe_forever(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        """Notice a server that is gone without saying so: frozen, or behind a cut network."""
        while not self.lost.is_set():
            await asyncio.sleep(PROBE_S)
            await self._ask(connection)

    async def _ask(self, connection: asyncpg.Connection[asyncpg.Record]) -> None:
        try:
            # Its own deadline: the driver's would wait for the server to confirm that the statement was cancelled.
            async with asyncio.timeout(PROBE_PATIENCE_S), self._asking:
                await connection.fetchval("SELECT 1")
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            self.lost.set()
            connection.terminate()

    def _on_terminated(self, _connection: object) -> None:
        self.lost.set()

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None


_RAISE = """
INSERT INTO {s}.lease AS l (name, epoch, holder) VALUES ($1, 1, $2)
ON CONFLICT (name) DO UPDATE SET epoch = l.epoch + 1, holder = excluded.holder, acquired_at = now()
RETURNING epoch
"""
