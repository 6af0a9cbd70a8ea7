"""What can go wrong between a process and the bus, and who should act.

    BusError
    ├── TransientError          nobody: try again with the same message id
    │   ├── Disconnected        no connection to any server right now
    │   ├── DeadlineExceeded    no answer in time; the message may still have been stored
    │   ├── StreamFull          back-pressure: the stream refuses new messages until old ones leave
    │   ├── NoStream            no stream (or no leader) listens on the subject right now
    │   ├── ServerBusy          the server answered, but cannot serve at the moment
    │   ├── NoResponders        nobody serves the requested subject right now
    │   └── ConsumerMissing     the durable consumer is gone: provision again, then go on
    ├── PermissionDenied        operator: this user may not use the subject
    ├── PublishRefused          developer: the message itself is not acceptable (too large, bad subject)
    ├── RequestFailed           caller: the service answered with an error of its own
    └── ProvisionError          operator: streams or consumers cannot be brought to their declaration

Every `TransientError` means "maybe done". Retries are safe because message ids are deterministic.
"""

from __future__ import annotations


class BusError(Exception):
    """Root of everything the bus layer raises."""


class TransientError(BusError):
    """Try again later with the same message id."""


class Disconnected(TransientError):
    """There is no connection to a server at the moment."""


class DeadlineExceeded(TransientError):
    """No answer came in time; the effect may have happened."""


class StreamFull(TransientError):
    """The stream has reached its limit and discards new messages (error 10077)."""


class NoStream(TransientError):
    """No stream answered for the subject: not provisioned, or it has no leader yet."""


class ServerBusy(TransientError):
    """JetStream answered that it cannot serve now (recovering, too many open batches)."""


class NoResponders(TransientError):
    """Nobody serves the subject of a request at the moment."""


class ConsumerMissing(TransientError):
    """The durable consumer (or its stream) does not exist."""


class PermissionDenied(BusError):
    """The server refused the subject to this user."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"not permitted on subject {subject}")
        self.subject = subject


class PublishRefused(BusError):
    """The stream or the client will never accept this message as it is."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})" if code else text)
        self.code = code


class RequestFailed(BusError):
    """The serving side answered with an error; `code` is its stable name."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class ProvisionError(BusError):
    """A stream or consumer could not be created or brought to its declaration."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} ({code})" if code else text)
        self.code = code
