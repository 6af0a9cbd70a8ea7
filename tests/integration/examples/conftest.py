"""Runs the example programs as their users do: as processes, with nothing but an environment."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


class Run(Protocol):
    """Starts an example; every started one is reaped at the end of the test."""

    def __call__(self, program: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]": ...


@pytest.fixture
def run() -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def begin(program: str, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, EXAMPLES / program, *arguments],
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            return port

    return find
