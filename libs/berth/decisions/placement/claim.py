"""What a job asks placement for, in the exact form that its answer depends on.

Jobs with equal claims get equal answers, so a pass tries each distinct claim once, however many jobs carry it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from typing import Any

from berth.contracts.base import JobClass
from berth.contracts.jobs import JobSpec

Amount = int | Fraction
"""GPUs, exactly: whole numbers stay integers, parts are fractions, so 0.1 + 0.2 is 0.3."""

MIB_PER_GIB = 1024


class Unit(StrEnum):
    """What a worker is given."""

    WHOLE = "whole"
    SHARE = "share"
    MEMORY = "memory"
    SLICE = "slice"


def exact(value: float | int | str) -> Amount:
    """The decimal number a person wrote, exactly; whole numbers as integers."""
    if isinstance(value, int):
        return value
    number = Fraction(str(value))
    return number.numerator if number.denominator == 1 else number


def exact_ratio(numerator: int, denominator: int) -> Amount:
    """A ratio of integers, exactly."""
    number = Fraction(numerator, denominator)
    return number.numerator if number.denominator == 1 else number


def plain(value: Amount) -> int | float:
    """A number for people and for JSON."""
    return value if isinstance(value, int) else (value.numerator if value.denominator == 1 else float(value))


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """`count` equal workers with `gpus` whole GPUs each (one part of a card each, where the unit is not whole)."""

    role: str
    count: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Shape:
    """What is asked for, without by whom: the part of a claim that decides where it fits.

    types: in order of preference; empty: any. min_workers: fewest workers it may start with; equal to all for a gang.
    """

    kinds: tuple[WorkerKind, ...]
    unit: Unit = Unit.WHOLE
    share: Fraction | None = None
    memory_mib: int | None = None
    slice: str | None = None
    types: tuple[str, ...] = ()
    mix_types: bool = False
    within: str | None = None
    is_required: bool = True
    is_gang: bool = True
    min_workers: int | None = None
    workers: int = field(init=False, compare=False)
    gpus: int = field(init=False, compare=False)
    largest: int = field(init=False, compare=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Work out once what every pass asks: workers of all kinds; whole GPUs of all, and of the largest worker (0
        where parts of cards are asked for)."""
        is_whole = self.unit is Unit.WHOLE
        object.__setattr__(self, "workers", sum(kind.count for kind in self.kinds))
        object.__setattr__(self, "gpus", sum(kind.count * kind.gpus for kind in self.kinds) if is_whole else 0)
        object.__setattr__(self, "largest", max(kind.gpus for kind in self.kinds) if is_whole else 0)
        compared = (self.kinds, self.unit, self.share, self.memory_mib, self.slice, self.types, self.within)
        object.__setattr__(self, "_hash", hash(compared))

    def __hash__(self) -> int:
        """Worked out once: claims are looked up far more often than made."""
        return self._hash


@dataclass(frozen=True, slots=True)
class Claim:
    """Everything an answer depends on, apart from time of submission and id."""

    tenant: str
    job_class: JobClass
    priority: int
    shape: Shape
    time_limit: int | None = None
    is_preemptible: bool = True
    stop_grace: int | None = None
    has_checkpoint: bool = True
    _hash: int = field(init=False, compare=False, repr=False)
    _json: dict[str, Any] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Work out the hash once; the record's form when first asked for."""
        object.__setattr__(self, "_hash", hash((self.tenant, self.job_class, self.priority, self.shape)))
        object.__setattr__(self, "_json", {})

    def __hash__(self) -> int:
        """Worked out once: claims are looked up far more often than made."""
        return self._hash

    def to_json(self) -> dict[str, Any]:
        """The compact form that records hold; shared by all jobs with this claim, so not to be changed."""
        if not self._json:
            self._json.update(_claim_to_json(self))
        return self._json


def claim_of(spec: JobSpec) -> Claim:
    """The claim of a job specification."""
    unit, share, memory_mib = Unit.WHOLE, None, None
    if spec.share is not None:
        unit, share = Unit.SHARE, Fraction(str(spec.share))
    elif spec.memory_gib is not None:
        unit, memory_mib = Unit.MEMORY, -int(-Fraction(str(spec.memory_gib)) * MIB_PER_GIB // 1)
    elif spec.slice is not None:
        unit = Unit.SLICE
    if spec.roles:
        kinds = tuple(WorkerKind(role.name, role.workers, role.gpus) for role in spec.roles)
    else:
        kinds = (WorkerKind("", spec.workers, spec.whole_gpus_per_worker if unit is Unit.WHOLE else 1),)
    shape = Shape(
        kinds=kinds,
        unit=unit,
        share=share,
        memory_mib=memory_mib,
        slice=spec.slice,
        types=spec.types,
        mix_types=spec.mix_types,
        within=spec.within,
        is_required=spec.within_mode == "required",
        is_gang=spec.gang,
        min_workers=spec.min_workers,
    )
    return Claim(
        tenant=spec.tenant,
        job_class=spec.job_class,
        priority=spec.priority,
        shape=shape,
        time_limit=spec.time_limit,
        is_preemptible=spec.preemptible,
        stop_grace=spec.stop_grace,
        has_checkpoint=spec.checkpoint,
    )


def _claim_to_json(claim: Claim) -> dict[str, Any]:
    """The compact form that records hold; what has its default is left out."""
    shape = claim.shape
    body: dict[str, Any] = {
        "tenant": claim.tenant,
        "class": claim.job_class.value,
        "priority": claim.priority,
        "kinds": [[kind.role, kind.count, kind.gpus] for kind in shape.kinds],
    }
    optional = {
        "unit": shape.unit.value if shape.unit is not Unit.WHOLE else None,
        "share": str(shape.share) if shape.share is not None else None,
        "memory_mib": shape.memory_mib,
        "slice": shape.slice,
        "types": list(shape.types) or None,
        "mix": shape.mix_types or None,
        "within": shape.within,
        "preferred": (not shape.is_required) or None,
        "loose": (not shape.is_gang) or None,
        "min_workers": shape.min_workers,
        "time_limit": claim.time_limit,
        "fixed": (not claim.is_preemptible) or None,
        "stop_grace": claim.stop_grace,
        "no_checkpoint": (not claim.has_checkpoint) or None,
    }
    body.update((key, value) for key, value in optional.items() if value is not None)
    return body


def claim_from_json(body: dict[str, Any]) -> Claim:
    """The claim in a record."""
    shape = Shape(
        kinds=tuple(WorkerKind(role, count, gpus) for role, count, gpus in body["kinds"]),
        unit=Unit(body.get("unit", "whole")),
        share=Fraction(body["share"]) if "share" in body else None,
        memory_mib=body.get("memory_mib"),
        slice=body.get("slice"),
        types=tuple(body.get("types", ())),
        mix_types=body.get("mix", False),
        within=body.get("within"),
        is_required=not body.get("preferred", False),
        is_gang=not body.get("loose", False),
        min_workers=body.get("min_workers"),
    )
    return Claim(
        tenant=body["tenant"],
        job_class=JobClass(body["class"]),
        priority=body["priority"],
        shape=shape,
        time_limit=body.get("time_limit"),
        is_preemptible=not body.get("fixed", False),
        stop_grace=body.get("stop_grace"),
        has_checkpoint=not body.get("no_checkpoint", False),
    )
