"""Asking other agents whether they hear the platform, to tell its outage from our own isolation.

Over TCP, not over the bus: the bus may be what is gone. One line each way:

    ask      a fresh nonce, in hex
    answer   {"pool", "nodes": [...], "hears": bool, "mac"}: the mac binds it to the nonce and to the fleet's common key

Who answers is found by name when it is needed (`BERTH_NODE_PEERS`): a headless Service, or a list of addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import orjson

from berth.telemetry.logs import get_logger

ASK_SECONDS: Final = 2.0
ASK_AT_ONCE: Final = 64
MAX_ANSWER_BYTES: Final = 1 << 20
DEFAULT_PORT: Final = 7946

log = get_logger("node_agent")


@dataclass(frozen=True, slots=True)
class PeerView:
    """What the peers said: the nodes of those that answered, and whether any of them hears the platform."""

    nodes: frozenset[str] = frozenset()
    anyone_hears: bool = False


class Peers:
    """One process's side of it. `addresses` empty: it has no peers, and asks nobody."""

    def __init__(
        self,
        *,
        pool: str,
        nodes: Iterable[str],
        hears: Callable[[], bool],
        addresses: str,
        key: bytes,
    ) -> None:
        self._pool = pool
        self._nodes = sorted(nodes)
        self._hears = hears
        self._addresses = [part.strip() for part in addresses.split(",") if part.strip()]
        self._key = key

    # -- answering

    async def serve(self, host: str, port: int) -> asyncio.Server:
        """Answer peers on `host`:`port` until the server is closed."""
        return await asyncio.start_server(self._answer, host, port, limit=256)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                nonce = (await reader.readline()).strip()
                if nonce:
                    writer.write(self.answer_to(nonce))
                    await writer.drain()
        except (OSError, ValueError, TimeoutError):
            pass  # not a peer, or one that has gone
        finally:
            writer.close()

    def answer_to(self, nonce: bytes) -> bytes:
        """The line that answers a question with this nonce."""
        said = {"pool": self._pool, "nodes": self._nodes, "hears": self._hears()}
        return orjson.dumps({**said, "mac": self._mac(nonce, said)}) + b"\n"

    # -- asking

    async def ask(self) -> PeerView:
        """Ask all peers at once; who does not answer within two seconds is not reached."""
        if not self._addresses:
            return PeerView()
        found = await self._resolved()
        limit = asyncio.Semaphore(ASK_AT_ONCE)

        async def bounded(host: str, port: int) -> PeerView:
            async with limit:
                return await self._ask_one(host, port)

        views = await asyncio.gather(*(bounded(host, port) for host, port in found))
        nodes = frozenset(name for view in views for name in view.nodes)
        return PeerView(nodes, any(view.anyone_hears for view in views))

    async def _resolved(self) -> set[tuple[str, int]]:
        """All addresses behind the names; a name that cannot be resolved now has none."""
        loop = asyncio.get_running_loop()
        found: set[tuple[str, int]] = set()
        for address in self._addresses:
            host, _, port = address.rpartition(":") if ":" in address else (address, "", str(DEFAULT_PORT))
            with contextlib.suppress(OSError, ValueError, TimeoutError):
                async with asyncio.timeout(ASK_SECONDS):
                    answers = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
                found.update((str(entry[4][0]), int(entry[4][1])) for entry in answers)
        return found

    async def _ask_one(self, host: str, port: int) -> PeerView:
        nonce = secrets.token_hex(16).encode()
        try:
            async with asyncio.timeout(ASK_SECONDS):
                reader, writer = await asyncio.open_connection(host, port, limit=MAX_ANSWER_BYTES)
                try:
                    writer.write(nonce + b"\n")
                    line = await reader.readline()
                finally:
                    writer.close()
            return self.read_answer(line, nonce)
        except (OSError, ValueError, TimeoutError):
            return PeerView()

    def read_answer(self, line: bytes, nonce: bytes) -> PeerView:
        """What an answer says. One of another pool, or without the right mac, says nothing.

        Raises ValueError when it is not JSON.
        """
        answer = orjson.loads(line)
        mac = answer.pop("mac", "")
        if answer.get("pool") != self._pool or not hmac.compare_digest(str(mac), self._mac(nonce, answer)):
            log.warning("answer of a peer is not to be trusted")
            return PeerView()
        return PeerView(frozenset(answer["nodes"]), bool(answer["hears"]))

    def _mac(self, nonce: bytes, said: object) -> str:
        message = nonce + b"\n" + orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


def fleet_key(credentials: Path | None) -> bytes:
    """A key all agents have and nobody else: made from the seed they log in to the bus with."""
    seed = credentials.read_bytes().strip() if credentials is not None else b""
    return hashlib.sha256(b"berth peers\n" + seed).digest()
