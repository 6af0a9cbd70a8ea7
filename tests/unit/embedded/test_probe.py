"""What a process that is not ready is said to wait for."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from berth.embedded.layout import Layout
from berth.embedded.probe import readiness


async def answer_of(home: Path, page: bytes, status: str = "503 Service Unavailable") -> tuple[bool, str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode() + page)
        await writer.drain()
        writer.close()

    layout = Layout(home)
    layout.service_file("placement").parent.mkdir(parents=True)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        layout.service_file("placement").write_text(json.dumps({"port": port}))
        return await readiness(layout, "placement")


def test_the_checks_that_do_not_hold_are_named_with_their_reasons(tmp_path: Path) -> None:
    checks = {"bus": {"ok": True, "reason": None}, "leader": {"ok": False, "reason": "starting"}}
    page = json.dumps({"status": "not_ready", "service": "placement", "checks": checks}, indent=2).encode()
    assert asyncio.run(answer_of(tmp_path, page)) == (False, "leader: starting")


def test_an_answer_of_another_kind_is_given_as_it_is(tmp_path: Path) -> None:
    assert asyncio.run(answer_of(tmp_path, b"busy\n")) == (False, "busy")


def test_a_ready_process_waits_for_nothing(tmp_path: Path) -> None:
    page = json.dumps({"status": "ready", "checks": {"bus": {"ok": True, "reason": None}}}).encode()
    assert asyncio.run(answer_of(tmp_path, page, "200 OK")) == (True, "")
