import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from berth.telemetry.trace_store import SpanRecord, decode_export_request
from berth.telemetry.tracing import init_tracing, root_span, shutdown_tracing


@dataclass
class Receiver:
    """A trace endpoint that keeps what it was sent."""

    endpoint: str = ""
    paths: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    spans: list[SpanRecord] = field(default_factory=list)
    arrived: threading.Event = field(default_factory=threading.Event)
    status: int = 200


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    kept = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            kept.paths.append(self.path)
            kept.authorizations.append(self.headers["authorization"])
            kept.spans += decode_export_request(body)
            self.send_response(kept.status)
            self.send_header("content-length", "0")
            self.end_headers()
            kept.arrived.set()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    kept.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield kept
    server.shutdown()
    server.server_close()


@dataclass
class Settings:
    otlp_endpoint: str | None
    trace_sample_ratio: float = 1.0
    trace_roots_per_second: float = 10.0

    def otlp_authorization(self) -> str | None:
        return "Bearer t0ken"


def test_spans_arrive_by_themselves_within_two_seconds(receiver: Receiver) -> None:
    init_tracing("gateway", Settings(receiver.endpoint))

    with root_span("gateway", "POST /v1/jobs", attributes={"berth.tenant": "vision"}):
        pass

    assert receiver.arrived.wait(2)
    (span,) = receiver.spans
    assert (span.name, span.service, span.attributes["berth.tenant"]) == ("POST /v1/jobs", "gateway", "vision")
    assert receiver.paths == ["/v1/traces"]
    assert receiver.authorizations == ["Bearer t0ken"]
    shutdown_tracing("gateway")


def test_what_is_left_is_sent_at_shutdown(receiver: Receiver) -> None:
    init_tracing("gateway", Settings(receiver.endpoint))
    with root_span("gateway", "last"):
        pass

    shutdown_tracing("gateway")

    assert [span.name for span in receiver.spans] == ["last"]


def test_an_absent_or_refusing_receiver_harms_nobody(receiver: Receiver) -> None:
    receiver.status = 503
    for endpoint in (receiver.endpoint, "http://127.0.0.1:9"):
        init_tracing("gateway", Settings(endpoint))
        with root_span("gateway", "lost"):
            pass
        shutdown_tracing("gateway")


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(ValueError, match="not an http"):
        init_tracing("gateway", Settings("ftp://x"))
