"""Asks the processes of a platform whether they are ready."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

from berth.embedded.layout import Layout


class NotReady(Exception):
    """A process did not become ready in time; names it, its reason and its log."""


async def wait_ready(layout: Layout, services: Iterable[str], timeout_s: float) -> None:
    """Return when every one of `services` answers `/readyz` with 200.

    Raises:
        NotReady: one did not within `timeout_s`.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    await asyncio.gather(*(_wait(layout, service, deadline) for service in services))


async def readiness(layout: Layout, service: str) -> tuple[bool, str]:
    """Whether a process is ready, and what it is waiting for."""
    try:
        port = int(json.loads(layout.service_file(service).read_text())["port"])
    except (FileNotFoundError, ValueError, KeyError):
        return False, "not started"
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                answer = await reader.read()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False, "does not answer"
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b" ", 2)[1:2] == [b"200"], _waits_for(body)


def _waits_for(body: bytes) -> str:
    """The checks of an answer of `/readyz` that do not hold, in words; what it says where it is no such answer."""
    text = body.decode(errors="replace").strip()
    try:
        checks = json.loads(text)["checks"]
        return ", ".join(f"{name}: {check['reason']}" for name, check in checks.items() if not check["ok"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return text


async def _wait(layout: Layout, service: str, deadline: float) -> None:
    why = ""
    while asyncio.get_running_loop().time() < deadline:
        is_ready, why = await readiness(layout, service)
        if is_ready:
            return
        await asyncio.sleep(0.05)
    raise NotReady(f"{service} is not ready: {why or 'no answer'}; see {layout.log_file(service)}")
