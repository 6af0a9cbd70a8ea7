"""What each tenant has had: GPUs held now, and GPU time that fades with a half-life.

The faded sum is brought up to date only when what a tenant holds changes, so its value follows from recorded state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from berth.contracts.base import JobClass
from berth.decisions.placement.claim import Amount
from berth.decisions.placement.jobs import MICROSECONDS
from berth.decisions.policy.document import Policy


@dataclass(slots=True)
class Usage:
    """GPU seconds, faded up to `at` (microseconds); `held` since then."""

    past: float = 0.0
    at: int = 0
    held: Amount = 0


class Shares:
    """Usage of every tenant, and the share that order goes by."""

    def __init__(self) -> None:
        """Nobody has had anything."""
        self._policy = Policy()
        self.usage: dict[str, Usage] = {}
        self.seeded: dict[str, None] = {}

    def set_policy(self, policy: Policy, at: int) -> list[str]:
        """Take new weights; tenants seen for the first time begin with what they had before. Returns these."""
        self._policy = policy
        fresh = [name for name in policy.tenants if name not in self.seeded]
        for name in fresh:
            self.seeded[name] = None
            before = policy.tenants[name].used_before
            usage = self.usage.setdefault(name, Usage(at=at))
            if before is not None:
                until = at if before.until is None else round(before.until.timestamp() * MICROSECONDS)
                had = before.gpu_hours * 3600.0
                usage.past += had * self._fade(at - until)
        return fresh

    @property
    def is_used(self) -> bool:
        """Whether any class orders by history."""
        return any(self._policy.for_class(c).fair_share.basis == "history" for c in JobClass)

    def _half_life(self) -> float:
        return float(self._policy.defaults.fair_share.half_life)

    def _fade(self, microseconds: int) -> float:
        return float(2.0 ** (-max(microseconds, 0) / MICROSECONDS / self._half_life()))

    def note(self, tenant: str, held: Amount, at: int) -> None:
        """Bring a tenant's usage up to `at`; it holds so many GPUs from then on."""
        usage = self.usage.setdefault(tenant, Usage(at=at))
        usage.past, usage.at, usage.held = self._past(usage, at), max(at, usage.at), held

    def _past(self, usage: Usage, at: int) -> float:
        fade = self._fade(at - usage.at)
        if not usage.held:
            return usage.past * fade
        return usage.past * fade + float(usage.held) * (1.0 - fade) * self._half_life() / math.log(2.0)

    def of(self, tenant: str, job_class: JobClass, held: Amount, at: int) -> float:
        """The share that order goes by: smaller is served first; 0 for all where no basis is set; weight 0 last."""
        basis = self._policy.for_class(job_class).fair_share.basis
        if basis == "none":
            return 0.0
        settings = self._policy.tenants.get(tenant)
        weight = settings.weight if settings is not None else 1.0
        if weight == 0:
            return math.inf
        if basis == "current":
            return float(held) / weight
        usage = self.usage.get(tenant)
        return self._past(usage, at) / weight if usage is not None else 0.0
