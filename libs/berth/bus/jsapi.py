"""JetStream's request API: JSON in, JSON out, errors by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from berth.bus.connection import Connection
from berth.bus.errors import (
    BusError,
    ConsumerMissing,
    NoResponders,
    NoStream,
    ProvisionError,
    PublishRefused,
    ServerBusy,
    StreamFull,
)

CONSUMER_NOT_FOUND = 10014
STREAM_NOT_FOUND = 10059
STREAM_FULL = 10077
ATOMIC_DISABLED = 10174
BATCH_HAS_DUPLICATE = 10201
_BUSY = {
    10008,  # JetStream temporarily unavailable
    10023,  # insufficient resources
    10176,  # batch is incomplete: the connection broke, or the server dropped it after 10 s
    10210,  # too many open batches on the stream
    10211,  # too many open batches on the server
}


def publish_error(error: Mapping[str, Any]) -> BusError:
    """The exception that an error in a publish acknowledgement stands for."""
    code, text = int(error.get("err_code", 0)), str(error.get("description", "refused"))
    if code == STREAM_FULL:
        return StreamFull(f"{text} ({code})")
    if code == STREAM_NOT_FOUND:
        return NoStream(f"{text} ({code})")
    if code in _BUSY or (code == 0 and error.get("code") == 503):
        return ServerBusy(f"{text} ({code})")
    return PublishRefused(code, text)


async def call(
    connection: Connection, verb: str, body: Mapping[str, Any] | None = None, *, timeout: float = 5.0
) -> dict[str, Any]:
    """One request to JetStream's API.

    Raises:
        ServerBusy: JetStream is not ready. ConsumerMissing, NoStream: what was asked for does not exist.
        ProvisionError: any other answer that is an error.
    """
    subject = f"{connection.settings.api_prefix}.{verb}"
    try:
        reply = await connection.request(subject, orjson.dumps(body) if body else b"", timeout=timeout)
    except NoResponders as error:
        raise ServerBusy(f"JetStream does not answer {verb}") from error
    answer: dict[str, Any] = orjson.loads(reply.data)
    problem = answer.get("error")
    if problem is None:
        return answer
    code, text = int(problem.get("err_code", 0)), str(problem.get("description", "refused"))
    if code == CONSUMER_NOT_FOUND:
        raise ConsumerMissing(f"{verb}: {text}")
    if code == STREAM_NOT_FOUND:
        raise NoStream(f"{verb}: {text}")
    if code in _BUSY:
        raise ServerBusy(f"{verb}: {text}")
    raise ProvisionError(code, f"{verb}: {text}")
