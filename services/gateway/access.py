"""Tokens: whose is this? Only hashes are stored; answers are kept in memory for a few seconds."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Protocol

from services.gateway.principals import Principal, Role

KEPT_SECONDS: Final = 5.0
KEPT_TOKENS: Final = 10_000
TOKEN_PREFIX: Final = "berth-"
ADMIN_USER: Final = "admin"


class TokenStore(Protocol):
    """Where tokens are kept."""

    async def principal(self, token_hash: bytes) -> Principal | None:
        """Whose token it is."""

    async def add_token(self, token_hash: bytes, token_id: str, principal: Principal, *, created_by: str) -> None:
        """Store one."""


def hash_of(token: str) -> bytes:
    """Tokens are long and random, so a plain hash is enough."""
    return hashlib.sha256(token.encode()).digest()


def new_token() -> str:
    """A token nobody can guess."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


class Access:
    """Answers for tokens, from memory where it was asked within `KEPT_SECONDS`; so long a revoked one still works."""

    def __init__(self, store: TokenStore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, Principal | None]] = OrderedDict()

    async def principal(self, token: str) -> Principal | None:
        """Whose token it is; None: nobody's."""
        key = hash_of(token)
        kept = self._known.get(key)
        if kept is not None and kept[0] > self._clock():
            return kept[1]
        found = await self._store.principal(key)
        self._known[key] = (self._clock() + KEPT_SECONDS, found)
        self._known.move_to_end(key)
        while len(self._known) > KEPT_TOKENS:
            self._known.popitem(last=False)
        return found

    async def create(self, principal: Principal, *, token_id: str, created_by: str) -> str:
        """A new token; shown this once."""
        token = new_token()
        await self._store.add_token(hash_of(token), token_id, principal, created_by=created_by)
        self._known.pop(hash_of(token), None)
        return token

    def forget(self) -> None:
        """After a token was revoked."""
        self._known.clear()

    async def take_over(self, token: str, role: Role, user: str) -> None:
        """Know a token that the platform made; an empty one is none."""
        if token:
            principal = Principal(user, None, role)
            await self._store.add_token(hash_of(token), f"{role.value}-file", principal, created_by="platform")
