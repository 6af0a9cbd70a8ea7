"""A gateway over parts in memory that really listens, and the command line against it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from berth.client.cli.main import main
from berth.client.sdk import BerthClient
from services.gateway.api.http import make_app
from tests.unit.gateway.fakes import World, make_world


@dataclass
class Platform:
    """Where it listens, and what is behind it."""

    url: str
    world: World

    def client(self, token: str = "member") -> BerthClient:
        return BerthClient(self.url, token)


@dataclass
class Ran:
    """What a command printed and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="module")
def platform() -> Iterator[Platform]:
    world = asyncio.run(make_world())
    config = uvicorn.Config(make_app(world.deps), host="127.0.0.1", port=0, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Platform(f"http://127.0.0.1:{port}", world)
    server.should_exit = server.force_exit = True
    thread.join(5)


class Cli:
    """Runs `berth` in this process."""

    def __init__(self, platform: Platform, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        self.folder = folder
        monkeypatch.chdir(folder)
        for name in ("BERTH_HOME", "BERTH_TENANT", "BERTH_TOKEN_FILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("BERTH_URL", platform.url)
        monkeypatch.setenv("BERTH_TOKEN", "member")
        monkeypatch.setenv("TERM", "dumb")

    def __call__(self, *arguments: str, stdin: str = "") -> Ran:
        out, err = io.StringIO(), io.StringIO()
        self._monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(list(arguments))
            except SystemExit as ended:
                code = int(ended.code or 0)
        return Ran(code, out.getvalue(), err.getvalue())

    def file(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return name


@pytest.fixture
def berth(platform: Platform, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    return Cli(platform, monkeypatch, tmp_path)
