"""A message taken from a consumer. Made once per delivery, so it parses only what everybody needs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from berth.bus import wire


@dataclass(slots=True)
class Message:
    """One delivery of one stored message."""

    subject: str
    data: bytes
    stream_seq: int
    """Position in the stream; grows, with gaps where the filter skips."""
    consumer_seq: int
    """Counts deliveries of the consumer, from 1 after each reset, without gaps unless a delivery was lost."""
    num_delivered: int
    """1 the first time."""
    raw_headers: bytes | None
    ack_subject: bytes

    def header(self, name: str) -> str | None:
        """One header without parsing the others."""
        return wire.find_header(self.raw_headers, name)

    @property
    def headers(self) -> dict[str, str]:
        """All headers, parsed at each call."""
        return wire.parse_headers(self.raw_headers)

    @property
    def consumer(self) -> str:
        """Name of the durable consumer that delivered it."""
        tokens = self.ack_subject.split(b".")
        return tokens[3 if len(tokens) < 11 else 5].decode()

    @property
    def stored_at(self) -> datetime:
        """When the stream stored it, by the server's clock."""
        tokens = self.ack_subject.split(b".")
        return datetime.fromtimestamp(int(tokens[7 if len(tokens) < 11 else 9]) / 1e9, tz=UTC)

    @property
    def pending(self) -> int:
        """Messages of the consumer that waited behind this one when it was sent."""
        tokens = self.ack_subject.split(b".")
        return int(tokens[8 if len(tokens) < 11 else 10])


def read_message(subject: bytes, ack_subject: bytes, data: bytes, raw_headers: bytes | None) -> Message:
    """Build a message from a delivery.

    The acknowledgement subject carries the numbers, in one of two forms (ADR-15):
    `$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>`, or with
    `<domain>.<account hash>` after `ACK` and a random token at the end.

    Raises:
        ValueError: it is neither.
    """
    tokens = ack_subject.split(b".")
    if len(tokens) == 9:
        delivered, stream_seq, consumer_seq = tokens[4:7]
    elif len(tokens) >= 11:
        delivered, stream_seq, consumer_seq = tokens[6:9]
    else:
        raise ValueError(f"{ack_subject!r} acknowledges nothing")
    return Message(subject.decode(), data, int(stream_seq), int(consumer_seq), int(delivered), raw_headers, ack_subject)
