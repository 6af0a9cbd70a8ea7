"""From the bytes of a submission to checked job specifications. Pure: no I/O, no clock."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from pydantic import ValidationError

from berth.client.documents import Document, DocumentError, Place, read_json, read_yaml
from berth.contracts.jobs import JobSpec
from services.gateway.problems import Fault, faults_of, invalid, refused, shown, unreadable

MAX_BATCH: Final = 2000
JSON_TYPES: Final = frozenset({"application/json", "text/json"})
YAML_TYPES: Final = frozenset({"application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"})


@dataclass(frozen=True, slots=True)
class Asked:
    """A submission as read: the jobs in order, whether it was a batch, and the text's marks for error messages."""

    jobs: tuple[Mapping[str, Any], ...]
    is_batch: bool
    document: Document | None = None

    def path(self, place: int) -> Place:
        """Where a job of a batch stands, as its author wrote it."""
        return ("jobs", place) if self.is_batch else ()


def read_submission(body: bytes, content_type: str, *, max_batch: int = MAX_BATCH) -> Asked:
    """What a body asks for: one job, or a batch `{"jobs": [...]}` (in YAML also several documents).

    Raises:
        ApiError: 400, 415 or 422, with the place.
    """
    value, document = read_body(body, content_type)
    if isinstance(value, Mapping) and "jobs" in value:
        extra = [key for key in value if key != "jobs"]
        if extra:
            raise invalid(
                [Fault("unknown_field", (extra[0],), "stands beside jobs", "move it into each job")], document
            )
        jobs = value["jobs"]
        if not isinstance(jobs, list) or not jobs:
            raise invalid(
                [Fault("not_a_list", ("jobs",), "must be a list of at least one job", "list the jobs")], document
            )
        if len(jobs) > max_batch:
            detail = f"{len(jobs)} jobs are more than {max_batch} in one request"
            raise invalid([Fault("too_long", ("jobs",), detail, "split the batch", str(len(jobs)))], document)
        for place, job in enumerate(jobs):
            if not isinstance(job, Mapping):
                raise invalid([_no_mapping(("jobs", place))], document)
        return Asked(tuple(jobs), True, document)
    if not isinstance(value, Mapping):
        raise invalid([_no_mapping(())], document)
    return Asked((value,), False, document)


def read_body(body: bytes, content_type: str) -> tuple[Any, Document | None]:
    """The value of a body by its media type. Several YAML documents become `{"jobs": [...]}`.

    Raises:
        ApiError: 400, 415 or 422.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media not in JSON_TYPES and media not in YAML_TYPES:
        raise refused(
            "unsupported_media_type",
            f"cannot read {media}" if media else "the request names no Content-Type",
            remedy="send Content-Type: application/json or application/yaml",
            field="Content-Type",
            value=media or None,
        )
    if not body.strip():
        raise refused("empty_body", "nothing was sent", remedy="send the job as JSON or YAML")
    try:
        if media in JSON_TYPES:
            document = read_json(body)
            return document.value, document
        documents = read_yaml(body)
    except DocumentError as fault:
        raise unreadable(fault) from None
    if not documents:
        raise refused("empty_body", "the YAML holds no document", remedy="send the job as JSON or YAML")
    if len(documents) == 1:
        return documents[0].value, documents[0]
    marks = {("jobs", place, *path): mark for place, part in enumerate(documents) for path, mark in part.marks.items()}
    joined = Document({"jobs": [part.value for part in documents]}, marks)
    return joined.value, joined


def check_job(body: Mapping[str, Any], *, tenant: str | None) -> JobSpec | list[Fault]:
    """A job specification, or everything that is wrong with the body.

    tenant: the asker's own, used where the body names none.
    """
    if tenant is not None and "tenant" not in body:
        body = {**body, "tenant": tenant}
    faults: list[Fault] = []
    spec: JobSpec | None = None
    try:
        spec = JobSpec.model_validate(body, extra="forbid")
    except ValidationError as error:
        faults = faults_of(error, body)
    if spec is not None:
        faults += _sense_faults(spec)
    elif not any(body.get(key) for key in ("command", "service", "roles")) and not _touches_command(faults):
        faults.append(_no_command(("command",)))
    return faults if faults or spec is None else spec


def _sense_faults(spec: JobSpec) -> list[Fault]:
    faults: list[Fault] = []
    if spec.roles:
        for place, role in enumerate(spec.roles):
            if not role.command and not spec.command:
                faults.append(_no_command(("roles", place, "command")))
            elif role.command and not role.command[0].strip():
                faults.append(_no_command(("roles", place, "command", 0)))
    elif not spec.command and spec.service is None:
        faults.append(_no_command(("command",)))
    if spec.command and not spec.command[0].strip():
        faults.append(_no_command(("command", 0)))
    for place, name in enumerate(spec.secret_env):
        if name not in spec.env:
            faults.append(
                Fault(
                    "missing_value", ("secret_env", place), f"{name} has no value in env", f"add it to env: {name}: …"
                )
            )
    for name, value in spec.env.items():
        if name.startswith("BERTH_"):
            faults.append(
                Fault("reserved_name", ("env", name), "is set by the platform", "use a name without BERTH_ in front")
            )
        if not _is_unicode(value):
            faults.append(Fault("not_unicode", ("env", name), "holds half of a surrogate pair", "send Unicode text"))
    if spec.total_gpus > 10_000_000:
        path = ("roles",) if spec.roles else ("gpus",)
        faults.append(
            Fault("too_large", path, f"{spec.total_gpus} GPUs in all are too many", "lower it", str(spec.total_gpus))
        )
    return faults


def _touches_command(faults: list[Fault]) -> bool:
    """Whether one of the faults is about the command already, be it a misspelt one."""
    return any(fault.path[:1] in {("command",), ("roles",)} or fault.remedy.endswith("command?") for fault in faults)


def sound_faults(value: object, path: Place = ()) -> list[Fault]:
    """What cannot be stored or sent on in a free-form value, wherever it stands; the first fault only."""
    if isinstance(value, str):
        if "\x00" in value:
            return [Fault("invalid_value", path, "contains a NUL character", "remove it")]
        if not _is_unicode(value):
            return [Fault("not_unicode", path, "holds half of a surrogate pair", "send Unicode text")]
    elif isinstance(value, float) and not math.isfinite(value):
        return [Fault("not_finite", path, "must be a finite number", "write a finite number")]
    elif isinstance(value, int) and value.bit_length() > 63:
        return [Fault("too_large", path, "is above 64 bits", "write a smaller number", shown(value))]
    elif isinstance(value, Mapping):
        for key, item in value.items():
            found = sound_faults(key, path) or sound_faults(item, (*path, str(key)))
            if found:
                return found
    elif isinstance(value, list):
        for place, item in enumerate(value):
            found = sound_faults(item, (*path, place))
            if found:
                return found
    return []


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_command(path: Place) -> Fault:
    return Fault("empty_command", path, "is empty", 'say what to run, for example ["python", "train.py"]')


def _no_mapping(path: Place) -> Fault:
    return Fault("not_a_mapping", path, "a job is a mapping of names to values", "write name: value pairs")


def split_secrets(spec: JobSpec) -> tuple[JobSpec, dict[str, str]]:
    """The specification as it may travel, and the secret values that may not."""
    if not spec.secret_env:
        return spec, {}
    secrets = {name: spec.env[name] for name in spec.secret_env if name in spec.env}
    public = {name: value for name, value in spec.env.items() if name not in secrets}
    return spec.model_copy(update={"env": public}), secrets


def digest_of(specs: Sequence[JobSpec], *, salt: str) -> bytes:
    """Fingerprint of a submission's content, equal for equal jobs however they were written.

    salt: the idempotency key with its scope, so that a stored digest does not tell equal secrets apart from others.
    """
    content = orjson.dumps([spec.model_dump(mode="json", by_alias=True) for spec in specs], option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(content, digest_size=32, key=hashlib.sha256(salt.encode()).digest()).digest()


def check_jobs(asked: Asked, *, tenant: str | None) -> list[JobSpec]:
    """All specifications of a submission; a batch is taken whole or not at all.

    Raises:
        ApiError: 422 with every fault (bounded).
    """
    specs: list[JobSpec] = []
    faults: list[Fault] = []
    for place, body in enumerate(asked.jobs):
        checked = check_job(body, tenant=tenant)
        if isinstance(checked, JobSpec):
            specs.append(checked)
        else:
            faults += [fault.below(asked.path(place)) for fault in checked]
            if len(faults) > 50:
                break
    if faults:
        raise invalid(faults, asked.document)
    return specs
