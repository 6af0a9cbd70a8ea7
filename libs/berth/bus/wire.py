"""The few lines of the NATS client protocol that the hot paths write and read themselves.

nats-py builds a header dict, a message object and a queue entry for every message, which costs more than everything
else a consumer does. Here a batch of messages is one `bytes`, and headers stay bytes until somebody asks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

HEADER_LINE = b"NATS/1.0\r\n"
_SUBJECT = re.compile(r"[^\s*>.]+(?:\.[^\s*>.]+)*")


def is_publishable(subject: str) -> bool:
    """Whether `subject` is a concrete subject: no wildcard, no empty token, nothing that breaks the protocol line."""
    return _SUBJECT.fullmatch(subject) is not None


def encode_headers(headers: Mapping[str, str]) -> bytes:
    """Header fields without the version line and the closing blank line.

    Raises:
        ValueError: a name or value holds a control character (it could forge another header).
    """
    names = "".join(headers)
    if not (names.isprintable() and "".join(headers.values()).isprintable()) or ":" in names or " " in names:
        wrong = next(name for name, value in headers.items() if not _is_header(name, value))
        raise ValueError(f"header {wrong!r} is not printable")
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()


def _is_header(name: str, value: str) -> bool:
    return name.isprintable() and value.isprintable() and ":" not in name and " " not in name


def encode_publish(subject: bytes, reply: bytes, fields: bytes, data: bytes) -> bytes:
    """One PUB or HPUB; `fields` is what `encode_headers` returned (empty: no headers)."""
    if not fields:
        return b"PUB %b %b %d\r\n%b\r\n" % (subject, reply, len(data), data)
    head = len(fields) + 12  # the version line and the closing blank line
    return b"HPUB %b %b %d %d\r\nNATS/1.0\r\n%b\r\n%b\r\n" % (subject, reply, head, head + len(data), fields, data)


def encode_acks(replies: Iterable[bytes]) -> bytes:
    """Plain acknowledgements; an empty body means +ACK."""
    return b"".join([b"PUB %b  0\r\n\r\n" % reply for reply in replies])


def find_header(raw: bytes | None, name: str) -> str | None:
    """The value of one header without parsing the others; names are matched exactly."""
    if not raw:
        return None
    key = _KEYS.get(name)
    if key is None:
        key = _KEYS.setdefault(name, b"\r\n%b:" % name.encode()) if len(_KEYS) < 64 else b"\r\n%b:" % name.encode()
    start = raw.find(key)
    if start < 0:
        return None
    start += len(key)
    return raw[start : raw.find(b"\r\n", start)].decode("utf-8", "replace").strip()


_KEYS: dict[str, bytes] = {}
"""What to look for, for each header name asked for so far: this runs several times for each message."""


def parse_headers(raw: bytes | None) -> dict[str, str]:
    """All headers; of repeated names the last one wins."""
    if not raw:
        return {}
    fields: dict[str, str] = {}
    for line in raw.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            fields[name.strip().decode("ascii", "replace")] = value.strip().decode("utf-8", "replace")
    return fields


def parse_status(raw: bytes | None) -> tuple[int, str]:
    """Status code and text of an inline status (`NATS/1.0 408 Request Timeout`); (0, "") when there is none."""
    if not raw or raw[8:9] != b" ":
        return 0, ""
    code, _, text = raw[9 : raw.find(b"\r\n")].strip().partition(b" ")
    return (int(code), text.decode("utf-8", "replace")) if code.isdigit() else (0, "")
