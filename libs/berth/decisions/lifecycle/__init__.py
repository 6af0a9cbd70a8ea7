"""Running attempts: launch, stop, retry, and what a job comes to in the end."""

from berth.decisions.lifecycle.core import LifecycleCore
from berth.decisions.lifecycle.states import (
    JOB_TRANSITIONS,
    WORKER_TRANSITIONS,
    InvalidTransition,
    JobTrigger,
    WorkerPhase,
    WorkerTrigger,
    advance,
)

__all__ = [
    "JOB_TRANSITIONS",
    "WORKER_TRANSITIONS",
    "InvalidTransition",
    "JobTrigger",
    "LifecycleCore",
    "WorkerPhase",
    "WorkerTrigger",
    "advance",
]
