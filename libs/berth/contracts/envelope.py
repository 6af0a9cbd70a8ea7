"""The envelope (CloudEvents 1.0, structured JSON) and the registry from type and version to class."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Generic, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict

from berth.contracts.base import Wire


class UnknownTypeError(LookupError):
    """No class is registered for this type and version; the message is parked."""


class Fact(Wire):
    """Base of every event. Class keywords: `kind` (of entity), `fact` (last token of the subject), `owners`, `version`.

    Only its owners publish a type. Adding an optional field keeps the version; anything else is a new class.
    """

    KIND: ClassVar[str] = ""
    FACT: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1
    OWNERS: ClassVar[frozenset[str]] = frozenset()
    TYPE: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Class keywords are read once the fields are there, below."""
        super().__init_subclass__()

    @classmethod
    def __pydantic_init_subclass__(
        cls, *, kind: str = "", fact: str = "", owners: str = "", version: int = 1, **kwargs: Any
    ) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if not kind:
            return
        cls.KIND, cls.FACT, cls.VERSION = kind, fact, version
        cls.OWNERS = frozenset(owners.split())
        cls.TYPE = f"berth.{kind}.{fact}.v{version}"
        _register(cls)


class Order(Wire):
    """Base of every command to a node. Class keywords: `verb`, `version`."""

    VERB: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1
    TYPE: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Class keywords are read once the fields are there, below."""
        super().__init_subclass__()

    @classmethod
    def __pydantic_init_subclass__(cls, *, verb: str = "", version: int = 1, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if not verb:
            return
        cls.VERB, cls.VERSION = verb, version
        cls.TYPE = f"berth.command.{verb}.v{version}"
        _register(cls)


Data = TypeVar("Data", bound=Wire)


class Envelope(BaseModel, Generic[Data]):
    """One message: a CloudEvents 1.0 envelope around its data.

    id: deterministic, `<entity>.<version>.<Type>`; the broker and the inbox drop repeats by it.
    source: `/berth/<pool>/<service>`. subject: the entity id. time: the sender's clock, kept as claimed.
    correlationid: the job (or other entity) it all began with. causationid: the event that led to this one.
    traceparent: W3C context of the span that made it. actor: who asked (`user:alice`, `service:placement`).
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    specversion: str = "1.0"
    id: str
    type: str
    source: str
    subject: str
    time: datetime
    datacontenttype: str = "application/json"
    dataschema: str = ""
    correlationid: str = ""
    causationid: str = ""
    traceparent: str = ""
    tenant: str = ""
    actor: str = ""
    data: Data

    def to_json(self) -> bytes:
        """The bytes that travel."""
        return self.__pydantic_serializer__.to_json(self, exclude_none=True)

    @property
    def service(self) -> str:
        """The service that sent it."""
        return self.source.rpartition("/")[2]


_CLASSES: dict[str, type[Wire]] = {}
_ENVELOPES: dict[str, type[Envelope[Any]]] = {}


def _register(cls: type[Fact] | type[Order]) -> None:
    if cls.TYPE in _CLASSES:
        raise ValueError(f"two classes claim {cls.TYPE}: {_CLASSES[cls.TYPE].__name__} and {cls.__name__}")
    _CLASSES[cls.TYPE] = cls


def registered() -> dict[str, type[Wire]]:
    """All types ever published, by type string."""
    import berth.contracts.commands
    import berth.contracts.events  # noqa: F401

    return dict(_CLASSES)


def envelope_class(type_: str) -> type[Envelope[Any]]:
    """The envelope class for a type string.

    Raises:
        UnknownTypeError: nothing is registered under it.
    """
    found = _ENVELOPES.get(type_)
    if found is None:
        data = _CLASSES.get(type_)
        if data is None:
            raise UnknownTypeError(type_)
        found = _ENVELOPES[type_] = Envelope[data]  # type: ignore[valid-type]
    return found


def decode(data: bytes, type_: str | None = None) -> Envelope[Any]:
    """An envelope from its bytes. `type_` (from the header) saves a look into the JSON.

    Raises:
        UnknownTypeError: no class for the type.
        pydantic.ValidationError, orjson.JSONDecodeError: not an envelope of that type.
    """
    if not type_:
        head = orjson.loads(data)
        type_ = head.get("type", "") if isinstance(head, dict) else ""
    return envelope_class(str(type_)).model_validate_json(data)


HEADER_TYPE = "Berth-Type"
HEADER_TENANT = "Berth-Tenant"
HEADER_TRACE = "traceparent"
HEADER_ID = "Nats-Msg-Id"
