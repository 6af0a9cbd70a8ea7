"""What the gateway checks of a submission against the policy in force: tenants, card types, upper bounds.

Only a courtesy to the user, who hears at once what admission would say later; admission judges again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from berth.contracts.jobs import JobSpec
from berth.decisions.policy.document import Policy
from services.gateway.problems import Fault, shown


@dataclass(frozen=True, slots=True)
class PolicyView:
    """The policy in force, and the card types that nodes have reported. version 0: none is known yet."""

    version: int = 0
    policy: Policy = field(default_factory=Policy)
    installed: frozenset[str] = frozenset()

    @classmethod
    def from_document(cls, version: int, document: Mapping[str, Any], installed: frozenset[str]) -> PolicyView:
        """A document this program cannot read (a newer one wrote it) checks nothing here; admission still does."""
        try:
            return cls(version, Policy.from_document(document), installed)
        except ValidationError:
            return cls(version, Policy(), installed)

    @property
    def card_types(self) -> frozenset[str]:
        """What a job may ask for; empty: not known."""
        return frozenset(self.policy.card_types) or self.installed

    @property
    def tenants(self) -> frozenset[str]:
        """Who may own jobs; empty: not known."""
        return frozenset(self.policy.tenants)

    @property
    def key_seconds(self) -> int:
        """How long an idempotency key is kept."""
        return self.policy.idempotency.window

    def faults(self, spec: JobSpec) -> list[Fault]:
        """What the policy makes of a well-formed job: faults of single fields, none where all is well."""
        faults: list[Fault] = []
        if self.tenants and spec.tenant not in self.tenants:
            faults.append(
                Fault(
                    "unknown_tenant",
                    ("tenant",),
                    "is not a tenant of this pool",
                    "name another tenant, or ask an operator to add it to the policy",
                    shown(spec.tenant),
                )
            )
        if self.card_types:
            for place, card_type in enumerate(spec.types):
                if card_type not in self.card_types:
                    remedy = f"use one of {', '.join(sorted(self.card_types))}"
                    detail = "is no card type of this pool"
                    faults.append(Fault("unknown_card_type", ("types", place), detail, remedy, shown(card_type)))
        limits = self.policy.for_class(spec.job_class).limits
        by_workers = "roles" if spec.roles else "workers"
        by_gpus = "gpus" if spec.gpus is not None else by_workers
        faults += _over(by_workers, spec.total_workers, limits.workers_per_job, "workers are")
        faults += _over(by_gpus, spec.total_gpus, limits.gpus_per_job, "GPUs in all are")
        faults += _over("priority", spec.priority, limits.priority_max, "is")
        faults += _over("name", len(spec.name), limits.name_length, "characters are")
        return faults


def _over(field: str, asked: int, limit: int | None, words: str) -> list[Fault]:
    if limit is None or asked <= limit:
        return []
    remedy = f"ask for at most {limit}, or have an operator raise the limit"
    return [Fault("over_limit", (field,), f"{asked} {words} above the limit of {limit}", remedy, str(asked))]
