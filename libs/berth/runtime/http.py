"""A small HTTP server for `/healthz`, `/readyz` and `/metrics`.

Hand-written on asyncio streams: three fixed pages for probes do not need a framework, which would cost each of seven
processes 10 MB. It answers GET and HEAD, one request per connection, and bounds size, time and number of connections.
"""

import asyncio
import os
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Final

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from berth.runtime.health import Health

_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
_MAX_HEADER_BYTES: Final = 16 * 1024
_REQUEST_TIMEOUT_SECONDS: Final = 5.0
_MAX_CONNECTIONS: Final = 64

Page = tuple[HTTPStatus, str, bytes]
Handler = Callable[[str], Page]


class HealthServer:
    """Serves one process's health and metrics; use as an async context manager.

    Args:
        health: the checks.
        registry: the process's metrics.
        host: address to bind; loopback by default, since metrics name tenants' classes and card types.
        port: 0 for any free one; `port` tells which.
        run_file: where pid and port are reported, removed at the end; None for nowhere.
    """

    def __init__(
        self,
        health: Health,
        registry: CollectorRegistry,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        run_file: Path | None = None,
    ) -> None:
        self._health = health
        self._registry = registry
        self._host = host
        self._asked_port = port
        self._run_file = run_file
        self._server: asyncio.Server | None = None
        self._connections = 0
        self._pages: dict[str, Handler] = {"/healthz": self._live, "/readyz": self._ready, "/metrics": self._metrics}
        self.port = port

    async def __aenter__(self) -> "HealthServer":
        self._server = await asyncio.start_server(
            self._serve, self._host, self._asked_port, limit=_MAX_HEADER_BYTES, backlog=_MAX_CONNECTIONS
        )
        self.port = self._server.sockets[0].getsockname()[1]
        if self._run_file is not None:
            write_run_file(self._run_file, port=self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._run_file is not None:
            remove_run_file(self._run_file)
        if self._server is not None:
            # Not wait_closed(): a slow scraper must not hold up the end of the process.
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_REQUEST_TIMEOUT_SECONDS):
                    await self._answer(reader, writer)
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # a prober that went away or speaks something else
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        request, _, rest = head.decode("latin-1").partition("\r\n")
        parts = request.split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            status, kind, body = _plain(HTTPStatus.BAD_REQUEST)
        elif parts[0] not in {"GET", "HEAD"}:
            status, kind, body = _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        else:
            page = self._pages.get(parts[1].partition("?")[0])
            status, kind, body = page(_accepted(rest)) if page else _plain(HTTPStatus.NOT_FOUND)
        writer.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n"
            "cache-control: no-store\r\nconnection: close\r\n\r\n".encode()
        )
        if parts[0] != "HEAD":
            writer.write(body)
        await writer.drain()

    def _live(self, _: str) -> Page:
        return HTTPStatus.OK, "application/json", orjson.dumps(self._health.live_page())

    def _ready(self, _: str) -> Page:
        is_ready, page = self._health.ready_page()
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return status, "application/json", orjson.dumps(page, option=orjson.OPT_INDENT_2)

    def _metrics(self, accept: str) -> Page:
        # OpenMetrics unless only the old text form is wanted: exemplars exist in OpenMetrics alone.
        if "text/plain" in accept and "openmetrics" not in accept:
            return HTTPStatus.OK, _TEXT, generate_text(self._registry)
        return HTTPStatus.OK, OPENMETRICS, generate_openmetrics(self._registry)  # type: ignore[no-untyped-call]


def write_run_file(path: Path, *, port: int, **more: object) -> None:
    """Report this process: pid, port, start time and `more`; written whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    report = {"pid": os.getpid(), "port": port, "started_at": datetime.now(UTC), **more}
    temporary.write_bytes(orjson.dumps(report, option=orjson.OPT_UTC_Z))
    temporary.replace(path)


def remove_run_file(path: Path) -> None:
    """Take the report back, unless a successor has written its own meanwhile."""
    try:
        if orjson.loads(path.read_bytes()).get("pid") == os.getpid():
            path.unlink()
    except (OSError, orjson.JSONDecodeError):
        pass


def _accepted(headers: str) -> str:
    for line in headers.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "accept":
            return value.lower()
    return ""


def _plain(status: HTTPStatus) -> Page:
    return status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode()
