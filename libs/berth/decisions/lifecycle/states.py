"""The states of a job and of a worker: two tables, and the one function that moves along them.

A job, as lifecycle sees it (before its first placement it is only known, which is WAITING here):

```
             PLACED            ALL_STARTED           NODE_SILENT
  WAITING ───────────▶ STARTING ─────────▶ RUNNING ◀──────────────▶ UNKNOWN
     ▲                    │ STOP              │ STOP   NODE_HEARD      │ STOP
     │                    ▼                   ▼                        ▼
     │                 STOPPING ◀─────────────┴────────────────────────┘
     │ REQUEUE            │
     └────────────────────┤ (from each of the four, once no process of the attempt holds a card)
                          ▼
        SUCCEEDED | FAILED | CANCELLED | RECLAIMED
```

A worker:

```
  ASSIGNED ─SEND─▶ LAUNCHING ─START─▶ RUNNING ─EXIT─▶ EXITED ─RELEASE─▶ OVER
     ▲                │  │               └─RELEASE─▶ RELEASED ─EXIT──────▲
     └────REFUSE──────┘  └──── LOSE (from every state before) ────────────┘
```

All states survive a crash: they are stored with the job. What follows from them (timers, which node runs what) is
derived again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

from berth.contracts.jobs import JobState


class InvalidTransition(ValueError):
    """A trigger that the state does not know. Whoever raised the trigger is at fault; nothing was changed."""


class JobTrigger(StrEnum):
    """What moves a job."""

    PLACED = "placed"
    ALL_STARTED = "all_started"
    NODE_SILENT = "node_silent"
    NODE_HEARD = "node_heard"
    STOP = "stop"
    SUCCEED = "succeed"
    FAIL = "fail"
    CANCEL = "cancel"
    RECLAIM = "reclaim"
    REQUEUE = "requeue"


_ENDS = {
    JobTrigger.SUCCEED: JobState.SUCCEEDED,
    JobTrigger.FAIL: JobState.FAILED,
    JobTrigger.CANCEL: JobState.CANCELLED,
    JobTrigger.RECLAIM: JobState.RECLAIMED,
    JobTrigger.REQUEUE: JobState.WAITING,
}

JOB_TRANSITIONS: Mapping[tuple[JobState, JobTrigger], JobState] = {
    (JobState.WAITING, JobTrigger.PLACED): JobState.STARTING,
    (JobState.WAITING, JobTrigger.CANCEL): JobState.CANCELLED,
    (JobState.STARTING, JobTrigger.ALL_STARTED): JobState.RUNNING,
    (JobState.RUNNING, JobTrigger.NODE_SILENT): JobState.UNKNOWN,
    (JobState.UNKNOWN, JobTrigger.NODE_HEARD): JobState.RUNNING,
    (JobState.STARTING, JobTrigger.STOP): JobState.STOPPING,
    (JobState.RUNNING, JobTrigger.STOP): JobState.STOPPING,
    (JobState.UNKNOWN, JobTrigger.STOP): JobState.STOPPING,
    **{
        (state, trigger): after
        for state in (JobState.STARTING, JobState.RUNNING, JobState.UNKNOWN, JobState.STOPPING)
        for trigger, after in _ENDS.items()
    },
}


class WorkerPhase(StrEnum):
    """How far a worker of a live attempt is.

    ASSIGNED: not launched, certainly. LAUNCHING: a launch was sent, nothing is known yet. RELEASED: holds no card, and
    the report of its end is still on its way. OVER: holds no card and all is told.
    """

    ASSIGNED = "assigned"
    LAUNCHING = "launching"
    RUNNING = "running"
    EXITED = "exited"
    RELEASED = "released"
    OVER = "over"


class WorkerTrigger(StrEnum):
    """What moves a worker."""

    SEND = "send"
    REFUSE = "refuse"
    START = "start"
    EXIT = "exit"
    RELEASE = "release"
    LOSE = "lose"


WORKER_TRANSITIONS: Mapping[tuple[WorkerPhase, WorkerTrigger], WorkerPhase] = {
    (WorkerPhase.ASSIGNED, WorkerTrigger.SEND): WorkerPhase.LAUNCHING,
    (WorkerPhase.LAUNCHING, WorkerTrigger.SEND): WorkerPhase.LAUNCHING,
    (WorkerPhase.LAUNCHING, WorkerTrigger.REFUSE): WorkerPhase.ASSIGNED,
    # reports may overtake each other: an end says that there was a start, a release that there was an end
    (WorkerPhase.ASSIGNED, WorkerTrigger.START): WorkerPhase.RUNNING,
    (WorkerPhase.LAUNCHING, WorkerTrigger.START): WorkerPhase.RUNNING,
    (WorkerPhase.ASSIGNED, WorkerTrigger.EXIT): WorkerPhase.EXITED,
    (WorkerPhase.LAUNCHING, WorkerTrigger.EXIT): WorkerPhase.EXITED,
    (WorkerPhase.RUNNING, WorkerTrigger.EXIT): WorkerPhase.EXITED,
    (WorkerPhase.ASSIGNED, WorkerTrigger.RELEASE): WorkerPhase.RELEASED,
    (WorkerPhase.LAUNCHING, WorkerTrigger.RELEASE): WorkerPhase.RELEASED,
    (WorkerPhase.RUNNING, WorkerTrigger.RELEASE): WorkerPhase.RELEASED,
    (WorkerPhase.EXITED, WorkerTrigger.RELEASE): WorkerPhase.OVER,
    (WorkerPhase.RELEASED, WorkerTrigger.EXIT): WorkerPhase.OVER,
    (WorkerPhase.RELEASED, WorkerTrigger.LOSE): WorkerPhase.OVER,
    (WorkerPhase.ASSIGNED, WorkerTrigger.LOSE): WorkerPhase.OVER,
    (WorkerPhase.LAUNCHING, WorkerTrigger.LOSE): WorkerPhase.OVER,
    (WorkerPhase.RUNNING, WorkerTrigger.LOSE): WorkerPhase.OVER,
    (WorkerPhase.EXITED, WorkerTrigger.LOSE): WorkerPhase.OVER,
}

State = TypeVar("State", bound=StrEnum)
Trigger = TypeVar("Trigger", bound=StrEnum)


def advance(table: Mapping[tuple[State, Trigger], State], state: State, trigger: Trigger) -> State:
    """The state after `trigger`.

    Raises:
        InvalidTransition: the table has no such pair.
    """
    after = table.get((state, trigger))
    if after is None:
        raise InvalidTransition(f"{trigger} is not known in state {state}")
    return after
