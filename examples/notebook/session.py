"""Stand-in for a notebook: a session that reads Python lines, keeps their state, and is idle most of the time.

It listens on BERTH_PORT (any free port without it, loopback only) for lines of text, evaluates each in one lasting
namespace and answers with the result: enough to play with start, idleness, reclaim with notice, and extension. Lines
run with the session's own rights, so every connection must begin with the token that is printed at the start (or given
as NOTEBOOK_TOKEN); use a real notebook server for real users.

On SIGTERM it saves its history to `history.txt` in BERTH_CKPT_DIR, if there is one, and leaves with 0.

    python examples/notebook/session.py
"""

import asyncio
import contextlib
import hmac
import io
import os
import secrets
import signal
import sys
import time
import traceback
from pathlib import Path

HEARTBEAT_SECONDS = 30.0


class Session:
    """One user's namespace and history."""

    def __init__(self) -> None:
        self.history: list[str] = []
        self.last_used = time.monotonic()
        self._namespace: dict[str, object] = {"__name__": "__notebook__"}

    def run(self, line: str) -> str:
        """Evaluate one line; the answer is what it printed, then its value or the error."""
        self.history.append(line)
        self.last_used = time.monotonic()
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                code = compile(line, "<cell>", "single")
                exec(code, self._namespace)
            except Exception:
                printed.write(traceback.format_exc(limit=0))
        self.last_used = time.monotonic()
        return printed.getvalue()

    @property
    def idle_seconds(self) -> float:
        return time.monotonic() - self.last_used


async def serve(session: Session, token: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection: the token first, then a line for each cell; an answer ends with an empty line."""
    try:
        given = (await reader.readline()).strip()
        if not hmac.compare_digest(given, token.encode()):
            writer.write(b"not the token\n\n")
            return
        writer.write(b"ready\n\n")
        while line := await reader.readline():
            answer = session.run(line.decode("utf-8", "replace").rstrip("\n"))
            writer.write(answer.encode() + b"\n")
            await writer.drain()
    except (OSError, ValueError):
        pass  # the user has closed the window, or sent a line beyond all measure
    finally:
        writer.close()


async def main() -> int:
    session = Session()
    token = os.environ.get("NOTEBOOK_TOKEN") or secrets.token_urlsafe(16)
    stop = asyncio.Event()
    for sign in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sign, stop.set)
    server = await asyncio.start_server(
        lambda reader, writer: serve(session, token, reader, writer),
        os.environ.get("HOST", "127.0.0.1"),
        int(os.environ.get("BERTH_PORT", "0")),
    )
    host, port = server.sockets[0].getsockname()[:2]
    print(f"notebook ready on {host}:{port}, token {token}", flush=True)
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), HEARTBEAT_SECONDS)
        print(f"cells run: {len(session.history)}, idle for {session.idle_seconds:.0f} s", flush=True)
    server.close()
    save_history(session)
    return 0


def save_history(session: Session) -> None:
    directory = os.environ.get("BERTH_CKPT_DIR")
    if directory:
        path = Path(directory) / "history.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(session.history) + "\n", encoding="utf-8")
        print(f"saved {len(session.history)} cells to {path}", flush=True)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
