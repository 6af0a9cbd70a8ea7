"""What the gateway needs of the policy in force: who the tenants are, which cards exist, and upper bounds.

Only a courtesy to the user, who hears at once what admission would say later; admission judges again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from berth.contracts.base import parse_duration
from berth.contracts.jobs import JobSpec
from services.gateway.problems import Fault, shown


@dataclass(frozen=True, slots=True)
class PolicyView:
    """A policy document as far as submissions are concerned. None: the policy does not say.

    idempotency_window_seconds: how long a key stands for its submission.
    """

    version: int = 0
    tenants: frozenset[str] | None = None
    card_types: frozenset[str] | None = None
    gpus_per_job: int | None = None
    workers_per_job: int | None = None
    priority_max: int | None = None
    name_length: int | None = None
    idempotency_window_seconds: int = 86400
    document: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_document(cls, version: int, document: Mapping[str, Any]) -> PolicyView:
        """Read leniently: admission has checked the document, and a newer one may say more than we know."""
        limits = _mapping(document.get("limits"))
        window = _mapping(document.get("idempotency")).get("window", 86400)
        try:
            seconds = parse_duration(window)
        except ValueError:
            seconds = 86400
        return cls(
            version=version,
            tenants=_names(document.get("tenants")),
            card_types=_names(document.get("card_types")),
            gpus_per_job=_whole(limits.get("gpus_per_job")),
            workers_per_job=_whole(limits.get("workers_per_job")),
            priority_max=_whole(limits.get("priority_max")),
            name_length=_whole(limits.get("name_length")),
            idempotency_window_seconds=seconds if isinstance(seconds, int) and seconds > 0 else 86400,
            document=document,
        )


def policy_faults(spec: JobSpec, policy: PolicyView, installed: frozenset[str] | None = None) -> list[Fault]:
    """What the policy in force makes of a well-formed job: faults of single fields, none where all is well.

    installed: card types that nodes have reported; used where the policy lists none.
    """
    faults: list[Fault] = []
    if policy.tenants is not None and spec.tenant not in policy.tenants:
        faults.append(
            Fault(
                "unknown_tenant",
                ("tenant",),
                "is not a tenant of this pool",
                "ask an operator to add it to the policy, or name another tenant",
                shown(spec.tenant),
            )
        )
    known = policy.card_types if policy.card_types else installed
    if known:
        for place, card_type in enumerate(spec.types):
            if card_type not in known:
                faults.append(
                    Fault(
                        "unknown_card_type",
                        ("types", place),
                        "is no card type of this pool",
                        f"use one of {', '.join(sorted(known))}",
                        shown(card_type),
                    )
                )
    faults += _limit(("gpus" if spec.gpus is not None else "workers",), spec.total_gpus, policy.gpus_per_job, "GPUs")
    faults += _limit(("roles" if spec.roles else "workers",), spec.total_workers, policy.workers_per_job, "workers")
    faults += _limit(("priority",), spec.priority, policy.priority_max, "as priority")
    faults += _limit(("name",), len(spec.name), policy.name_length, "characters")
    return faults


def _limit(path: tuple[str, ...], asked: int, limit: int | None, what: str) -> list[Fault]:
    if limit is None or asked <= limit:
        return []
    return [
        Fault(
            "over_limit",
            path,
            f"{asked} {what} are above the limit of {limit}",
            f"ask for at most {limit}, or have an operator raise the limit",
            str(asked),
        )
    ]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _names(value: Any) -> frozenset[str] | None:
    """Names of a list of `{name: ...}`, of plain names, or of a mapping by name."""
    if isinstance(value, Mapping):
        return frozenset(str(name) for name in value)
    if isinstance(value, list):
        return frozenset(str(item.get("name")) if isinstance(item, Mapping) else str(item) for item in value)
    return None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
