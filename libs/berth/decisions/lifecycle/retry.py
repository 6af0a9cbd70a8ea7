"""Whether a job that lost an attempt gets another, what it costs it, and when."""

from __future__ import annotations

from dataclasses import dataclass

from berth.contracts.jobs import JobSpec
from berth.decisions.policy.document import RecoverySettings

FREE_STARTS = 3
"""So many starts in a row may go wrong at once by no fault of the job's; then they are spaced out, or a broken node
and an eager queue would turn in a circle."""
LONGEST_PAUSE_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Retry:
    """charged: restarts counted from here on. pause_seconds: before it competes again."""

    charged: int
    pause_seconds: float


def after_own_failure(spec: JobSpec, rules: RecoverySettings, *, charged: int) -> Retry | None:
    """The next try after the program's own failure; None: all restarts are spent.

    The pause is first x factor^n for the n-th restart (from 0), at most `max`.
    """
    allowed = rules.max_restarts if spec.max_restarts is None else spec.max_restarts
    if charged >= allowed:
        return None
    return Retry(charged + 1, backoff_seconds(rules, restarts=charged))


def after_node_fault(spec: JobSpec, rules: RecoverySettings, *, charged: int, unstarted: int) -> Retry | None:
    """The next try after something that was not the program's fault; None only where policy charges it and all
    restarts are spent.

    Args:
        unstarted: attempts in a row that never ran.
    """
    pause = 0.0 if unstarted <= FREE_STARTS else float(min(2 ** (unstarted - FREE_STARTS), LONGEST_PAUSE_SECONDS))
    if not rules.charge_job_for_node_faults:
        return Retry(charged, pause)
    allowed = rules.max_restarts if spec.max_restarts is None else spec.max_restarts
    return Retry(charged + 1, pause) if charged < allowed else None


def backoff_seconds(rules: RecoverySettings, *, restarts: int) -> float:
    """Pause before restart number `restarts` + 1."""
    backoff = rules.backoff
    # bounded before the power is taken: a large count would overflow a float
    longest = float(backoff.max) if backoff.max is not None else 365.0 * 86400
    pause = float(backoff.first)
    for _ in range(restarts):
        if pause >= longest or pause == 0:
            break
        pause *= backoff.factor
    return min(pause, longest)
