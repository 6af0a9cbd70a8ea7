"""The gateway's own tables, for queries and administration; the migration makes them, hot paths write them as arrays."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ARRAY, Text
from sqlmodel import Field, SQLModel

SCHEMA = {"schema": "gateway"}


class JobRow(SQLModel, table=True):
    """A job as users see it. spec: `JobSpec` as JSON, without secret values. view: `JobProgress` as JSON.

    last_seq: stream sequence of the last event in the view; an older one changes nothing.
    """

    __tablename__ = "job"
    __table_args__ = SCHEMA

    job_id: str = Field(primary_key=True)
    tenant: str
    name: str
    job_class: str = Field(sa_column_kwargs={"name": "class"})
    state: str
    is_final: bool = False
    priority: int
    gpus: int
    workers: int
    submitted_at: datetime
    submitted_by: str
    cancel_requested: bool = False
    trace_id: str = ""
    spec: bytes
    view: bytes = b"{}"
    last_seq: int = 0


class IdempotencyRow(SQLModel, table=True):
    """A key and the submission that it stands for until `expires_at`. scope: the tenant, or the user where there is none."""

    __tablename__ = "idempotency"
    __table_args__ = SCHEMA

    scope: str = Field(primary_key=True)
    key: str = Field(primary_key=True)
    digest: bytes
    job_ids: list[str] = Field(sa_type=ARRAY(Text))
    expires_at: datetime


class TokenRow(SQLModel, table=True):
    """Who may call. The token itself is stored nowhere; `token_id` names it in lists."""

    __tablename__ = "token"
    __table_args__ = SCHEMA

    token_hash: bytes = Field(primary_key=True)
    token_id: str
    user_name: str
    tenant: str | None
    role: str
    created_at: datetime
    created_by: str = ""
    revoked_at: datetime | None = None


class SecretRow(SQLModel, table=True):
    """A secret value of a job's environment, until the job is over. Never in an event, a log or an answer to a user."""

    __tablename__ = "secret"
    __table_args__ = SCHEMA

    job_id: str = Field(primary_key=True)
    name: str = Field(primary_key=True)
    value: str


class PolicyRow(SQLModel, table=True):
    """A policy that was activated, as the event said."""

    __tablename__ = "policy"
    __table_args__ = SCHEMA

    version: int = Field(primary_key=True)
    document: bytes
    author: str
    why: str
    activated_at: datetime
    approver: str = ""


class ProposalRow(SQLModel, table=True):
    """What became of a proposed policy: a version, or problems."""

    __tablename__ = "proposal"
    __table_args__ = SCHEMA

    proposal_id: str = Field(primary_key=True)
    policy_version: int | None
    problems: bytes | None
    answered_at: datetime


class OpenProposalRow(SQLModel, table=True):
    """A proposed policy until admission's last word on it. is_held: it waits for a second operator."""

    __tablename__ = "open_proposal"
    __table_args__ = SCHEMA

    proposal_id: str = Field(primary_key=True)
    document: bytes
    author: str
    why: str
    proposed_at: datetime
    based_on: int = 0
    required_for: str = ""
    is_held: bool = False


class NodeRow(SQLModel, table=True):
    """Card types that a node has reported: what a job may ask for where the policy lists none."""

    __tablename__ = "node"
    __table_args__ = SCHEMA

    node: str = Field(primary_key=True)
    card_types: list[str] = Field(sa_type=ARRAY(Text))
    last_seq: int


class SpanRow(SQLModel, table=True):
    """A finished span, as `SpanRecord.to_dict` in JSON. Unlogged: gone after a crash of the server."""

    __tablename__ = "span"
    __table_args__ = SCHEMA

    trace_id: str = Field(primary_key=True)
    span_id: str = Field(primary_key=True)
    received_at: datetime
    body: bytes
