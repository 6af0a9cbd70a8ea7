"""The policy document: strict models for every knob, with the words of the glossary (`tests/scenarios/README.md`).

One document per pool. `defaults` holds for every class; under `classes` each class may override any of it. What is not
set is off. The models only say what a document may look like; `berth.decisions.policy.check` says whether it makes
sense, and lists every fault at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import time
from functools import cached_property
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints

from berth.contracts.base import DisplayName, Duration, Instant, JobClass, Strict
from berth.contracts.jobs import CardType, Whole


def _switch(value: object) -> object:
    """YAML 1.1 reads a bare `off` as false and `on` as true; both are meant as words here."""
    if value is False:
        return "off"
    if value is True:
        return "on"
    return value


def _number(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number; write it without quotes, for example 8 or 0.5")
    return value


def _time_of_day(value: object) -> object:
    """`21:00` without quotes is read by YAML 1.1 as the number of minutes, which is just what it means."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"{value // 60:02d}:{value % 60:02d}"
    if isinstance(value, time):
        value = f"{value.hour:02d}:{value.minute:02d}"
    return value


def _known_zone(value: str) -> str:
    from zoneinfo import ZoneInfo

    try:
        ZoneInfo(value)
    except (KeyError, ValueError, OSError):
        raise ValueError(f"{value!r} is no time zone; use a name such as Asia/Shanghai, Europe/Berlin or UTC") from None
    return value


# Bounds stand before the reader of the raw value: only so does pydantic write them into the JSON Schema.
Amount = Annotated[float, Field(ge=0, le=10_000_000, allow_inf_nan=False), BeforeValidator(_number)]
"""GPUs of one card type; parts of a card are decimals."""
PerType = dict[CardType, Amount]
PerTypeWhole = dict[CardType, Annotated[Whole, Field(ge=0, le=10_000_000)]]
Fraction01 = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(_number)]
Count = Annotated[Whole, Field(ge=0, le=2_147_483_647)]
TimeOfDay = Annotated[
    str, StringConstraints(pattern=r"^(([01][0-9]|2[0-3]):[0-5][0-9]|24:00)$"), BeforeValidator(_time_of_day)
]
Zone = Annotated[str, AfterValidator(_known_zone)]
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
ALL_DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


# ------------------------------------------------------------------------------------- settings of a class of jobs
class QueueSettings(Strict):
    """discipline: strict, backfill or best_effort. reserve_after: waiting time until a planned start; None: never, but
    backfill plans at once."""

    discipline: Literal["strict", "backfill", "best_effort"] = "best_effort"
    reserve_after: Duration | None = None


class FairShareSettings(Strict):
    """basis: none, current (GPUs held) or history (GPU time held, halved every half_life)."""

    basis: Literal["none", "current", "history"] = "none"
    half_life: Annotated[Duration, Field(gt=0)] = 7 * 86400


class PreemptionSettings(Strict):
    """Who may be stopped for whom. grace: longest time to stop after notice; None: as long as the job asks.
    min_runtime: no notice before so much running since the latest start."""

    by_priority: Annotated[Literal["off", "same_tenant", "any_tenant"], BeforeValidator(_switch)] = "off"
    reclaim: Annotated[Literal["off", "borrowed"], BeforeValidator(_switch)] = "off"
    fair: Annotated[Literal["off", "final_share"], BeforeValidator(_switch)] = "off"
    trim_elastic: bool = False
    victim_order: tuple[
        Literal["borrowed_first", "lowest_priority", "fewest_gpus", "latest_started", "least_lost"], ...
    ] = ("lowest_priority", "fewest_gpus", "latest_started")
    grace: Duration | None = None
    min_runtime: Duration = 0


class PlacementSettings(Strict):
    """strategy: pack fills the fullest node that fits, spread the emptiest. keep_links_whole: single GPUs come from
    link groups that are broken already."""

    strategy: Literal["pack", "spread"] = "pack"
    defragment: Annotated[Literal["off", "on"], BeforeValidator(_switch)] = "off"
    keep_links_whole: bool = False


class TypesSettings(Strict):
    """next_type_first: a free later card type before preempting on an earlier one; preempt_first: the reverse."""

    when_full: Literal["next_type_first", "preempt_first"] = "next_type_first"


class MigSettings(Strict):
    """idle_room: slices that no one uses may be cut anew; running ones are not touched."""

    repartition: Literal["never", "idle_room"] = "never"


class IdleSettings(Strict):
    """timeout since the last counted activity ended; None: off."""

    timeout: Annotated[Duration, Field(gt=0)] | None = None
    warn_before: Duration = 0
    counts: tuple[Literal["kernel_busy", "execution", "terminal_busy", "gpu_util"], ...] = (
        "kernel_busy",
        "execution",
        "terminal_busy",
        "gpu_util",
    )
    gpu_util_at_least: Fraction01 = 0.05


class LifetimeSettings(Strict):
    """max since the first start; None: no limit."""

    max: Annotated[Duration, Field(gt=0)] | None = None
    warn_before: Duration = 0
    extend_by: Duration = 0
    extensions: Count = 0


class BackoffSettings(Strict):
    """Pause after a failure of the job's own: first, first x factor, ... up to max (None: no upper bound)."""

    first: Duration = 0
    factor: Annotated[float, Field(ge=1, le=1000, allow_inf_nan=False), BeforeValidator(_number)] = 2.0
    max: Duration | None = None


class QuarantineSettings(Strict):
    """So many failed starts on a node within so long take it out."""

    failures: Annotated[Whole, Field(ge=1, le=1_000_000)]
    within: Annotated[Duration, Field(gt=0)]


class RecoverySettings(Strict):
    """suspect_after, lost_after (silence of a node) and quarantine belong to the pool and stand under `defaults` only.
    None: a silent node is never suspect, or never lost.

    gang_grace: how long a gang short of a worker is kept. max_restarts: charged restarts until a job has failed.
    """

    suspect_after: Annotated[Duration, Field(gt=0)] | None = None
    lost_after: Annotated[Duration, Field(gt=0)] | None = None
    gang_grace: Duration = 0
    max_restarts: Count = 0
    backoff: BackoffSettings = BackoffSettings()
    quarantine: QuarantineSettings | None = None
    charge_job_for_node_faults: bool = False
    ready_timeout: Annotated[Duration, Field(gt=0)] | None = None


class LimitSettings(Strict):
    """Upper bounds of one job; None: none."""

    gpus_per_job: Count | None = None
    workers_per_job: Count | None = None
    priority_max: Count | None = None
    name_length: Count | None = None


class ClassSettings(Strict):
    """All that may differ between classes."""

    queue: QueueSettings = QueueSettings()
    fair_share: FairShareSettings = FairShareSettings()
    preemption: PreemptionSettings = PreemptionSettings()
    placement: PlacementSettings = PlacementSettings()
    types: TypesSettings = TypesSettings()
    mig: MigSettings = MigSettings()
    idle: IdleSettings = IdleSettings()
    lifetime: LifetimeSettings = LifetimeSettings()
    recovery: RecoverySettings = RecoverySettings()
    limits: LimitSettings = LimitSettings()
    quota_cut: Literal["drain", "preempt"] = "drain"
    never_fits: Literal["refuse", "wait"] = "wait"


# ----------------------------------------------------------------------------------------------- settings of the pool
class CardTypeSettings(Strict):
    """A kind of GPU one can ask for. preference: lower is offered first to jobs that name no type."""

    memory_gib: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False), BeforeValidator(_number)] | None = None
    price_per_hour: Amount | None = None
    preference: Count = 100
    description: str = ""


class UserSettings(Strict):
    """A person and what they may do for this tenant."""

    name: DisplayName
    role: Literal["member", "tenant_admin", "viewer", "operator", "agent"] = "member"


class UsedBefore(Strict):
    """GPU hours from before Berth kept the record; they decay from `until` (None: from the activation on)."""

    gpu_hours: Amount
    until: Instant | None = None


class TenantSettings(Strict):
    """Who owns quota. quota: per card type; a type that is missing has no limit. borrow_limit missing: no limit;
    lend_limit missing: lends all."""

    quota: PerType = Field(default_factory=dict)
    memory_quota_gib: Amount | None = None
    cohort: DisplayName | None = None
    borrow_limit: PerType = Field(default_factory=dict)
    lend_limit: PerType = Field(default_factory=dict)
    weight: Amount = 1.0
    used_before: UsedBefore | None = None
    users: tuple[UserSettings, ...] = ()
    description: str = ""


class CohortSettings(Strict):
    """Tenants that may lend to each other. shared: GPUs that belong to no member."""

    shared: PerType = Field(default_factory=dict)


class Window(Strict):
    """When something holds: on these days from-to in its own zone; a window that ends before it begins runs over
    midnight and belongs to the day it begins on."""

    days: tuple[Day, ...] = ALL_DAYS
    from_: TimeOfDay = Field(alias="from")
    to: TimeOfDay
    zone: Zone


class ProtectionLine(Strict):
    """Capacity of a class that others may not touch, and what the class itself may take.

    reserved: kept for the class. floor: what preemption must leave the class. windows: when it holds; none: always.
    """

    name: DisplayName
    job_class: JobClass | None = Field(default=None, alias="class")
    tenant: DisplayName | None = None
    reserved: PerTypeWhole = Field(default_factory=dict)
    floor: PerTypeWhole = Field(default_factory=dict)
    lend_when_idle: bool = False
    windows: tuple[Window, ...] = ()
    clear_before: Duration = 0
    may_preempt: tuple[JobClass, ...] = ()
    max_preempt_share: Fraction01 | None = None
    share_window: Annotated[Duration, Field(gt=0)] = 3600
    when_unmet: Literal["wait", "preempt_lower_class"] = "wait"


class Reservation(Strict):
    """GPUs for a tenant from-to. clear_before: notice before it begins. running: what happens to those in the way."""

    name: DisplayName
    tenant: DisplayName
    gpus: PerTypeWhole
    from_: Instant = Field(alias="from")
    to: Instant
    announced: Instant | None = None
    clear_before: Duration = 0
    running: Literal["preempt", "let_finish"] = "let_finish"


class TelemetrySettings(Strict):
    """Readings older than stale_after prove nothing; None: never stale."""

    stale_after: Annotated[Duration, Field(gt=0)] | None = None


class HealthSettings(Strict):
    """Fault codes that take a GPU out, and those that are the program's own."""

    fatal_xids: tuple[Count, ...] = ()
    harmless_xids: tuple[Count, ...] = ()


class CleaningSettings(Strict):
    """wait for memory to be free after a job; None: off. kill_unknown: processes nobody knows are killed."""

    wait: Duration | None = None
    kill_unknown: bool = False


class IdempotencySettings(Strict):
    """window: how long a key is kept."""

    window: Annotated[Duration, Field(gt=0)] = 86400


class EventSettings(Strict):
    """park_after: tries until a message is set aside."""

    park_after: Annotated[Whole, Field(ge=1, le=1000)] = 5


class ApprovalSettings(Strict):
    """required_for: which changes a second operator has to approve before they are in force.

    none; protection: changes of protection lines, reservations, class order or of these settings; all.
    """

    required_for: Literal["none", "protection", "all"] = "none"


class Policy(Strict):
    """The whole document."""

    description: str = ""
    card_types: dict[CardType, CardTypeSettings] = Field(default_factory=dict)
    tenants: dict[DisplayName, TenantSettings] = Field(default_factory=dict)
    cohorts: dict[DisplayName, CohortSettings] = Field(default_factory=dict)
    defaults: ClassSettings = ClassSettings()
    classes: dict[JobClass, ClassSettings] = Field(default_factory=dict)
    class_order: tuple[JobClass, ...] = ()
    protection: tuple[ProtectionLine, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    telemetry: TelemetrySettings = TelemetrySettings()
    health: HealthSettings = HealthSettings()
    cleaning: CleaningSettings = CleaningSettings()
    idempotency: IdempotencySettings = IdempotencySettings()
    events: EventSettings = EventSettings()
    approval: ApprovalSettings = ApprovalSettings()

    @cached_property
    def _effective(self) -> dict[JobClass, ClassSettings]:
        return {}

    def for_class(self, job_class: JobClass) -> ClassSettings:
        """The settings in force for a class: the defaults with what the class sets itself on top."""
        found = self._effective.get(job_class)
        if found is None:
            own = self.classes.get(job_class)
            found = self.defaults if own is None else ClassSettings.model_validate(_over(self.defaults, own))
            self._effective[job_class] = found
        return found

    @cached_property
    def class_rank(self) -> Mapping[JobClass, int]:
        """Place in `class_order`, 0 the highest; classes that are not in it are missing."""
        return {job_class: rank for rank, job_class in enumerate(self.class_order)}

    def to_document(self) -> dict[str, Any]:
        """The document as plain JSON values; what was not set is left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """The policy that a document describes.

        Raises:
            pydantic.ValidationError: the document does not have the right form; `check` lists the faults.
        """
        return cls.model_validate(dict(document))


def _over(base: Strict, top: Strict) -> dict[str, Any]:
    return _merge(base.model_dump(by_alias=True, exclude_unset=True), top.model_dump(by_alias=True, exclude_unset=True))


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def load_policy(text: str) -> Policy:
    """The policy in YAML (or JSON) text.

    Raises:
        ValueError: not YAML, or not a policy; says what and where.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as wrong:
        raise ValueError(f"policy is not YAML: {wrong}") from None
    if not isinstance(document, dict):
        raise ValueError(f"a policy is a mapping, not {type(document).__name__}")
    return Policy.from_document(document)
