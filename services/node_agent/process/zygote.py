"""The agent's end of the socket to the process that forks supervisors."""

import asyncio
import itertools
import marshal
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from services.node_agent.process import supervisor

ANSWER_BYTES = 4096

RequestPart = int | str | list[str] | dict[str, str]


class ZygoteGoneError(Exception):
    """The zygote ended before it answered, and nobody who could still answer is left."""


class RequestTooLongError(Exception):
    """Arguments and environment do not fit into one request."""


class Zygote:
    """One helper process, started when first needed and again when it is gone."""

    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[tuple[object, ...]]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._conn: socket.socket | None = None

    @property
    def pid(self) -> int:
        """0 when none runs."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Start it if it does not run; costs one bare interpreter (about 15 ms of CPU)."""
        if self._conn is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._log_path.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", supervisor.__file__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # a Ctrl-C meant for the agent is not meant for it
                    cwd="/",
                    env={},
                )
            except OSError:
                ours.close()
                raise
        ours.setblocking(False)
        self._conn = ours
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable)

    async def fork(self, body: Sequence[RequestPart]) -> tuple[object, ...]:
        """Ask for one supervisor; returns its answer without the request number.

        Raises:
            ZygoteGoneError: certain: the supervisor was not made, or it ended too.
            RequestTooLongError: the caller asks for too much.
        """
        self.start()
        number = next(self._numbers)
        data = marshal.dumps((number, *body))
        if len(data) > supervisor.MAX_REQUEST_BYTES:
            raise RequestTooLongError(f"{len(data)} bytes, at most {supervisor.MAX_REQUEST_BYTES}")
        future: asyncio.Future[tuple[object, ...]] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            await self._send(data)
            return await future
        finally:
            self._pending.pop(number, None)

    async def _send(self, data: bytes) -> None:
        while True:
            if self._conn is None:
                raise ZygoteGoneError
            try:
                self._conn.send(data)
            except BlockingIOError:
                await asyncio.sleep(
                    0.001
                )  # full only in a burst of hundreds; the zygote empties it at about 1,000 a second
            except OSError:
                self._lose()
            else:
                return

    def _on_readable(self) -> None:
        while self._conn is not None:
            try:
                data = self._conn.recv(ANSWER_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose()
                return
            number, *answer = marshal.loads(data)
            future = self._pending.get(number)
            if future is not None and not future.done():
                future.set_result(tuple(answer))

    def _lose(self) -> None:
        """End of file: the zygote and every supervisor that had not answered yet have closed their end."""
        self._close_connection()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ZygoteGoneError())

    def _close_connection(self) -> None:
        if self._conn is not None:
            asyncio.get_running_loop().remove_reader(self._conn.fileno())
            self._conn.close()
            self._conn = None
        if self._process is not None:
            try:
                self._process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                self._process.kill()  # it closed its socket and lives: of no use to anybody
                self._process.wait()
            self._process = None

    def kill(self) -> None:
        """End one that does not answer. Whoever waits hears of it once every supervisor in the making is gone."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Let it end; the supervisors it made go on. Whoever waits is cancelled: their requests are open."""
        self._close_connection()
        for future in self._pending.values():
            future.cancel()


def boot_id() -> str:
    """Identity of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def reason_text(code: int, stage: str) -> str:
    """`no such file or directory (exec)`."""
    return f"{os.strerror(code).lower()} ({stage})"
