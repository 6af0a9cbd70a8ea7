"""The users of a campaign: they submit through REST, ask again with the same key until they are answered, and remember.

What they were told is what the platform is held to. They know nothing of the faults.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from tests.chaos.judge import FINAL, Asked

PROGRAM: Final = Path(__file__).with_name("program.py")
ANSWER_SECONDS: Final = 5.0
PAUSE_SECONDS: Final = 0.25
VARIANTS: Final = {"plain": 70, "fail_once": 10, "fail": 6, "stubborn": 6, "too_large": 4, "gang": 4}
"""Kinds of jobs by weight; a gang is plain with two workers."""
CANCELLED_SHARE: Final = 0.06


@dataclass(slots=True)
class Traffic:
    """How much of what. at_least: jobs in all. flowing: jobs asked for and not over at any time.

    seconds: run time of a program, lowest and highest.
    """

    at_least: int
    flowing: int
    seconds: tuple[float, float]
    card_types: tuple[str, ...] = ("H100-80G", "A100-40G")
    tenants: tuple[str, ...] = ("research", "product")


class Api:
    """The REST API with an operator's token. A request that is not answered is asked again until it is."""

    def __init__(self, url: Callable[[], str], token: str) -> None:
        self._url = url
        headers = {"Authorization": f"Bearer {token}"}
        self._client = httpx.AsyncClient(headers=headers, timeout=ANSWER_SECONDS, trust_env=False)
        self.unanswered = 0
        """Requests that got no answer, or one that says to come back."""

    async def close(self) -> None:
        await self._client.aclose()

    async def once(self, method: str, path: str, **arguments: Any) -> httpx.Response | None:
        """One request; None where no answer came or the answer is to try again."""
        try:
            answer = await self._client.request(method, self._url() + path, **arguments)
        except httpx.TransportError:
            self.unanswered += 1
            return None
        if answer.status_code in {429, 502, 503, 504}:
            self.unanswered += 1
            return None
        if answer.status_code >= 500:
            raise AssertionError(f"{method} {path}: {answer.status_code} {answer.text}")
        return answer

    async def asked(self, method: str, path: str, **arguments: Any) -> Any:
        """The body of the answer, however often it takes."""
        while True:
            answer = await self.once(method, path, **arguments)
            if answer is not None:
                if answer.is_error:
                    raise AssertionError(f"{method} {path}: {answer.status_code} {answer.text}")
                return answer.json()
            await asyncio.sleep(PAUSE_SECONDS)

    async def jobs(self) -> dict[str, dict[str, Any]]:
        """Every job by its id."""
        found: dict[str, dict[str, Any]] = {}
        parameters: dict[str, str] = {"limit": "200"}
        while True:
            page = await self.asked("GET", "/v1/jobs", params=parameters)
            found |= {job["job_id"]: job for job in page["jobs"]}
            if not page.get("next"):
                return found
            parameters["after"] = page["next"]


@dataclass(slots=True)
class Users:
    """Keeps jobs flowing until `enough` is set and there were as many as was asked for."""

    api: Api
    traffic: Traffic
    records: Path
    chance: random.Random
    asked: list[Asked] = field(default_factory=list)
    final: set[str] = field(default_factory=set)
    enough: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        """Submit a few at a time, while earlier ones end."""
        async with asyncio.TaskGroup() as tasks:
            while not self.enough.is_set() or len(self.asked) < self.traffic.at_least:
                room = self.traffic.flowing - (len(self.asked) - len(self.final))
                wanted = min(room, self.chance.choice((1, 1, 3, 10, 20)))
                if wanted > 0:
                    tasks.create_task(self._submit(wanted))
                await asyncio.sleep(PAUSE_SECONDS)
                await self._look()

    def submit_now(self, count: int) -> list[asyncio.Task[None]]:
        """Send so many single submissions at once."""
        return [asyncio.create_task(self._submit(1)) for _ in range(count)]

    async def until_all_final(self, seconds: float) -> None:
        """Wait for the end of every answered job, at most so long; the judge says what is missing."""
        deadline = asyncio.get_running_loop().time() + seconds
        wanted = {job.job_id for job in self.asked}
        while not wanted <= self.final and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(PAUSE_SECONDS)
            await self._look()

    async def _look(self) -> None:
        self.final = {job_id for job_id, job in (await self.api.jobs()).items() if job["state"] in FINAL}

    async def _submit(self, count: int) -> None:
        made = [self._make() for _ in range(count)]
        self.asked += [job for job, _ in made]
        # One key stands for one request; several jobs in one request are one submission.
        key = f"chaos-{self.chance.getrandbits(64):016x}"
        for job, _ in made:
            job.key = key
        body: dict[str, Any] = made[0][1] if count == 1 else {"jobs": [spec for _, spec in made]}
        while True:
            answer = await self.api.once("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": key})
            if answer is not None:
                break
            await asyncio.sleep(PAUSE_SECONDS)
        assert answer.status_code in {200, 201, 202}, f"{answer.status_code} {answer.text}"
        self._remember([job for job, _ in made], answer.json())
        if self.chance.random() < 0.1:  # a client that lost the answer asks again, much later than the first time
            again = await self.api.asked("POST", "/v1/jobs", json=body, headers={"Idempotency-Key": key})
            self._remember([job for job, _ in made], again)
        for job, _ in made:
            if self.chance.random() < CANCELLED_SHARE:
                await self._cancel(job)

    def _remember(self, made: list[Asked], answer: dict[str, Any]) -> None:
        answered = answer.get("jobs", [answer])
        assert len(answered) == len(made), f"{len(made)} jobs asked for, answered: {answer}"
        for job, told in zip(made, answered, strict=True):
            job.job_ids.append(told["job_id"])

    async def _cancel(self, job: Asked) -> None:
        job.cancelled = True
        await asyncio.sleep(self.chance.uniform(0.0, self.traffic.seconds[1]))
        await self.api.asked("POST", f"/v1/jobs/{job.job_id}/cancel", json={"why": "chaos"})

    def _make(self) -> tuple[Asked, dict[str, Any]]:
        kinds, weights = zip(*VARIANTS.items(), strict=True)
        kind = self.chance.choices(kinds, weights)[0]
        workers = 2 if kind == "gang" else 500 if kind == "too_large" else 1
        gpus = self.chance.choice((1, 1, 1, 2)) if kind != "too_large" else 8
        variant = "plain" if kind == "gang" else kind
        seconds = self.chance.uniform(*self.traffic.seconds)
        program = [sys.executable, "-I", "-S", str(PROGRAM), str(self.records), f"{seconds:.2f}", variant]
        spec = {
            "name": f"{kind}-{len(self.asked)}",
            "tenant": self.chance.choice(self.traffic.tenants),
            "class": "training" if kind == "gang" else "general",
            "workers": workers,
            "gpus": gpus,
            "types": list(self.traffic.card_types),
            "priority": self.chance.choice((50, 50, 80)),
            "command": program,
        }
        if variant == "fail":
            spec["max_restarts"] = 1
        return Asked("", variant, workers, gpus), spec
