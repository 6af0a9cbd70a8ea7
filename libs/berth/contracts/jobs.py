"""What a tenant asks for: the job specification, as submitted and as carried in events."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator

from berth.contracts.base import DisplayName, Duration, JobClass, Wire

CardType = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]{0,63}$")]
EnvName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]


def _no_nul(value: str) -> str:
    if "\x00" in value:
        raise ValueError("contains a NUL character, which no program can receive; remove it")
    return value


Argument = Annotated[str, StringConstraints(max_length=131072), AfterValidator(_no_nul)]
Whole = Annotated[int, Field(strict=True)]


class JobState(StrEnum):
    """Where a job is, as users see it."""

    SUBMITTED = "submitted"
    REFUSED = "refused"
    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    UNKNOWN = "unknown"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    RECLAIMED = "reclaimed"

    @property
    def is_final(self) -> bool:
        """Whether the job can never change again."""
        return self in FINAL_STATES


FINAL_STATES = frozenset(
    {JobState.REFUSED, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.RECLAIMED}
)


class Role(Wire):
    """A kind of worker in a job whose workers are not all alike. `gpus` is per worker."""

    name: DisplayName
    workers: Annotated[Whole, Field(ge=1, le=1_000_000)] = 1
    gpus: Annotated[Whole, Field(ge=0, le=1_000_000)] = 1
    command: tuple[Argument, ...] = ()


class ServiceSpec(Wire):
    """Replicas of a model server: how many, and when their number changes. Durations in seconds."""

    min: Annotated[Whole, Field(ge=0)] = 1
    max: Annotated[Whole, Field(ge=1)] = 1
    load_per_replica: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    scale_up_after: Duration = 0
    scale_down_after: Duration = 300
    to_zero_after: Duration | None = None
    cold_start: Duration = 0
    max_wait: Duration | None = None
    ready_timeout: Duration | None = None
    surge: Annotated[Whole, Field(ge=0)] = 1
    unavailable: Annotated[Whole, Field(ge=0)] = 0
    version: DisplayName = "v1"

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max {self.max} is below min {self.min}; raise max or lower min")
        return self


class JobSpec(Wire):
    """One job as asked for.

    Exactly one of `gpus`, `share`, `memory_gib`, `slice` or `roles` says what a worker needs (`gpus: 1` where none is
    given). Durations are whole seconds; text such as `1h30m` is accepted.

    types: card types in order of preference; empty: any type that the pool has (the only one, for most pools).
    time_limit: the job is stopped after so much running. None: no limit.
    stop_grace: the time the program wants between notice and the end; the platform gives at most its own grace.
    env, secret_env: environment; `secret_env` names those whose values are secret. Their values are kept apart by the
        gateway and never stand in an event: there `env` lacks them.
    Unknown keys are ignored here, so that an older part reads a newer event; the gateway validates with extra="forbid".
    data, model: references for people and for the record, for example `s3://bucket/set@v3`.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    name: DisplayName
    tenant: DisplayName
    job_class: JobClass = Field(alias="class")
    priority: Annotated[Whole, Field(ge=0, le=2_147_483_647)] = 50
    workers: Annotated[Whole, Field(ge=1, le=1_000_000)] = 1
    gpus: Annotated[Whole, Field(ge=0, le=1_000_000)] | None = None
    roles: tuple[Role, ...] = ()
    share: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)] | None = None
    memory_gib: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False, strict=True)] | None = None
    slice: Annotated[str, StringConstraints(pattern=r"^[0-9]+g\.[0-9]+gb(\.[a-z]+)?$")] | None = None
    gang: bool = True
    min_workers: Annotated[Whole, Field(ge=1, le=1_000_000)] | None = None
    types: tuple[CardType, ...] = ()
    mix_types: bool = False
    within: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    within_mode: Literal["required", "preferred"] = "required"
    time_limit: Annotated[Duration, Field(gt=0)] | None = None
    stop_grace: Duration | None = None
    checkpoint: bool = True
    preemptible: bool = True
    max_restarts: Annotated[Whole, Field(ge=0, le=1_000_000)] | None = None
    service: ServiceSpec | None = None
    command: tuple[Argument, ...] = ()
    workdir: Argument | None = None
    env: dict[EnvName, Argument] = Field(default_factory=dict)
    secret_env: tuple[EnvName, ...] = ()
    data: tuple[Argument, ...] = ()
    model: Argument | None = None
    labels: dict[DisplayName, DisplayName] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        units = [name for name in ("gpus", "share", "memory_gib", "slice") if getattr(self, name) is not None] + (
            ["roles"] if self.roles else []
        )
        if len(units) > 1:
            raise ValueError(f"{' and '.join(units)} exclude each other; give exactly one of them")
        if self.min_workers is not None and self.min_workers > self.total_workers:
            raise ValueError(
                f"min_workers {self.min_workers} is above workers {self.total_workers}; lower it or raise workers"
            )
        if len(set(self.types)) != len(self.types):
            raise ValueError("types names a card type twice; name each once, in order of preference")
        if self.roles and len({role.name for role in self.roles}) != len(self.roles):
            raise ValueError("two roles have one name; give each its own")
        return self

    @property
    def total_workers(self) -> int:
        """Workers of all roles."""
        return sum(role.workers for role in self.roles) if self.roles else self.workers

    @property
    def whole_gpus_per_worker(self) -> int:
        """Whole GPUs of one worker of a job without roles; 0 for parts of a card and for work without GPUs."""
        if self.gpus is not None:
            return self.gpus
        return 0 if (self.share or self.memory_gib or self.slice) else 1

    @property
    def total_gpus(self) -> int:
        """Whole GPUs of all workers."""
        if self.roles:
            return sum(role.workers * role.gpus for role in self.roles)
        return self.workers * self.whole_gpus_per_worker
