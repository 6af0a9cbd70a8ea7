"""Programs of a simulation: how long they run, how they stop, when they crash, and how far they have come."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta


@dataclass(slots=True)
class Program:
    """What a job's program does, in seconds of running.

    runtime: until it ends by itself; None: never. stop_seconds: from notice to the end. crash_after, crashes: it fails
    so long after each start, so many times (None: always); crash_as_refusal: by not starting at all.
    is_resumed: stopped work goes on where it was; checkpoint_every: work is saved that often, and when it is told to
    stop; None: at any moment. cold_start: from the start of a replica until it is ready; None: it
    is no replica.
    """

    runtime: float | None = None
    stop_seconds: float = 0
    crash_after: float | None = None
    crashes: int | None = 0
    crash_as_refusal: bool = False
    is_resumed: bool = True
    checkpoint_every: float | None = None
    cold_start: float | None = None


@dataclass(slots=True)
class Progress:
    """How far a job's program has come: `saved` survives the attempt, `since` is when the present run began.

    members: workers that run now; needed: how many must run for the work to go on; run: changes with each start and
    stop of the work, so that an alarm set for an earlier run is known to be void.
    """

    program: Program
    saved: float = 0
    since: datetime | None = None
    starts: int = 0
    crashed: int = 0
    needed: int = 1
    members: set[int] = field(default_factory=set)
    run: int = 0

    def at(self, now: datetime) -> float:
        """Seconds of work done, whether saved or not."""
        return self.saved + ((now - self.since).total_seconds() if self.since is not None else 0.0)

    def begin(self, now: datetime) -> None:
        """All members run: the work goes on."""
        self.since = now
        self.run += 1

    def halt(self, now: datetime, *, is_saved: bool) -> None:
        """The work stands still. is_saved: there was time to save; else only the latest checkpoint is left."""
        if self.since is None:
            return
        done = self.at(now)
        every = self.program.checkpoint_every
        if not self.program.is_resumed:
            self.saved = 0
        elif is_saved or every is None:
            self.saved = done
        else:
            self.saved = max(self.saved, done // every * every)
        self.since = None
        self.run += 1

    def ends_at(self) -> datetime | None:
        """When the program ends by itself, if it goes on as now."""
        if self.program.runtime is None or self.since is None:
            return None
        return self.since + timedelta(seconds=max(self.program.runtime - self.saved, 0))

    def crashes_at(self) -> datetime | None:
        """When it crashes, if it goes on as now."""
        program = self.program
        if program.crash_after is None or self.since is None or not self.may_crash:
            return None
        return self.since + timedelta(seconds=program.crash_after)

    @property
    def may_crash(self) -> bool:
        """Whether crashes are left."""
        limit = self.program.crashes
        return self.program.crash_after is not None and (limit is None or self.crashed < limit)
