"""Requests that come to a service in a scenario, as the route in front of it would count them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from berth.contracts.events import ServiceLoadReported
from berth.sim.scenarios.scenario import seconds

if TYPE_CHECKING:
    from berth.sim.scenarios.player import Stage

EVERY_SECONDS = 60


class Load:
    """The load of one service: steady, swinging, or requests that wait for the first replica."""

    def __init__(self, stage: Stage, service: str) -> None:
        self._stage = stage
        self._name = service
        self._clock = stage.platform.clock
        self._in_flight = 0.0
        self._stamp = self._clock.now
        self._plan = 0
        self._queued: list[tuple[datetime, int, str | None]] = []
        self.is_fresh = True
        self._tick()

    def steady(self, in_flight: float) -> None:
        """From now on so much."""
        self._plan += 1
        self._set(in_flight)

    def alternate(self, values: Sequence[float], every: timedelta, until: datetime | None) -> None:
        """One value after the other, each for so long; the last one stays."""
        self._plan += 1
        self._swing(list(values), 0, every, until, self._plan)

    def _swing(self, values: list[float], at: int, every: timedelta, until: datetime | None, plan: int) -> None:
        if plan != self._plan or (until is not None and self._clock.now >= until):
            return
        self._set(values[at % len(values)])
        self._clock.at(self._clock.now + every, lambda: self._swing(values, at + 1, every, until, plan))

    def arrive(self, requests: int, label: str | None) -> None:
        """So many requests come; they are answered at once where a replica is ready, else they wait for one."""
        from berth.sim.scenarios.player import Answer

        now = self._clock.now
        answer = Answer("try_later", asked_at=now)
        if label is not None:
            self._stage.answers[label] = answer
        self._queued.append((now, requests, label))
        self._set(sum(count for _, count, _ in self._queued))
        self.on_ready()
        wait = self._max_wait()
        if wait is not None:
            self._clock.at(now + timedelta(seconds=wait), self._give_up)

    def on_ready(self) -> None:
        """A replica may be ready: what waits is answered."""
        if not self._queued or not self._stage.service(self._name)["ready"]:
            return
        for _, _, label in self._queued:
            if label is not None:
                answer = self._stage.answers[label]
                answer.outcome, answer.answered_at = "answered", self._clock.now
        self._queued = []
        self._set(0)

    def _give_up(self) -> None:
        wait = self._max_wait() or 0
        late = [entry for entry in self._queued if (self._clock.now - entry[0]).total_seconds() >= wait]
        if late:
            self._queued = [entry for entry in self._queued if entry not in late]
            self._set(sum(count for _, count, _ in self._queued))

    def _max_wait(self) -> float | None:
        job = self._stage.job(self._name)
        service = job.spec.service if job is not None else None
        return None if service is None or service.max_wait is None else seconds(service.max_wait)

    # ------------------------------------------------------------------------------------------------------------
    def _set(self, in_flight: float) -> None:
        self._in_flight = in_flight
        self._tell()

    def _tick(self) -> None:
        """Readings keep coming; only where policy asks how old they are does that matter."""
        if "stale_after" in self._stage.scenario.body["policy"].get("telemetry", {}):
            self._tell()
            self._clock.at(self._clock.now + timedelta(seconds=EVERY_SECONDS), self._tick)

    def _tell(self) -> None:
        if self.is_fresh:
            self._stamp = max(self._stamp + timedelta(microseconds=1), self._clock.now)
        job_id = self._stage.names.get(self._name)
        if job_id is None:
            return
        fact = ServiceLoadReported(job_id=job_id, in_flight=self._in_flight, sampled_at=self._stamp)
        self._stage.platform.tell(fact, job_id)
