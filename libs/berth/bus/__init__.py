"""The message bus: a thin layer over nats-py and JetStream that deals in bytes and strings.

It exists because a batch is our unit of work: take what has arrived, record it in one transaction, publish what
follows, acknowledge. The parts: `connection` (reconnect, request and reply), `provision` (streams and consumers),
`puller` and `multi_puller` (read), `publisher` (write), `permissions` (who may do what).
"""

from berth.bus.connection import Answer, BusSettings, Connection, CoreMessage, Reply
from berth.bus.errors import (
    BusError,
    ConsumerMissing,
    DeadlineExceeded,
    Disconnected,
    NoResponders,
    NoStream,
    PermissionDenied,
    ProvisionError,
    PublishRefused,
    RequestFailed,
    ServerBusy,
    StreamFull,
    TransientError,
)
from berth.bus.message import Message
from berth.bus.multi_puller import MultiPuller
from berth.bus.publisher import Outgoing, Publisher, PubResult
from berth.bus.puller import Puller

__all__ = [
    "Answer",
    "BusError",
    "BusSettings",
    "Connection",
    "ConsumerMissing",
    "CoreMessage",
    "DeadlineExceeded",
    "Disconnected",
    "Message",
    "MultiPuller",
    "NoResponders",
    "NoStream",
    "Outgoing",
    "PermissionDenied",
    "ProvisionError",
    "PubResult",
    "PublishRefused",
    "Publisher",
    "Puller",
    "Reply",
    "RequestFailed",
    "ServerBusy",
    "StreamFull",
    "TransientError",
]
