"""Requests to a node: output of its workers, and what may be done to simulated cards."""

from __future__ import annotations

import asyncio
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from berth.bus.connection import CoreMessage
from berth.bus.errors import RequestFailed
from berth.contracts.requests import LogAnswer, LogQuestion
from services.node_agent.deps import Deps
from services.node_agent.driver.base import GpuDriverError
from services.node_agent.driver.sim import SimDriver
from services.node_agent.node import Node
from services.node_agent.process.runtime import WorkerKey

Q = TypeVar("Q", bound=BaseModel)
MAX_LOG_BYTES = 1 << 20
READ_SECONDS = 5.0


class SimulateQuestion(BaseModel):
    """What to do to a simulated node (`simulate`).

    `leak`: `memory_mib` held by nobody; `load`: utilisation in `percent` (None: follow the processes), `frozen`: with
    time stamps that stand still; `silence`: send no telemetry for `seconds`.
    """

    model_config = ConfigDict(extra="forbid")

    do: Literal["fault", "repair", "leak", "load", "silence"]
    gpu: int = 0
    xid: int = 79
    memory_mib: int = Field(0, ge=0)
    percent: float | None = Field(None, ge=0, le=100)
    frozen: bool = False
    seconds: float = Field(0, ge=0)


async def answer_logs(request: CoreMessage, node: Node, deps: Deps) -> bytes:
    """A piece of a worker's output (`logs`).

    Text is decoded piece by piece: a character cut in two at the end is left for the next question.
    """
    question = _read(LogQuestion, request)
    key = WorkerKey(question.job_id, question.attempt, question.worker)
    wanted = min(max(question.max_bytes, 1), MAX_LOG_BYTES)
    try:
        async with asyncio.timeout(READ_SECONDS):
            chunk = await deps.runtime.read_log(key, node.name, offset=question.offset, max_bytes=wanted)
    except KeyError:
        return LogAnswer(is_known=False).model_dump_json().encode()
    data, cut = chunk.data, 0
    if not chunk.eof and len(data) > 4:
        cut = unfinished(data)
        data = data[: len(data) - cut]
    return (
        LogAnswer(
            is_known=True,
            text=data.decode("utf-8", "replace"),
            next_offset=chunk.next_offset - cut,
            is_over=chunk.eof,
        )
        .model_dump_json()
        .encode()
    )


def unfinished(data: bytes) -> int:
    """Bytes at the end that begin a UTF-8 character without finishing it."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0x80:
            continue
        length = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return back if length > back else 0
    return 0


async def answer_simulate(request: CoreMessage, node: Node, deps: Deps) -> bytes:
    """Change the world of a simulated node; refused on a real one."""
    question = _read(SimulateQuestion, request)
    driver = node.driver
    if not isinstance(driver, SimDriver):
        raise RequestFailed("unsupported", f"{node.name} has real cards")
    try:
        match question.do:
            case "fault":
                driver.fault(question.gpu, question.xid)
            case "repair":
                driver.repair(question.gpu)
            case "leak":
                driver.leak(question.gpu, question.memory_mib)
            case "load":
                driver.load(question.gpu, question.percent, is_frozen=question.frozen)
            case "silence":
                node.silent_until = asyncio.get_running_loop().time() + question.seconds
    except GpuDriverError as error:
        raise RequestFailed("bad_request", str(error)) from error
    return b"{}"


def _read(kind: type[Q], request: CoreMessage) -> Q:
    try:
        return kind.model_validate_json(request.data or b"{}")
    except ValidationError as error:
        raise RequestFailed("bad_request", str(error.errors(include_url=False, include_input=False))) from error
