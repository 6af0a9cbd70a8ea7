"""Takes messages from durable pull consumers, as many as are there, as cheaply as Python allows.

Why not nats-py's `fetch`: it waits for a full batch, loses its request when the server restarts, and costs about three
times as much per message. Here one subscription receives everything, up to two pull requests are kept open, and
`next` hands over what has arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from berth.bus import jsapi, wire
from berth.bus.connection import Connection, Subscription
from berth.bus.errors import BusError, ConsumerMissing, Disconnected, NoStream, TransientError
from berth.bus.message import Message, read_message

log = logging.getLogger(__name__)

_ANSWER_GRACE_S = 2.0
"""A request that has not been answered so long after its expiry was lost."""
_QUIET_S = 3.0
"""A consumer that brings nothing for so long is looked at."""


@dataclass(slots=True)
class PullCounters:
    """Counts since the puller was opened."""

    messages: int = 0
    repeats: int = 0
    """Redeliveries of what this puller already holds or has handed over; dropped (contiguous mode only)."""
    gaps: int = 0
    """Deliveries lost on the way; each was healed by a reset (contiguous mode only)."""
    resets: int = 0
    lost_requests: int = 0
    missing: int = 0
    """Times the server said that the consumer does not exist."""
    garbled: int = 0
    foreign: int = 0
    """Times the consumer had been moved by somebody else, or gave to somebody else what is ours (contiguous only)."""


class Inbox:
    """Messages that have arrived, and one waiter for them."""

    __slots__ = ("_is_poked", "_waiter", "messages")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._is_poked = False
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def poke(self) -> None:
        """Wake the waiter, or keep the next one from waiting."""
        self._is_poked = self._waiter is None
        self.wake()

    async def wait(self, timeout: float) -> None:
        """Return when woken or after `timeout` seconds."""
        if self._is_poked:
            self._is_poked = False
            return
        loop = asyncio.get_running_loop()
        self._waiter = waiter = loop.create_future()
        timer = loop.call_later(timeout, self.wake)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def take(self, limit: int) -> list[Message]:
        taken = self.messages
        if len(taken) <= limit:
            self.messages = []
            return taken
        self.messages = taken[limit:]
        return taken[:limit]


class _Request:
    """An open pull request: how many messages it may still bring, and until when."""

    __slots__ = ("deadline", "remaining", "token")

    def __init__(self, token: bytes, batch: int, deadline: float) -> None:
        self.token = token
        self.remaining = batch
        self.deadline = deadline


class Puller:
    """Pulls one durable consumer. One task calls `next`.

    With `contiguous`, which is for consumers whose only reader stores its position, the stream is handed over without
    gaps or repeats: after a reconnect, and when the consumer's sequence shows that a delivery was lost, the puller
    resets the consumer to just behind what it has received. Without it several readers may share the consumer, and
    messages may repeat: a reader that reconnects has everything sent again that is not acknowledged, and what is lost
    otherwise comes again after the consumer's `ack_wait`.

    A contiguous reader that was replaced and does not know it could do harm: requests that it left open take messages
    away from its successor, and a reset to its own position would make the successor skip some. So it is asked
    (`may_reset`) before each reset of its own accord, `halt` stops it at once, and a reader notices that somebody else
    has moved its consumer: by the count of what waits behind the first message, and by a look at it when nothing comes.

    Args:
        batch: most messages of one pull request and of one `next`. Up to two batches wait here, one more is with
            the caller; the consumer's `max_ack_pending` must allow for that.
        expires_s: how long the server keeps a request open.
        may_reset: whether this still is the reader of the consumer; asked before it resets the consumer to heal.
        on_missing: called (with back-off) while the consumer does not exist; it should provision again.
        missing_grace_s: `next` raises `ConsumerMissing` when the consumer is away for longer. A restarting server says
            for a moment that it has none.
    """

    def __init__(
        self,
        connection: Connection,
        stream: str,
        consumer: str,
        *,
        batch: int = 500,
        expires_s: float = 5.0,
        contiguous: bool = False,
        may_reset: Callable[[], Awaitable[bool]] | None = None,
        on_missing: Callable[[], Awaitable[object]] | None = None,
        missing_grace_s: float = 5.0,
    ) -> None:
        self.stream = stream
        self.consumer = consumer
        self.counters = PullCounters()
        self._bus = connection
        self._batch = batch
        self._expires_s = expires_s
        self._contiguous = contiguous
        self._ack_all = False  # until the consumer says so; single acknowledgements serve either policy
        self._may_reset = may_reset
        self._on_missing = on_missing
        self._missing_grace_s = missing_grace_s
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}".encode()
        self._body = b'{"batch":%d,"expires":%d}' % (batch, int(expires_s * 1e9))
        self._inbox = Inbox()
        self._subscription: Subscription | None = None
        self._inbox_prefix = b""
        self._requests: deque[_Request] = deque()
        self._token = 0
        self._expected_seq: int | None = None  # consumer sequence of the next delivery; None: any
        self._last_seq: int | None = None  # stream sequence of the last message received; None: nothing known
        self._waiting_at_reset = 0  # messages that the consumer had for us then
        self._goal: int | None = None  # position of a `reset` that has not been done yet
        self._is_paused = True  # while a reset runs, or the server is away
        self._is_halted = False
        self._heard_at = 0.0  # when the last message came, or the last look at the consumer was taken
        self._missing_since: float | None = None
        self._fault: BusError | None = None  # why the last reset was refused
        self._retry_delay_s = 0.0
        self._healing: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unregister: list[Callable[[], None]] = []
        self._is_open = False
        self._reset_lock = asyncio.Lock()

    # -- life

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self, *, after: int | None = None) -> None:
        """Start pulling; with `after`, first reset the consumer to that stored position (see `reset`)."""
        self._is_open = True
        self._unregister = [
            self._bus.on_reconnect(self._on_reconnect),
            self._bus.on_disconnect(self._on_disconnect),
        ]
        self._tick()
        try:
            if after is not None:
                await self.reset(after)
            else:
                with contextlib.suppress(TransientError):
                    await self._look_at_consumer()
                await self._listen()
                self._is_paused = False
                self._top_up()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop pulling. What was delivered and not acknowledged comes again to the next reader."""
        self._is_open = False
        self._is_paused = True
        for unregister in self._unregister:
            unregister()
        if self._timer is not None:
            self._timer.cancel()
        for task in (self._healing, self._looking):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._stop_listening()
        self._inbox.wake()

    def halt(self) -> None:
        """Take nothing more and reset nothing, from now on: somebody else reads this consumer. `close` it afterwards."""
        self._is_halted = self._is_paused = True
        self._start_healing(self._stop_listening())
        self._inbox.poke()

    # -- for the owner

    async def next(self, timeout: float) -> list[Message]:
        """What has arrived, in order, at most one batch; waits up to `timeout` seconds only when there is nothing.

        Returns an empty list when nothing came, also while the server is away: the puller goes on by itself.

        Raises:
            ConsumerMissing: the consumer has been gone for longer than the grace time; pulling goes on.
            PermissionDenied, ProvisionError: the consumer cannot be reset; it is tried again, but will hardly help.
        """
        if not self._inbox.messages:
            self._raise_if_hopeless()
            await self._inbox.wait(timeout)
            if not self._inbox.messages:
                self._raise_if_hopeless()
                return []
        taken = self._inbox.take(self._batch)
        self._top_up()
        return taken

    def wake(self) -> None:
        """Make a waiting `next` return with what there is, or the next one not wait."""
        self._inbox.poke()

    def ack(self, messages: Sequence[Message]) -> None:
        """Acknowledge, without waiting for the server. Lost acknowledgements are no harm: the message comes again.

        Where the consumer's policy is that one counts for all before it, only the newest is sent: acknowledge in order.
        """
        if not messages:
            return
        with contextlib.suppress(Disconnected):
            if self._ack_all:
                newest = max(messages, key=lambda message: message.consumer_seq)
                self._bus.write_nowait(wire.encode_acks((newest.ack_subject,)))
            else:
                self._bus.write_nowait(wire.encode_acks([message.ack_subject for message in messages]))

    async def reset(self, position: int) -> None:
        """Go on with the first message behind `position` (a stream sequence; 0: from the start).

        Everything waiting here is dropped. When the stream ends before `position` (it was restored or made anew), its
        sequences mean something else now, and the whole stream is read: the reader's inbox drops what it knows.

        Raises:
            TransientError: the server could not do it now; the puller keeps trying by itself.
        """
        if self._healing is not None:
            self._healing.cancel()
        async with self._reset_lock:
            self._is_paused = True
            await self._stop_listening()
            self._inbox.messages.clear()
            self._goal = position
            try:
                if position > 0:
                    self._goal = position = await self._trusted(position)
                await self._reset_to(position)
            except TransientError:
                self._heal()
                raise

    async def _trusted(self, position: int) -> int:
        state = (await jsapi.call(self._bus, f"STREAM.INFO.{self.stream}"))["state"]
        if int(state["last_seq"]) >= position:
            return position
        log.error(
            "stream %s ends at %s, before position %s of %s: reading it from the start",
            self.stream, state["last_seq"], position, self.consumer,
        )  # fmt: skip
        return 0

    @property
    def waiting(self) -> int:
        """Messages that have arrived and were not taken yet."""
        return len(self._inbox.messages)

    @property
    def last_received(self) -> int | None:
        """Highest stream sequence received so far (contiguous readers only)."""
        return self._last_seq

    # -- pulling

    async def _listen(self) -> None:
        self._requests.clear()
        inbox = self._bus.new_inbox()
        self._inbox_prefix = f"{inbox}.".encode()
        self._subscription = await self._bus.subscribe_raw(f"{inbox}.*", self._on_message)

    async def _stop_listening(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def _top_up(self) -> None:
        """Open requests until two batches are on their way or waiting here."""
        if self._is_paused or self._is_halted or not self._bus.is_connected:
            return
        room = 2 * self._batch - len(self._inbox.messages) - sum(request.remaining for request in self._requests)
        while room >= self._batch and len(self._requests) < 2:
            self._token += 1
            token = self._inbox_prefix + b"%d" % self._token
            self._bus.write_nowait(wire.encode_publish(self._next_subject, token, b"", self._body))
            deadline = asyncio.get_running_loop().time() + self._expires_s + _ANSWER_GRACE_S
            self._requests.append(_Request(token, self._batch, deadline))
            room -= self._batch

    def _on_message(self, subject: bytes, reply: bytes, data: bytes, raw_headers: bytes | None) -> None:
        if subject.startswith(self._inbox_prefix):
            self._on_status(subject, *wire.parse_status(raw_headers))
            return
        try:
            message = read_message(subject, reply, data, raw_headers)
        except ValueError:
            self.counters.garbled += 1
            return
        self._missing_since = None
        self._retry_delay_s = 0.0
        self._heard_at = asyncio.get_running_loop().time()
        if self._requests:
            request = self._requests[0]
            request.remaining -= 1
            if request.remaining == 0:
                self._requests.popleft()
                self._top_up()
        if self._contiguous and not self._is_next(message):
            return
        self.counters.messages += 1
        self._inbox.messages.append(message)
        self._inbox.wake()

    def _is_next(self, message: Message) -> bool:
        if self._expected_seq is not None and message.consumer_seq != self._expected_seq:
            if not self._is_paused:
                self.counters.gaps += 1
                self._heal()
            return False
        if message.consumer_seq == 1 and message.pending < self._waiting_at_reset - 1:
            self.counters.foreign += 1
            self._heal()
            return False
        self._expected_seq = message.consumer_seq + 1
        if self._last_seq is not None and message.stream_seq <= self._last_seq:
            self.counters.repeats += 1
            return False
        self._last_seq = message.stream_seq
        return True

    def _on_status(self, token: bytes, code: int, text: str) -> None:
        """The server has ended a request: expired (408), nothing there (404), refused (409), or nobody there (503)."""
        request = next((request for request in self._requests if request.token == token), None)
        if request is None or code == 100:
            return
        self._requests.remove(request)
        if code == 503 or (code == 409 and "deleted" in text.lower()):
            self._on_consumer_missing(text)
        elif code == 409 and "batch completed" not in text.lower():
            # Leadership change, server shutdown, too many requests: ask again, not at once.
            self._retry_later()
        else:
            self._retry_delay_s = 0.0
            self._top_up()

    # -- trouble

    def _on_consumer_missing(self, text: str) -> None:
        now = asyncio.get_running_loop().time()
        if self._missing_since is None:
            self._missing_since = now
            log.warning("consumer %s of %s does not answer: %s", self.consumer, self.stream, text or "no responders")
        self.counters.missing += 1
        self._retry_later()
        if now - self._missing_since >= self._missing_grace_s:
            self._inbox.wake()

    def _raise_if_hopeless(self) -> None:
        if self._fault is not None:
            raise self._fault
        since = self._missing_since
        if since is not None and asyncio.get_running_loop().time() - since >= self._missing_grace_s:
            raise ConsumerMissing(f"consumer {self.consumer} of stream {self.stream} does not exist")

    def _retry_later(self) -> None:
        if self._is_paused or self._is_halted:
            return
        self._is_paused = True
        self._retry_delay_s = min(max(self._retry_delay_s * 2, 0.05), 2.0)
        self._start_healing(self._resume(self._retry_delay_s * random.uniform(0.5, 1.0)))

    async def _resume(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        if self._missing_since is not None and self._on_missing is not None:
            try:
                await self._on_missing()
            except BusError as error:
                log.warning("consumer %s of %s: %s", self.consumer, self.stream, error)
        self._requests.clear()
        if self._contiguous:
            await self._reset_until_done()  # it may be a new consumer, which starts from the beginning
        else:
            self._is_paused = False
            self._top_up()

    def _on_disconnect(self) -> None:
        self._requests.clear()
        self._is_paused = True

    def _on_reconnect(self) -> None:
        self._requests.clear()
        self._heal()

    def _heal(self) -> None:
        """Go on behind the last message received, or acknowledged when the consumer is shared: what was on its way is
        lost or would come out of order."""
        if self._is_halted:
            return
        self._is_paused = True
        self._start_healing(self._reset_until_done())

    def _start_healing(self, work: Coroutine[None, None, None]) -> None:
        if self._healing is not None and not self._healing.done():
            self._healing.cancel()
        self._healing = asyncio.ensure_future(work)

    async def _reset_until_done(self) -> None:
        delay_s = 0.02
        while self._is_open and not self._is_halted:
            try:
                if self._may_reset is not None and not await self._may_reset():
                    raise TransientError(f"this process does not read {self.consumer} any more")
                async with self._reset_lock:
                    resumed = self._last_seq if self._contiguous else None
                    await self._reset_to(resumed if self._goal is None else self._goal)
                return
            except (ConsumerMissing, NoStream) as error:
                self._on_consumer_missing(str(error))
                if self._on_missing is not None:
                    with contextlib.suppress(BusError):
                        await self._on_missing()
            except TransientError as error:
                log.debug("reset of %s: %s", self.consumer, error)
            except BusError as error:
                log.error("reset of %s is refused: %s", self.consumer, error)
                self._fault = error
                self._inbox.wake()
                delay_s = 1.0
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, 1.0)

    async def _reset_to(self, position: int | None) -> None:
        """Reset the consumer to `position` + 1, or (None) to just above what it has acknowledged.

        A new inbox comes first: a message sent before the reset can then not be taken for one sent after it.
        """
        self._is_paused = True
        await self._stop_listening()
        await self._look_at_consumer()  # a reset of a missing consumer gets no answer at all
        done = await jsapi.call(
            self._bus,
            f"CONSUMER.RESET.{self.stream}.{self.consumer}",
            {"seq": position + 1} if position is not None else None,
            timeout=2.0,
        )
        self.counters.resets += 1
        self._expected_seq, self._last_seq, self._goal = 1, position, None
        self._waiting_at_reset = int(done["num_pending"])
        await self._listen()
        self._is_paused = False
        self._missing_since = None
        self._fault = None
        self._top_up()

    async def _look_at_consumer(self) -> None:
        info = await jsapi.call(self._bus, f"CONSUMER.INFO.{self.stream}.{self.consumer}")
        self._ack_all = info["config"]["ack_policy"] == "all"

    def _look_if_quiet(self, now: float) -> None:
        if not self._contiguous or self._is_paused or now - self._heard_at < _QUIET_S or not self._bus.is_connected:
            return
        if self._looking is None or self._looking.done():
            self._heard_at = now
            self._looking = asyncio.ensure_future(self._look_whether_it_is_ours())

    async def _look_whether_it_is_ours(self) -> None:
        """Nothing came for a while: because there is nothing, or because another reader gets it?"""
        for _ in range(2):  # what is on its way to us looks like somebody else's at the first look
            expected = self._expected_seq
            try:
                info = await jsapi.call(self._bus, f"CONSUMER.INFO.{self.stream}.{self.consumer}")
            except BusError:
                return  # pulling finds out by itself
            if expected is None or expected != self._expected_seq or self._is_paused:
                return
            waiting = int(info["num_pending"])
            if int(info["delivered"]["consumer_seq"]) + 1 == expected and (
                expected > 1 or waiting >= self._waiting_at_reset  # nothing was delivered, so no fewer can wait
            ):
                if expected == 1:
                    self._waiting_at_reset = waiting
                return
            await asyncio.sleep(0.2)
        log.warning("consumer %s of %s was moved by another reader", self.consumer, self.stream)
        self.counters.foreign += 1
        self._heal()

    def _tick(self) -> None:
        """Once a second: forget requests that the server has silently lost; look at a consumer that is quiet."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        while self._requests and self._requests[0].deadline < now:
            self._requests.popleft()
            self.counters.lost_requests += 1
        if self._requests and self._requests[0].deadline - now < self._expires_s + _ANSWER_GRACE_S - 1.0:
            self._missing_since = None  # a missing consumer answers at once
        self._top_up()
        self._look_if_quiet(now)
        self._timer = loop.call_later(1.0, self._tick)
