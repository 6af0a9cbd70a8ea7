"""Events for subscribers: read from the stream by sequence, so that anybody can go on from where they were.

One reader for each process follows the end of the stream while somebody listens, and keeps the last few thousand
events; whoever is further behind reads for themselves. No consumer is made on the server: a direct get needs none.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import unquote

import orjson

from berth.bus import jsapi, wire
from berth.bus.connection import Connection
from berth.bus.errors import BusError, DeadlineExceeded
from berth.contracts import subjects
from berth.contracts.envelope import HEADER_TENANT, HEADER_TYPE

PAGE: Final = 256
KEPT: Final = 4096
POLL_SECONDS: Final = 0.1
PAGE_SECONDS: Final = 3.0
_NO_MESSAGES: Final = 404


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One event as it lies in the stream."""

    sequence: int
    tenant: str
    type: str
    data: bytes

    def view(self) -> dict[str, Any]:
        """As `EventView` in JSON."""
        envelope = orjson.loads(self.data)
        return {
            "sequence": self.sequence,
            "id": envelope.get("id", ""),
            "type": envelope.get("type", self.type),
            "time": envelope.get("time"),
            "subject": envelope.get("subject", ""),
            "tenant": envelope.get("tenant", ""),
            "actor": envelope.get("actor", ""),
            "data": envelope.get("data") or {},
        }


class EventSource(Protocol):
    """Reads the stream."""

    async def last_sequence(self) -> int:
        """Of the newest event; 0: there is none."""

    async def read(self, after: int, limit: int) -> list[StoredEvent]:
        """Events behind a sequence, oldest first; empty at the end."""


class StreamReader:
    """Batched direct gets over one reply subject."""

    def __init__(self, connection: Connection, pool: str) -> None:
        self._bus = connection
        self._subject = subjects.all_events(pool)
        self._numbers = itertools.count(1)

    async def last_sequence(self) -> int:
        """From the stream's state."""
        info = await jsapi.call(self._bus, f"STREAM.INFO.{subjects.EVENTS_STREAM}")
        return int(info["state"]["last_seq"])

    async def read(self, after: int, limit: int) -> list[StoredEvent]:
        """One page.

        Raises:
            BusError: the stream does not answer.
        """
        found: list[StoredEvent] = []
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def take(_: bytes, __: bytes, data: bytes, raw_headers: bytes | None) -> None:
            status, text = wire.parse_status(raw_headers)
            if status:
                if not over.done():
                    if status in {204, _NO_MESSAGES}:
                        over.set_result(None)
                    else:
                        over.set_exception(BusError(f"direct get: {status} {text}"))
                return
            sequence = int(wire.find_header(raw_headers, "Nats-Sequence") or 0)
            tenant = unquote(wire.find_header(raw_headers, HEADER_TENANT) or "")
            found.append(StoredEvent(sequence, tenant, wire.find_header(raw_headers, HEADER_TYPE) or "", data))

        inbox = self._bus.new_inbox()
        subscription = await self._bus.subscribe_raw(inbox, take)
        try:
            asked = {"seq": after + 1, "batch": limit, "next_by_subj": self._subject}
            await self._bus.publish_core(
                f"$JS.API.DIRECT.GET.{subjects.EVENTS_STREAM}", orjson.dumps(asked), reply=inbox
            )
            async with asyncio.timeout(PAGE_SECONDS):
                await over
        except TimeoutError:
            raise DeadlineExceeded("the stream did not answer a direct get") from None
        finally:
            await subscription.unsubscribe()
        return found


class EventFeed:
    """The end of the stream, shared by all who follow it."""

    def __init__(self, source: EventSource) -> None:
        self._source = source
        self._recent: deque[StoredEvent] = deque(maxlen=KEPT)
        self._followers = 0
        self._task: asyncio.Task[None] | None = None
        self._more = asyncio.Condition()
        self._end = 0

    @property
    def followers(self) -> int:
        """Open subscriptions."""
        return self._followers

    async def last_sequence(self) -> int:
        """Of the newest event."""
        return await self._source.last_sequence()

    async def read(self, after: int, limit: int = PAGE) -> list[StoredEvent]:
        """A page behind a sequence, from memory where possible."""
        if self._recent and self._recent[0].sequence <= after + 1 and self._task is not None:
            newer = self._end - after
            if newer <= 0:
                return []
            start = next((n for n, event in enumerate(self._recent) if event.sequence > after), len(self._recent))
            return list(itertools.islice(self._recent, start, start + limit))
        return await self._source.read(after, limit)

    async def follow(self, after: int) -> AsyncGenerator[list[StoredEvent], None]:
        """Pages behind a sequence, for ever; an empty one now and then, so that the caller can show a sign of life."""
        self._followers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._read_on(), name="event feed")
        try:
            while True:
                page = await self.read(after)
                if page:
                    after = page[-1].sequence
                    yield page
                    continue
                async with self._more:
                    try:
                        async with asyncio.timeout(10):
                            await self._more.wait_for(lambda: self._end > after)  # noqa: B023 - awaited right here
                    except TimeoutError:
                        pass
                if self._end <= after:
                    yield []
        finally:
            self._followers -= 1
            if self._followers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None
                self._recent.clear()

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _read_on(self) -> None:
        while True:
            try:
                self._end = await self._source.last_sequence()
                break
            except BusError:
                await asyncio.sleep(POLL_SECONDS * 5)
        async with self._more:
            self._more.notify_all()
        while True:
            try:
                page = await self._source.read(self._end, PAGE)
            except BusError:
                await asyncio.sleep(POLL_SECONDS * 5)
                continue
            if not page:
                await asyncio.sleep(POLL_SECONDS)
                continue
            async with self._more:
                self._recent.extend(page)
                self._end = page[-1].sequence
                self._more.notify_all()
