"""What a campaign does to a platform: processes killed at chosen points of the protocol, or at any moment."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from berth.embedded.layout import SERVICES, STATEFUL
from berth.embedded.probe import readiness
from berth.testing.platform import TestPlatform
from tests.chaos.users import Users

POINTS: Final = ("before_commit", "between_commit_and_publish", "between_publish_and_ack")
AGENT_POINTS: Final = ("before_start", "between_start_and_ack", "before_publish", "between_publish_and_note")
STRIKE_SECONDS: Final = 40.0
RECOVER_SECONDS: Final = 90.0


class DidNotStrike(Exception):
    """A fault point was not passed, so nothing was proved."""


class DidNotRecover(Exception):
    """A part did not come back by itself."""


class Fault(ABC):
    """Something that is done to a platform; it must get over it by itself."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As the campaign's report has it."""

    @abstractmethod
    async def strike(self, platform: TestPlatform, users: Users) -> None:
        """Do it; returns when it is done, not when it is over."""


@dataclass(frozen=True, slots=True)
class KillAtPoint(Fault):
    """kill -9 of services at a point between two steps of their loop, at the n-th passing, all at about the same time."""

    services: Sequence[str]
    point: str
    passing: int = 1

    @property
    def name(self) -> str:
        return f"{'+'.join(self.services)} {self.point}:{self.passing}"

    async def strike(self, platform: TestPlatform, users: Users) -> None:
        pids = {service: platform.pid(service) for service in self.services}
        for service, pid in pids.items():
            passing = 1 if service == "inventory" else self.passing
            (platform.layout.run / f"{service}.fault").write_text(f"{service}.{self.point}:{passing}\n")
            _kill(pid, signal.SIGUSR1)
        if "inventory" in pids:  # it has little to commit while no node changes
            await Kill("node_agent").strike(platform, users)
        for service, pid in pids.items():
            if not await _until_gone(pid, STRIKE_SECONDS):
                raise DidNotStrike(f"{service} did not pass {self.point} {self.passing} times in {STRIKE_SECONDS} s")


@dataclass(frozen=True, slots=True)
class Kill(Fault):
    """kill -9 of a service, whatever it is doing."""

    service: str

    @property
    def name(self) -> str:
        return f"kill {self.service}"

    async def strike(self, platform: TestPlatform, users: Users) -> None:
        pid = platform.pid(self.service)
        _kill(pid, signal.SIGKILL)
        await _until_gone(pid, STRIKE_SECONDS)


@dataclass(frozen=True, slots=True)
class KillZygote(Fault):
    """kill -9 of the process that forks the programs' supervisors; those that run have nothing to do with it any more."""

    name = "kill the agent's zygote"

    async def strike(self, platform: TestPlatform, users: Users) -> None:
        for pid in _children(platform.pid("node_agent")):
            _kill(pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class KillGatewayMidRequest(Fault):
    """kill -9 of the gateway while submissions are on their way: nobody knows which of them were stored."""

    requests: int = 20

    @property
    def name(self) -> str:
        return f"kill gateway with {self.requests} submissions under way"

    async def strike(self, platform: TestPlatform, users: Users) -> None:
        tasks = users.submit_now(self.requests)
        await asyncio.sleep(users.chance.uniform(0.005, 0.06))
        await Kill("gateway").strike(platform, users)
        await asyncio.gather(*tasks)


@dataclass(frozen=True, slots=True)
class KillNats(Fault):
    """kill -9 of the bus."""

    name = "kill nats"

    async def strike(self, platform: TestPlatform, users: Users) -> None:
        pid = platform.nats.pid
        if pid is not None:
            _kill(pid, signal.SIGKILL)
            await _until_gone(pid, STRIKE_SECONDS)


@dataclass(frozen=True, slots=True)
class KillPostgres(Fault):
    """kill -9 of the database server and all its processes."""

    name = "kill postgres"

    async def strike(self, platform: TestPlatform, users: Users) -> None:
        await asyncio.to_thread(platform.postgres.kill)


@dataclass(frozen=True, slots=True)
class KillPostgresBackend(Fault):
    """kill -9 of one process of the database server, which then ends all others and recovers by itself."""

    name = "kill one postgres backend"

    async def strike(self, platform: TestPlatform, users: Users) -> None:
        postmaster = platform.postgres.pid
        if postmaster is None:
            return
        _kill(users.chance.choice(_children(postmaster) or [0]), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class KillEverything(Fault):
    """kill -9 of both servers and every service at once: a power cut that leaves the programs running."""

    name = "kill everything but the programs"

    async def strike(self, platform: TestPlatform, users: Users) -> None:
        kills = [Kill(service).strike(platform, users) for service in SERVICES]
        await asyncio.gather(KillNats().strike(platform, users), KillPostgres().strike(platform, users), *kills)


@dataclass(frozen=True, slots=True)
class Freeze(Fault):
    """A part stands still for a while, as under a debugger, or on a machine that swaps; it does not know."""

    part: str
    seconds: float

    @property
    def name(self) -> str:
        return f"freeze {self.part} for {self.seconds:g} s"

    async def strike(self, platform: TestPlatform, users: Users) -> None:
        await freeze(platform, self.part, self.seconds)


async def freeze(platform: TestPlatform, part: str, seconds: float) -> None:
    """Let a server or a service stand still for so long."""
    pid = await asyncio.to_thread(_server_pid, platform, part) or platform.pid(part)
    pids = [pid, *(_children(pid) if part == "postgres" else ())]
    for each in pids:
        _kill(each, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        for each in pids:
            _kill(each, signal.SIGCONT)


def short_list() -> list[Fault]:
    """One of each kind, several services at a time."""
    return [
        KillAtPoint(STATEFUL, POINTS[0], 2),
        KillNats(),
        KillAtPoint(STATEFUL, POINTS[1], 2),
        KillAtPoint(("node_agent",), "before_start"),
        KillPostgres(),
        KillAtPoint(STATEFUL, POINTS[2], 2),
        KillGatewayMidRequest(),
        KillPostgresBackend(),
    ]


def every_fault(chance: random.Random) -> Iterator[Fault]:
    """For ever: each service at each point, each part at any moment, in an order of chance."""
    while True:
        turn: list[Fault] = [
            KillAtPoint((service,), point, chance.choice((1, 1, 2, 5))) for service in STATEFUL for point in POINTS
        ]
        turn += [KillAtPoint(STATEFUL, point, chance.choice((1, 3))) for point in POINTS]
        turn += [KillAtPoint(("node_agent",), point, chance.choice((1, 2, 5))) for point in AGENT_POINTS]
        turn += [Kill(service) for service in SERVICES] + [Kill("node_agent")]
        turn += [KillGatewayMidRequest(chance.choice((5, 20, 60))) for _ in range(3)]
        turn += [KillNats(), KillNats(), KillPostgres(), KillPostgres(), KillPostgresBackend(), KillEverything()]
        turn += [Freeze(part, chance.uniform(0.5, 4.0)) for part in ("nats", "placement", "lifecycle", "node_agent")]
        turn += [Freeze(server, seconds) for server in ("nats", "postgres") for seconds in (2.0, 12.0)]
        turn += [Freeze(chance.choice(("placement", "lifecycle", "inventory", "audit")), 13.0), KillZygote()]
        chance.shuffle(turn)
        yield from turn


async def recovered(platform: TestPlatform) -> None:
    """Wait until both servers run and every service answers that it is ready.

    Raises:
        DidNotRecover: one does not.
    """
    deadline = asyncio.get_running_loop().time() + RECOVER_SECONDS
    waiting = dict.fromkeys((*SERVICES, "nats", "postgres"), "")
    while waiting:
        for server in ("nats", "postgres"):
            if server in waiting and await asyncio.to_thread(_server_pid, platform, server) is not None:
                del waiting[server]
        for service in waiting.keys() & set(SERVICES):
            pid = platform.pid(service)
            is_ready, why = await readiness(platform.layout, service)
            if is_ready and pid and pid == platform.pid(service) and _lives(pid):
                del waiting[service]
            else:
                waiting[service] = why or "no answer"
        if waiting and asyncio.get_running_loop().time() > deadline:
            raise DidNotRecover(f"not ready {RECOVER_SECONDS:.0f} s after the fault: {waiting}")
        await asyncio.sleep(0.1)


def _server_pid(platform: TestPlatform, server: str) -> int | None:
    return platform.nats.pid if server == "nats" else platform.postgres.pid if server == "postgres" else None


def names(faults: Iterable[Fault]) -> list[str]:
    """For reports."""
    return [fault.name for fault in faults]


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _kill(pid: int, number: signal.Signals) -> None:
    if pid > 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


async def _until_gone(pid: int, seconds: float) -> bool:
    """Whether a process, not our child, has ended by then; a zombie has ended."""
    deadline = asyncio.get_running_loop().time() + seconds
    while _lives(pid):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def _lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}
