"""Sends finished spans as OTLP over HTTP from one background thread.

Instead of the SDK's batch processor and `requests`-based exporter: those cost 6 MB per process, wait five seconds and
may take thirty to stop. This one sleeps until there is a span, gathers for a moment, sends small batches over one kept
connection, and is done within two seconds at shutdown. When the receiver is away, spans are dropped, never queued
without bound: a trace is a comfort.
"""

import http.client
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence

_GATHER_SECONDS: Final = 0.3
_MAX_SPANS_PER_REQUEST: Final = 256
_MAX_QUEUED_SPANS: Final = 8192
_TIMEOUT_SECONDS: Final = 2.0
_COMPLAINT_INTERVAL_SECONDS: Final = 60.0

_log: Final = logging.getLogger(__name__)


class SpanShipper(SpanProcessor):
    """A span processor that posts spans to `endpoint` (`http[s]://host:port[/v1/traces]`)."""

    def __init__(self, endpoint: str, *, authorization: Callable[[], str | None]) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise ValueError(f"not an http(s) address: {endpoint}")
        self._parts = parts
        self._path = parts.path if parts.path.strip("/") else "/v1/traces"
        self._authorization = authorization
        self._queue: deque[ReadableSpan] = deque(maxlen=_MAX_QUEUED_SPANS)
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._next_complaint_seconds = 0.0
        self._is_sending = False
        self.sent_spans = 0
        self.lost_spans = 0
        self._thread = threading.Thread(target=self._run, name="span-shipper", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        if len(self._queue) == _MAX_QUEUED_SPANS:
            self.lost_spans += 1  # the deque drops its oldest
        self._queue.append(span)
        if not self._wake.is_set():
            self._wake.set()

    def shutdown(self) -> None:
        self._stopping.set()
        self._wake.set()
        self._thread.join(_TIMEOUT_SECONDS)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Wait until everything queued so far was sent or lost."""
        deadline = time.monotonic() + timeout_millis / 1000
        self._wake.set()
        while (self._queue or self._is_sending) and time.monotonic() < deadline:
            time.sleep(0.01)
        return not (self._queue or self._is_sending)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait()
            self._stopping.wait(_GATHER_SECONDS)
            self._wake.clear()
            self._drain()
        self._drain()
        self._close()

    def _drain(self) -> None:
        self._is_sending = True
        while self._queue:
            spans: list[ReadableSpan] = []
            while self._queue and len(spans) < _MAX_SPANS_PER_REQUEST:
                spans.append(self._queue.popleft())
            if self._deliver(spans):
                self.sent_spans += len(spans)
            else:
                self.lost_spans += len(spans)
        self._is_sending = False

    def _deliver(self, spans: "Sequence[ReadableSpan]") -> bool:
        from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

        body = encode_spans(spans).SerializeToString()
        # A kept connection may have been closed by the receiver in between: once more on a fresh one.
        for is_last_try in (False, True):
            try:
                status = self._post(body)
            except (OSError, http.client.HTTPException) as error:
                self._close()
                if is_last_try:
                    self._complain(f"{type(error).__name__}: {error}")
                continue
            if status < 300:
                return True
            self._complain(f"status {status}")
            return False
        return False

    def _post(self, body: bytes) -> int:
        if self._connection is None:
            https = self._parts.scheme == "https"
            opener = http.client.HTTPSConnection if https else http.client.HTTPConnection
            self._connection = opener(self._parts.hostname or "", self._parts.port, timeout=_TIMEOUT_SECONDS)
        headers = {"content-type": "application/x-protobuf"}
        authorization = self._authorization()
        if authorization is not None:
            headers["authorization"] = authorization
        self._connection.request("POST", self._path, body, headers)
        response = self._connection.getresponse()
        response.read()
        return response.status

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _complain(self, trouble: str) -> None:
        now = time.monotonic()
        if now >= self._next_complaint_seconds:
            self._next_complaint_seconds = now + _COMPLAINT_INTERVAL_SECONDS
            _log.warning("spans not delivered to %s:%s: %s", self._parts.hostname, self._parts.port, trouble)
