"""From what a core decided to what travels: envelope, subject, headers and span of each emission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from urllib.parse import quote

import orjson

from berth.contracts import subjects
from berth.contracts.envelope import HEADER_TENANT, HEADER_TRACE, HEADER_TYPE, Fact
from berth.decisions.core import Emission
from berth.decisions.recording import Tally, emission_body
from berth.decisions.recording import event_id as id_of
from berth.telemetry.tracing import BatchSpan, event_span

_quoted = lru_cache(maxsize=1024)(quote)
"""A pool has few tenants, and quoting a name costs more than all other headers together."""


_TRACE_ID = slice(3, 35)
"""Where the trace id stands in a traceparent."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One message ready for the outbox."""

    event_id: str
    subject: str
    headers: dict[str, str]
    payload: bytes


class EmissionEncoder:
    """Wraps emissions of one service in envelopes. One for each process; the tally ties a commit to what it told.

    The envelope is put together from parts instead of a model: the data is serialised once, for the message and for the
    digest, which must not depend on clocks and traces.
    """

    def __init__(self, *, service: str, pool: str) -> None:
        self._service = service
        self._pool = pool
        self._source = f"/berth/{pool}/{service}"

    def encode(
        self,
        emissions: Sequence[Emission],
        *,
        now: datetime,
        causes: Mapping[str, tuple[str | None, str | None]],
        batch: BatchSpan,
    ) -> tuple[list[Encoded], Tally]:
        """Messages in order, and the tally over ids and data.

        Args:
            causes: event id -> (traceparent, correlation id) of the events in this batch.
        """
        tally = Tally()
        spans: dict[str, str | None] = {}
        time = now.isoformat()
        encoded = []
        for emission in emissions:
            data = emission.data
            name = type(data).__name__
            event_id = id_of(emission)
            body = emission_body(emission)
            tally.add(event_id, body)
            trace = self._trace(emission, name, causes, spans, batch)
            headers = {HEADER_TYPE: data.TYPE}
            if emission.tenant:
                headers[HEADER_TENANT] = _quoted(emission.tenant)
            if trace:
                headers[HEADER_TRACE] = trace
            head = orjson.dumps(
                {
                    "specversion": "1.0",
                    "id": event_id,
                    "type": data.TYPE,
                    "source": self._source,
                    "subject": emission.entity,
                    "time": time,
                    "datacontenttype": "application/json",
                    "dataschema": f"berth:{data.TYPE}",
                    "correlationid": emission.correlation,
                    "causationid": emission.cause,
                    "traceparent": trace or "",
                    "tenant": emission.tenant,
                    "actor": emission.actor or f"service:{self._service}",
                }
            )
            encoded.append(Encoded(event_id, self._subject(emission), headers, head[:-1] + b',"data":' + body + b"}"))
        return encoded, tally

    def _subject(self, emission: Emission) -> str:
        data = emission.data
        if isinstance(data, Fact):
            return subjects.event(self._pool, type(data), emission.entity)
        return subjects.command(self._pool, emission.entity, type(data))

    def _trace(
        self,
        emission: Emission,
        name: str,
        causes: Mapping[str, tuple[str | None, str | None]],
        spans: dict[str, str | None],
        batch: BatchSpan,
    ) -> str | None:
        """Context for this emission: a child of its cause, linked to the batch.

        Where the cause is a timer, or belongs to another trace (another job's end made room for this one), it is a child
        of the job's own first span: a job stays in the trace it began with. A cause that leads to several emissions has
        one span.
        """
        cause = causes.get(emission.cause, (None, None))[0]
        is_own = cause is not None and (not emission.trace or cause[_TRACE_ID] == emission.trace[_TRACE_ID])
        parent = cause if is_own else emission.trace
        if not parent:
            return None
        key = emission.cause if is_own else f"{emission.correlation}'s own"
        if key not in spans:
            spans[key] = event_span(
                f"{self._service} {name}", parent, batch, job_id=emission.correlation, tenant=emission.tenant
            )
        return spans[key]
