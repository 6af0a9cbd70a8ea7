"""A full sample of every message type, made from its fields: the source of the golden files."""

from __future__ import annotations

import types
from datetime import UTC, datetime
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from berth.contracts.envelope import Envelope, Fact, envelope_class
from berth.contracts.jobs import JobSpec

MOMENT = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)
SPEC = {
    "name": "训练-é-🚀",
    "tenant": "research",
    "class": "training",
    "workers": 2,
    "gpus": 4,
    "types": ["H100-80G"],
    "time_limit": "1h30m",
    "command": ["python", "train.py"],
    "env": {"MODE": "fast"},
}
_BY_NAME = {
    "job_id": "j-0001",
    "node": "n1",
    "plan_id": "p-0001",
    "proposal_id": "q-0001",
    "preemptor": "j-0002",
    "gpu": "GPU-0001",
    "uuid": "GPU-0001",
}


def sample(message: type[BaseModel]) -> dict[str, Any]:
    """Keyword arguments with a value for every field of `message`."""
    if message is JobSpec:
        return dict(SPEC)
    return {name: _value(name, field.annotation) for name, field in message.model_fields.items()}


def sample_envelope(type_: str) -> Envelope[Any]:
    """One message of a type, whole."""
    cls = envelope_class(type_)
    data_class = cls.model_fields["data"].annotation
    assert data_class is not None
    data = data_class.model_validate(sample(data_class))
    owner = sorted(data_class.OWNERS)[0] if issubclass(data_class, Fact) else "lifecycle"
    return cls(
        id=f"j-0001.1.{data_class.__name__}",
        type=type_,
        source=f"/berth/default/{owner}",
        subject="j-0001",
        time=MOMENT,
        dataschema=f"berth:{type_}",
        correlationid="j-0001",
        causationid="j-0001.1.JobSubmitted",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        tenant="research",
        actor="user:alice",
        data=data,
    )


def _value(name: str, annotation: Any) -> Any:  # noqa: PLR0912
    origin = get_origin(annotation)
    if origin is Annotated:
        return _value(name, get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return _value(name, next(arg for arg in get_args(annotation) if arg is not type(None)))
    if origin is Literal:
        return get_args(annotation)[0]
    if origin is tuple:
        items = [arg for arg in get_args(annotation) if arg is not Ellipsis]
        return [_value(name, item) for item in items]
    if origin is dict:
        key, value = get_args(annotation)
        return {_value("key", key): _value("value", value)}
    if isinstance(annotation, type):
        if issubclass(annotation, BaseModel):
            return sample(annotation)
        if issubclass(annotation, Enum):
            return next(iter(annotation)).value
        if issubclass(annotation, bool):
            return True
        if issubclass(annotation, int):
            return 1
        if issubclass(annotation, float):
            return 1.5
        if issubclass(annotation, datetime):
            return MOMENT.isoformat()
        if issubclass(annotation, str):
            return _BY_NAME.get(name, name.replace("_", "-"))
    return {"any": "value"} if name in ("document", "candidates", "evidence") else "any"
