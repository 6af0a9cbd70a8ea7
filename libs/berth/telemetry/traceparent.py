"""W3C trace context as plain strings.

Every message carries a `traceparent`; nearly all of them are unsampled. So the hot path never builds context objects:
it looks at one character of the header. Format (W3C Trace Context, level 1), all lower-case hex:
`00-<32 digits trace id>-<16 digits span id>-<2 digits flags>`.
"""

import random
import re
from typing import Final, NamedTuple

_FORM: Final = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SAMPLED_LAST: Final = frozenset("13579bdf")
_LENGTH: Final = 55
# Its own generator, seeded by the operating system: a job or test that seeds `random` must not make trace ids repeat.
_ids: Final = random.Random()


class TraceParent(NamedTuple):
    """One parsed header; ids are lower-case hex."""

    trace_id: str
    span_id: str
    is_sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def parse_traceparent(header: str | None) -> TraceParent | None:
    """Parse a header from outside; None when it is absent or breaks the W3C form (all-zero ids included)."""
    match = _FORM.fullmatch(header) if header else None
    if match is None:
        return None
    trace_id, span_id, flags = match.groups()
    if int(trace_id, 16) == 0 or int(span_id, 16) == 0:
        return None
    return TraceParent(trace_id, span_id, bool(int(flags, 16) & 1))


def is_sampled(traceparent: str | None) -> bool:
    """Whether the sampled flag is set; trusts the form, costs about 0.1 us."""
    return traceparent is not None and len(traceparent) == _LENGTH and traceparent[-1] in _SAMPLED_LAST


def trace_id_of(traceparent: str | None) -> str | None:
    """The trace id of a well-formed header, for log lines; None otherwise."""
    return traceparent[3:35] if traceparent is not None and len(traceparent) == _LENGTH else None


def new_trace_id() -> int:
    return _ids.getrandbits(128) or 1


def new_span_id() -> int:
    return _ids.getrandbits(64) or 1


def new_traceparent(*, sampled: bool = False) -> str:
    """A fresh root context. Unsampled ones still tie log lines and events together by their trace id."""
    return f"00-{new_trace_id():032x}-{new_span_id():016x}-{'01' if sampled else '00'}"


def unsampled(traceparent: str) -> str:
    """The same context with the sampled flag cleared: whatever follows from it costs nothing."""
    return traceparent[:-2] + "00"


def thinned(traceparent: str | None, count: int, *, keep: int = 4) -> list[str | None]:
    """Contexts for the `count` items of one bulk request: only the first `keep` stay sampled.

    A sampled request that submits thousands of jobs would otherwise trace every one of them through every service.
    """
    if traceparent is None or not is_sampled(traceparent):
        return [traceparent] * count
    quiet = unsampled(traceparent)
    return [traceparent if index < keep else quiet for index in range(count)]
