"""One connection to the bus: reconnects for ever, says what went wrong, and answers requests.

nats-py's defaults suit a short program: it gives up after two minutes, notices a frozen server after four, and reports
a refused subject only to a callback. Here every such default is set or replaced, and one rule is added: nothing is
sent while there is no connection. What waits to be sent waits in the outbox, not in a buffer nobody can see.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from nats.aio.client import Client
from nats.aio.subscription import Subscription as NatsSubscription

from berth.bus import wire
from berth.bus.errors import (
    BusError,
    DeadlineExceeded,
    Disconnected,
    NoResponders,
    PermissionDenied,
    PublishRefused,
    RequestFailed,
)

log = logging.getLogger(__name__)

ERROR_HEADER = "Berth-Error"
_REPLY_PREFIXES = ("_INBOX", "_R_.")
_KEPT_ERRORS = 100
_LOGGED_REFUSALS = 10

Sink = Callable[[bytes, bytes, bytes, bytes | None], None]
"""Gets subject, reply, data and raw headers of each message, inside the read loop: it must be quick and not raise."""


@dataclass(frozen=True, slots=True)
class BusSettings:
    """Where the bus is and who we are. Either `user` with `password`, or `nkey_seed_file`, or neither (open server)."""

    servers: tuple[str, ...]
    name: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    nkey_seed_file: Path | None = None
    inbox_prefix: str = "_INBOX"
    """Every user has its own, so that nobody can read another one's replies."""
    api_prefix: str = "$JS.API"
    """Where JetStream's request API is found; another subject for users outside the streams' account."""
    tls: ssl.SSLContext | None = None
    connect_timeout_s: float = 30.0
    """How long `Connection.open` tries before it gives up; later losses are retried for ever."""
    probe_interval_s: float = 5.0
    """How often the server is asked for a sign of life; after two without an answer the connection is made anew."""


@dataclass(slots=True)
class BusCounters:
    """Counts since the connection was opened."""

    disconnects: int = 0
    reconnects: int = 0
    forced_reconnects: int = 0
    permission_errors: int = 0
    other_errors: int = 0
    dropped_messages: int = 0
    """Core messages an asynchronous handler was too slow for."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: body and headers, still undecoded."""

    data: bytes
    raw_headers: bytes | None = None

    def header(self, name: str) -> str | None:
        return wire.find_header(self.raw_headers, name)

    @property
    def headers(self) -> dict[str, str]:
        return wire.parse_headers(self.raw_headers)


@dataclass(frozen=True, slots=True)
class CoreMessage:
    """A message outside any stream: telemetry, or a request when `reply` is set."""

    subject: str
    data: bytes
    reply: str = ""
    raw_headers: bytes | None = None

    def header(self, name: str) -> str | None:
        return wire.find_header(self.raw_headers, name)

    @property
    def headers(self) -> dict[str, str]:
        return wire.parse_headers(self.raw_headers)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request handler returns when it wants headers; plain `bytes` do otherwise."""

    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


RequestHandler = Callable[[CoreMessage], Awaitable[bytes | Answer]]
CoreHandler = Callable[[CoreMessage], None] | Callable[[CoreMessage], Awaitable[None]]


class _Client(Client):  # type: ignore[misc]  # nats-py is untyped here
    """nats-py with a short cut: messages of registered subscriptions go to a sink as bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks: dict[int, Sink] = {}

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        sink = self.sinks.get(sid)
        if sink is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        try:
            sink(subject, reply, data, headers)
        except Exception:
            # An exception here would end nats-py's read loop without a reconnect.
            log.exception("sink of subscription %s raised", sid)

    async def _attempt_reconnect(self) -> None:
        # Bytes of the old connection must not reach the new one: pulls would be doubled and a publish nobody waits for
        # would still be stored. A frozen peer would also keep nats-py waiting for its buffer to drain.
        self._pending: list[bytes] = []
        self._pending_data_size = 0
        for pong in self._pongs:
            if not pong.done():  # nats-py leaves a flush to its timeout
                pong.set_exception(ConnectionError("connection lost"))
                pong.exception()
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await super()._attempt_reconnect()

    async def _process_pong(self) -> None:
        # A flush that timed out leaves a cancelled future behind; setting it would end the read loop.
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
            self._pings_outstanding = 0
            return
        await super()._process_pong()

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        # nats-py writes the PING past what is pending, so that its flush returns before the server has seen it.
        self._pongs.append(future if future is not None else asyncio.get_running_loop().create_future())
        self.send_now(b"PING\r\n")

    def send_now(self, blob: bytes) -> None:
        """Queue `blob` for the flusher without awaiting."""
        self._pending.append(blob)
        self._pending_data_size += len(blob)
        if self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    @property
    def unsent_bytes(self) -> int:
        return int(self._pending_data_size)

    @property
    def has_live_tasks(self) -> bool:
        tasks = (self._reading_task, self._flusher_task, self._ping_interval_task)
        return all(task is not None and not task.done() for task in tasks)

    def resume_reconnecting(self) -> bool:
        """Start to reconnect again if nats-py should have stopped without closing; whether that was so."""
        task: asyncio.Task[None] | None = self._reconnection_task
        if not self.is_reconnecting or (task is not None and not task.done()):
            return False
        self._reconnection_task: asyncio.Task[None] | None = asyncio.create_task(self._attempt_reconnect())
        return True


class Subscription:
    """A subscription that lives across reconnects until `unsubscribe`."""

    def __init__(self, client: _Client, inner: NatsSubscription, worker: asyncio.Task[None] | None = None) -> None:
        self._client = client
        self._inner = inner
        self._worker = worker

    async def unsubscribe(self) -> None:
        """Stop delivery; safe to call twice and while disconnected."""
        if self._worker is not None:
            self._worker.cancel()
            self._worker = None
        if self._client.sinks.pop(self._inner._id, None) is None or self._client.is_closed:
            return
        with contextlib.suppress(Exception):  # the connection may go away at any point; the subscription goes with it
            await self._inner.unsubscribe()


class ReplyMux:
    """Waits for many answers on one wildcard subscription.

    A lost connection fails every waiter at once, instead of leaving each to its timeout.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = f"{prefix}."
        self._prefix = self.prefix.encode()
        self._next = 0
        self._waiting: dict[bytes, tuple[str, asyncio.Future[Reply]]] = {}

    def expect(self, subject: str) -> tuple[bytes, asyncio.Future[Reply]]:
        """The reply subject to send along, and the future of the answer; call `forget` when giving up."""
        self._next += 1
        token = b"%d" % self._next
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[token] = (subject, future)
        return self._prefix + token, future

    def forget(self, reply: bytes) -> None:
        self._waiting.pop(reply[len(self._prefix) :], None)

    def on_message(self, subject: bytes, reply: bytes, data: bytes, raw_headers: bytes | None) -> None:
        entry = self._waiting.pop(subject[len(self._prefix) :], None)
        if entry is not None and not entry[1].done():
            entry[1].set_result(Reply(data, raw_headers))

    def fail_all(self, reason: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for _, future in waiting.values():
            if not future.done():
                future.set_exception(Disconnected(reason))
                future.exception()  # somebody may have stopped waiting already

    def on_permission_error(self, subject: str) -> None:
        """Fail the waiters of `subject`, which nats-py reports in lower case."""
        for asked, future in self._waiting.values():
            if not future.done() and asked.lower() == subject:
                future.set_exception(PermissionDenied(asked))
                future.exception()


class Connection:
    """An open connection. Use as `async with Connection(settings) as bus:`; one owner opens and closes it."""

    def __init__(self, settings: BusSettings) -> None:
        self.settings = settings
        self.counters = BusCounters()
        self.permission_errors: deque[str] = deque(maxlen=_KEPT_ERRORS)
        """Texts of the server, newest last."""
        self.closed = asyncio.Event()
        """Set when the connection is closed for good, by us or by the server's refusal."""
        self.last_error: str = ""
        self._client = _Client()
        self._connected = asyncio.Event()
        self._refused = asyncio.Event()
        self._is_closing = False
        self._watchdog: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()
        self._reconnect_callbacks: list[Callable[[], None]] = []
        self._disconnect_callbacks: list[Callable[[], None]] = []
        self._permission_callbacks: list[Callable[[str], None]] = []
        self.replies = ReplyMux(f"{settings.inbox_prefix}.{self._client._nuid.next().decode()}")

    # -- life

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect, trying for `connect_timeout_s`.

        Raises:
            PermissionDenied: the server knows us not.
            Disconnected: no server could be reached.
        """
        s = self.settings
        options: dict[str, Any] = {"user": s.user, "password": s.password} if s.user else {}
        if s.nkey_seed_file is not None:
            options["nkeys_seed"] = str(s.nkey_seed_file)
        if s.tls is not None:
            options |= {"tls": s.tls, "tls_handshake_first": True}
        connecting = asyncio.ensure_future(
            self._client.connect(
                servers=list(s.servers),
                name=s.name,
                inbox_prefix=s.inbox_prefix.encode(),
                error_cb=self._on_error,
                closed_cb=self._on_closed,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.25,
                connect_timeout=5,
                ping_interval=s.probe_interval_s,
                max_outstanding_pings=2,
                **options,
            )
        )
        refused = asyncio.ensure_future(self._refused.wait())
        try:
            await asyncio.wait((connecting, refused), timeout=s.connect_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise self._cannot_connect()
            connecting.result()
        except BaseException:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await self._close_client()
            raise
        finally:
            refused.cancel()
        self._connected.set()
        await self.subscribe_raw(f"{self.replies.prefix}*", self.replies.on_message)
        self._watchdog = asyncio.create_task(self._watch(), name="bus-watchdog")

    async def close(self) -> None:
        """Flush what is pending and close. No drain: nats-py's hangs on subscriptions it does not read itself."""
        self._is_closing = True
        for task in (self._watchdog, *self._serving):
            if task is not None:
                task.cancel()
        if self._client.is_connected:
            with contextlib.suppress(Exception):
                await self._client.flush(timeout=2)
        await self._close_client()

    async def _close_client(self) -> None:
        self._is_closing = True
        self._connected.clear()
        self.replies.fail_all("connection closed")
        self._client.sinks.clear()
        # In a task of its own: when a reconnect is under way, nats-py cancels a future here that it then awaits itself.
        closing = asyncio.ensure_future(self._client.close())
        done, _ = await asyncio.wait((closing,), timeout=5)
        if not done:
            closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        self.closed.set()

    def _cannot_connect(self) -> BusError:
        if self._refused.is_set():
            return PermissionDenied(f"connect as {self.settings.name}: {self.last_error}")
        return Disconnected(f"no server of {', '.join(self.settings.servers)} reachable: {self.last_error}")

    # -- state

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set() and bool(self._client.is_connected)

    async def wait_connected(self, timeout: float | None = None) -> None:
        """Return as soon as messages can be sent; `Disconnected` when `timeout` seconds pass first."""
        try:
            async with asyncio.timeout(timeout):
                await self._connected.wait()
        except TimeoutError:
            raise Disconnected(f"not connected within {timeout} s: {self.last_error}") from None

    @property
    def max_payload_bytes(self) -> int:
        """Headers and body together may not exceed this."""
        return int(self._client.max_payload)

    def on_reconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each reconnect; returns what removes it."""
        return _register(self._reconnect_callbacks, callback)

    def on_disconnect(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` as soon as the connection is known to be lost; returns what removes it."""
        return _register(self._disconnect_callbacks, callback)

    def on_permission_error(self, callback: Callable[[str], None]) -> Callable[[], None]:
        """Call `callback` with the (lower case) subject of each refused publish; returns what removes it."""
        return _register(self._permission_callbacks, callback)

    # -- sending

    def new_inbox(self) -> str:
        return f"{self.settings.inbox_prefix}.{self._client._nuid.next().decode()}"

    def write_nowait(self, blob: bytes) -> None:
        """Hand protocol lines to the socket; they are sent in order, or lost when the connection breaks.

        Raises:
            Disconnected: nothing was taken.
        """
        if not self.is_connected:
            raise Disconnected("not connected")
        self._client.send_now(blob)

    async def write(self, blob: bytes) -> None:
        """Like `write_nowait`, and wait when much is pending, so that a slow server slows the sender."""
        self.write_nowait(blob)
        if self._client.unsent_bytes > 1 << 20:
            await self.flush(timeout=10)

    async def flush(self, timeout: float = 5) -> None:
        """Return when the server has processed everything sent so far."""
        try:
            await self._client.flush(timeout=timeout)
        except Exception as error:  # nats-py raises several kinds for the same thing
            raise Disconnected(f"flush: {error or type(error).__name__}") from error

    async def publish_core(
        self, subject: str, data: bytes, reply: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send outside any stream: at most once, no acknowledgement."""
        await self.write(self._encode(subject, (reply or "").encode(), data, headers))

    def answer_nowait(self, reply: bytes, data: bytes) -> None:
        """Answer from inside a raw sink, without a task; subjects that are no reply inbox are ignored.

        Raises:
            Disconnected: nothing was taken.
        """
        inbox = reply.decode()
        if inbox.startswith(_REPLY_PREFIXES):
            self.write_nowait(self._encode(inbox, b"", data, None))

    async def request(
        self, subject: str, data: bytes = b"", timeout: float = 2.0, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Ask whoever serves `subject`.

        Raises:
            NoResponders: nobody does. DeadlineExceeded, Disconnected: the request may have had its effect.
            PermissionDenied: the subject is not ours. RequestFailed: the service's own error.
        """
        reply, future = self.replies.expect(subject)
        try:
            await self.write(self._encode(subject, reply, data, headers))
            async with asyncio.timeout(timeout):
                answer = await future
        except TimeoutError:
            raise DeadlineExceeded(f"no answer on {subject} within {timeout} s") from None
        finally:
            self.replies.forget(reply)
        if wire.parse_status(answer.raw_headers)[0] == 503:
            raise NoResponders(f"nobody serves {subject}")
        if (code := answer.header(ERROR_HEADER)) is not None:
            raise RequestFailed(code, answer.data.decode("utf-8", "replace"))
        return answer

    def _encode(self, subject: str, reply: bytes, data: bytes, headers: Mapping[str, str] | None) -> bytes:
        if not wire.is_publishable(subject):
            raise PublishRefused(0, f"bad subject {subject!r}")
        fields = wire.encode_headers(headers) if headers else b""
        if len(fields) + len(data) + 12 > self.max_payload_bytes:
            raise PublishRefused(0, f"message on {subject} has {len(data)} bytes, limit {self.max_payload_bytes}")
        return wire.encode_publish(subject.encode(), reply, fields, data)

    # -- receiving

    async def subscribe_raw(self, subject: str, sink: Sink, queue: str = "") -> Subscription:
        """Give every message of `subject` to `sink` as bytes, inside the read loop."""
        inner = await self._client.subscribe(subject, queue=queue)
        self._client.sinks[inner._id] = sink
        return Subscription(self._client, inner)

    async def subscribe_core(
        self, subject: str, handler: CoreHandler, *, queue: str = "", max_pending: int = 10_000
    ) -> Subscription:
        """Call `handler` for every message, in order.

        A plain function runs inside the read loop and must be quick. A coroutine function runs in one task; when it
        falls `max_pending` messages behind, the oldest are dropped and counted.
        """
        if not inspect.iscoroutinefunction(handler):
            plain: Callable[[CoreMessage], object] = handler

            def deliver(subject: bytes, reply: bytes, data: bytes, raw: bytes | None) -> None:
                plain(CoreMessage(subject.decode(), data, reply.decode(), raw))

            return await self.subscribe_raw(subject, deliver, queue)

        pending: deque[CoreMessage] = deque(maxlen=max_pending)
        arrived = asyncio.Event()

        def enqueue(subject: bytes, reply: bytes, data: bytes, raw: bytes | None) -> None:
            if len(pending) == max_pending:
                self.counters.dropped_messages += 1
            pending.append(CoreMessage(subject.decode(), data, reply.decode(), raw))
            arrived.set()

        async def work() -> None:
            while True:
                await arrived.wait()
                arrived.clear()
                while pending:
                    message = pending.popleft()
                    try:
                        await handler(message)
                    except Exception:
                        log.exception("handler of %s raised", subject)

        subscription = await self.subscribe_raw(subject, enqueue, queue)
        subscription._worker = self._spawn(work())
        return subscription

    async def serve(
        self, subject: str, handler: RequestHandler, queue: str | None = None, *, max_concurrent: int = 64
    ) -> Subscription:
        """Answer requests on `subject`; up to `max_concurrent` at a time, the rest wait.

        `RequestFailed` from the handler reaches the caller as itself; any other exception as code `internal`.
        Requests without a reply inbox are ignored: answering them would publish on a subject the caller chose.
        """
        limit = asyncio.Semaphore(max_concurrent)

        async def answer(request: CoreMessage) -> None:
            async with limit:
                try:
                    result = await handler(request)
                    reply = result if isinstance(result, Answer) else Answer(result)
                except RequestFailed as failed:
                    reply = Answer(failed.text.encode(), {ERROR_HEADER: failed.code})
                except Exception:
                    log.exception("request on %s", request.subject)
                    reply = Answer(b"internal error", {ERROR_HEADER: "internal"})
            with contextlib.suppress(Disconnected):  # the caller has lost its connection too, or will time out
                await self.publish_core(request.reply, reply.data, headers=reply.headers)

        def accept(subject: bytes, reply: bytes, data: bytes, raw: bytes | None) -> None:
            inbox = reply.decode()
            if inbox.startswith(_REPLY_PREFIXES):
                self._spawn(answer(CoreMessage(subject.decode(), data, inbox, raw)))

        return await self.subscribe_raw(subject, accept, queue or "")

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return task

    # -- what nats-py tells us

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or type(error).__name__
        self.last_error = text
        if "permissions violation" in text.lower():
            self.counters.permission_errors += 1
            self.permission_errors.append(text)
            if self.counters.permission_errors <= _LOGGED_REFUSALS:  # a refused batch brings one for each message
                log.error("bus refused %s: %s", self.settings.name, text)
            subject = text.partition('"')[2].partition('"')[0]
            if "publish to" in text.lower():
                self.replies.on_permission_error(subject)
                _call_all(self._permission_callbacks, subject)
            return
        if "authorization violation" in text.lower() and not self._connected.is_set():
            self._refused.set()
        self.counters.other_errors += 1
        log.debug("bus error of %s: %s", self.settings.name, text)

    async def _on_disconnected(self) -> None:
        self._connected.clear()
        if self._is_closing:
            return
        self.counters.disconnects += 1
        log.warning("bus connection of %s lost", self.settings.name)
        self.replies.fail_all("connection lost")
        _call_all(self._disconnect_callbacks)

    async def _on_reconnected(self) -> None:
        self.counters.reconnects += 1
        self._connected.set()
        log.warning("bus connection of %s is back", self.settings.name)
        _call_all(self._reconnect_callbacks)

    async def _on_closed(self) -> None:
        self._connected.clear()
        self.replies.fail_all("connection closed")
        self.closed.set()

    async def _watch(self) -> None:
        """Notice a connection that is up by name only: a dead read loop or a server that stopped answering."""
        while not self.closed.is_set():
            await asyncio.sleep(self.settings.probe_interval_s)
            if not self.is_connected:
                self.counters.forced_reconnects += self._client.resume_reconnecting()
                continue
            try:
                if not self._client.has_live_tasks:
                    raise Disconnected("a client task has ended")
                await self.flush(timeout=self.settings.probe_interval_s)
            except Disconnected as error:
                if self.is_connected:
                    self.counters.forced_reconnects += 1
                    log.warning("bus connection of %s is stuck (%s), reconnecting", self.settings.name, error)
                    await self._client.force_reconnect()


_Callback = TypeVar("_Callback")


def _register(callbacks: list[_Callback], callback: _Callback) -> Callable[[], None]:
    callbacks.append(callback)

    def remove() -> None:
        if callback in callbacks:
            callbacks.remove(callback)

    return remove


def _call_all(callbacks: list[Callable[..., None]], *args: str) -> None:
    for callback in list(callbacks):
        try:
            callback(*args)
        except Exception:
            log.exception("bus callback raised")
