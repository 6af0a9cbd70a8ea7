"""Audit's own tables, for queries; the migration is what makes them, hot paths write them as arrays."""

from __future__ import annotations

from datetime import datetime

from sqlmodel import Field, SQLModel

SCHEMA = {"schema": "audit"}


class RecordRow(SQLModel, table=True):
    """One event. `number` counts without gaps in stream order; `hash` chains it to the row before it.

    recorded_at: the platform's clock, never going back. The sender's own time stands in the payload as claimed.
    """

    __tablename__ = "record"
    __table_args__ = SCHEMA

    number: int = Field(primary_key=True)
    stream_seq: int
    recorded_at: datetime
    event_id: str
    type: str
    entity: str
    tenant: str
    payload: bytes
    hash: bytes


class UseRow(SQLModel, table=True):
    """What one attempt of a job held of one card type, from when to when; `released_at` None: still held."""

    __tablename__ = "use"
    __table_args__ = SCHEMA

    job_id: str = Field(primary_key=True)
    attempt: int = Field(primary_key=True)
    card_type: str = Field(primary_key=True)
    tenant: str
    job_class: str = Field(sa_column_kwargs={"name": "class"})
    gpu_milli: int
    waited_seconds: float
    taken_at: datetime
    released_at: datetime | None


class JobRow(SQLModel, table=True):
    """A job that waits or runs, and since when it has been waiting (again)."""

    __tablename__ = "job"
    __table_args__ = SCHEMA

    job_id: str = Field(primary_key=True)
    tenant: str
    job_class: str = Field(sa_column_kwargs={"name": "class"})
    waits_since: datetime
