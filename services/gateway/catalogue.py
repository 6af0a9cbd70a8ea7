"""The policy in force, as this process knows it: from the database, looked at each second and before any "no"."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from berth.contracts.jobs import JobSpec
from berth.store.errors import TransientError
from services.gateway.policy_view import PolicyView
from services.gateway.problems import Fault
from services.gateway.store.queries import Activated

LOOK_SECONDS: Final = 1.0


class PolicyStore(Protocol):
    """Where activated policies are kept."""

    async def policy_version(self) -> int:
        """Of the newest."""

    async def policy(self, version: int | None = None) -> Activated | None:
        """The newest, or one of them."""

    async def card_types(self) -> frozenset[str]:
        """What nodes have reported."""


class Catalogue:
    """Keeps a `PolicyView`. A refusal is never given on an old one."""

    def __init__(self, store: PolicyStore) -> None:
        self._store = store
        self.view = PolicyView()

    async def refresh(self) -> bool:
        """Look at the database; whether the view has changed."""
        version = await self._store.policy_version()
        installed = await self._store.card_types()
        if (version, installed) == (self.view.version, self.view.installed):
            return False
        found = await self._store.policy(version) if version else None
        document = {} if found is None else found.document
        self.view = PolicyView.from_document(version, document, installed)
        return True

    async def faults(self, specs: list[JobSpec]) -> list[tuple[int, Fault]]:
        """What the policy makes of jobs, with their places; looked up afresh before anything is refused."""
        found = _faults(specs, self.view)
        if found and await self.refresh():
            found = _faults(specs, self.view)
        return found

    async def run(self) -> None:
        """Look every second, until cancelled."""
        while True:
            try:
                await self.refresh()
            except TransientError:
                pass
            await asyncio.sleep(LOOK_SECONDS)


def _faults(specs: list[JobSpec], view: PolicyView) -> list[tuple[int, Fault]]:
    return [(place, fault) for place, spec in enumerate(specs) for fault in view.faults(spec)]
