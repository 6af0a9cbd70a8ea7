"""The common tables of every service schema as SQLModel classes, for queries, administration and tests.

`common_tables("placement")` has them for one schema. A service's own tables name their schema themselves:

    class Receipt(SQLModel, table=True):
        __table_args__ = {"schema": "placement"}
        job: str = Field(primary_key=True)

Importing this module costs half a second (SQLModel), so the batch loop never does. What the columns are in the database
is said by the migrations (`common_v1`); a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import BigInteger, DateTime, LargeBinary, SmallInteger, Text, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import registry
from sqlmodel import Field, MetaData, SQLModel

NAME = Text(collation="C")
"""Keys, ids and subjects: compared as bytes."""


def _column(kind: Any, *, default: str | None = None, primary_key: bool = False, nullable: bool = False) -> Any:
    defaults: dict[str, Any] = {} if default is None else {"server_default": text(default)}
    return Field(default=None, sa_type=kind, primary_key=primary_key, nullable=nullable, sa_column_kwargs=defaults)


def _time() -> Any:
    return _column(DateTime(timezone=True), default="now()")


class InboxMixin(SQLModel):
    """An event that had its effect. Kept longer than the stream keeps messages."""

    event_id: str = _column(NAME, primary_key=True)
    received_at: datetime = _time()


class OutboxMixin(SQLModel):
    """A message to publish or published within the last quarter of an hour; which, says `outbox_pending`."""

    id: int = _column(BigInteger, primary_key=True)
    slot: int = _column(SmallInteger, primary_key=True)
    event_id: str = _column(NAME)
    subject: str = _column(NAME)
    headers: bytes = _column(LargeBinary)
    payload: bytes = _column(LargeBinary)
    created_at: datetime = _time()


class OutboxPendingMixin(SQLModel):
    """What one transaction left to publish. `batch` is the first of its ids."""

    batch: int = _column(BigInteger, primary_key=True)
    slot: int = _column(SmallInteger)
    ids: list[int] = _column(ARRAY(BigInteger))
    created_at: datetime = _time()


class PositionMixin(SQLModel):
    """The last message of a stream whose effect is stored."""

    consumer: str = _column(NAME, primary_key=True)
    stream: str = _column(NAME, primary_key=True)
    stream_seq: int = _column(BigInteger)
    updated_at: datetime = _time()


class LeaseMixin(SQLModel):
    """Who leads, by number: each new leader raises the epoch."""

    name: str = _column(NAME, primary_key=True)
    epoch: int = _column(BigInteger, default="0")
    holder: str = _column(Text(), default="''")
    acquired_at: datetime = _time()


class ParkedMixin(SQLModel):
    """A message that could not have its effect. `status` is a `parked.ParkedStatus`."""

    id: int = _column(BigInteger, primary_key=True)
    entity: str = _column(NAME)
    event_id: str = _column(NAME)
    subject: str = _column(NAME)
    headers: bytes = _column(LargeBinary)
    payload: bytes = _column(LargeBinary)
    stream_seq: int = _column(BigInteger)
    reason: str = _column(Text())
    parked_at: datetime = _time()
    status: str = _column(NAME, default="'parked'")
    note: str = _column(Text(), default="''")
    mended: bytes | None = _column(LargeBinary, nullable=True)


class RecordMixin(SQLModel):
    """One piece of the state of a decision core, as JSON."""

    kind: str = _column(NAME, primary_key=True)
    key: str = _column(NAME, primary_key=True)
    body: bytes = _column(LargeBinary)
    updated_at: datetime = _time()


class CommitMixin(SQLModel):
    """One batch as replay needs it; see `batch.CommitEntry`."""

    id: int = _column(BigInteger, primary_key=True)
    first_seq: int = _column(BigInteger)
    last_seq: int = _column(BigInteger)
    timers: int
    clock: datetime = _column(DateTime(timezone=True))
    emitted: int
    decisions_version: str = _column(Text())
    policy_version: str = _column(Text())
    digest: bytes = _column(LargeBinary)
    events: bytes | None = _column(LargeBinary, nullable=True)


_MIXINS: dict[str, type[SQLModel]] = {
    "inbox": InboxMixin,
    "outbox": OutboxMixin,
    "outbox_pending": OutboxPendingMixin,
    "position": PositionMixin,
    "lease": LeaseMixin,
    "parked": ParkedMixin,
    "records": RecordMixin,
    "commits": CommitMixin,
}


@dataclass(frozen=True, slots=True)
class CommonTables:
    """The classes of one schema."""

    metadata: MetaData
    inbox: type[InboxMixin]
    outbox: type[OutboxMixin]
    outbox_pending: type[OutboxPendingMixin]
    position: type[PositionMixin]
    lease: type[LeaseMixin]
    parked: type[ParkedMixin]
    records: type[RecordMixin]
    commits: type[CommitMixin]


@cache
def common_tables(schema: str) -> CommonTables:
    """The table classes of a service's schema; the same ones at each call.

    Each schema has a registry of its own, so that equal class names do not get in each other's way.
    """
    metaclass: Any = type(SQLModel)
    tables_of_schema = registry(metadata=MetaData(schema=schema))
    base = metaclass("Base", (SQLModel,), {"__module__": __name__}, registry=tables_of_schema)
    classes = {
        name: metaclass(
            mixin.__name__.removesuffix("Mixin"),
            (mixin, base),
            {"__module__": __name__, "__tablename__": name, "__doc__": mixin.__doc__},
            table=True,
        )
        for name, mixin in _MIXINS.items()
    }
    return CommonTables(metadata=tables_of_schema.metadata, **classes)
