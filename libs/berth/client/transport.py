"""HTTP to the gateway in plain JSON: errors become exceptions, what is safe to repeat is repeated, streams resume."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

import httpx

from berth.client.errors import Refused, ServerFault, Unreachable

TIMEOUT_SECONDS: Final = 30.0
CONNECT_SECONDS: Final = 5.0
TRIES: Final = 4
PATIENT_TRIES: Final = 8
"""For what should outlast a restart of the gateway: submissions, waiting, followed logs."""
FIRST_PAUSE_SECONDS: Final = 0.2
_WORTH_ANOTHER_TRY: Final = frozenset({502, 503, 504})

Params = Mapping[str, Any]


class Transport:
    """One connection pool to one platform."""

    def __init__(self, url: str, token: str, *, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}", "User-Agent": "berth-client"},
            timeout=httpx.Timeout(TIMEOUT_SECONDS, connect=CONNECT_SECONDS),
            transport=transport,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def call(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
        tries: int = TRIES,
    ) -> Any:
        """One request; the JSON of its answer (None for an empty one).

        repeatable: may be sent again when no answer came; by default reads and deletions may. tries: so often at most,
        with pauses that double from 0.2 s.

        Raises:
            Unreachable, Refused, ServerFault.
        """
        response = self.send(
            method, path, params=params, body=body, headers=headers, repeatable=repeatable, tries=tries
        )
        return response.json() if response.content else None

    def send(
        self,
        method: str,
        path: str,
        *,
        params: Params | None = None,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool | None = None,
        tries: int = TRIES,
    ) -> httpx.Response:
        """As `call`, with the whole answer."""
        may_repeat = method in {"GET", "DELETE", "PUT"} if repeatable is None else repeatable
        pause = FIRST_PAUSE_SECONDS
        for attempt in range(1, tries + 1):
            is_last = attempt == tries or not may_repeat
            try:
                response = self._http.request(
                    method, path, params=_clean(params), json=body, headers=dict(headers or {})
                )
            except httpx.ConnectError as error:
                if attempt == tries:
                    raise Unreachable(f"{self.url} does not answer: {error}") from error
            except httpx.TransportError as error:
                if is_last:
                    raise Unreachable(f"{self.url}: {error or type(error).__name__}") from error
            else:
                if is_last or response.status_code not in _WORTH_ANOTHER_TRY:
                    raise_for_problem(response)
                    return response
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def text(self, path: str, *, params: Params | None = None) -> Iterator[str]:
        """An answer as text, as it comes. A log too long for one answer is asked for to its end; a followed one goes on
        where it was when the connection broke.

        Raises:
            Unreachable, Refused, ServerFault.
        """
        asked = dict(params or {})
        begun = False
        failures = 0
        while True:
            try:
                with self._http.stream(
                    "GET", path, params=_clean(asked), timeout=httpx.Timeout(None, connect=CONNECT_SECONDS)
                ) as response:
                    if response.status_code >= 400:
                        response.read()
                        raise_for_problem(response)
                    position = int(response.headers.get("Berth-Offset", 0))
                    for chunk in response.iter_text():
                        begun, failures = True, 0
                        position += len(chunk.encode())
                        asked["offset"] = position
                        yield chunk
                    if response.headers.get("Berth-Is-Cut") != "true":
                        return
                    asked["offset"] = int(response.headers["Berth-Next-Offset"])
                    continue
            except (httpx.TransportError, ServerFault) as error:
                failures += 1
                if not (begun and asked.get("follow")) or failures >= PATIENT_TRIES:
                    if isinstance(error, ServerFault):
                        raise
                    raise Unreachable(f"{self.url}: {error or type(error).__name__}") from error
            time.sleep(min(FIRST_PAUSE_SECONDS * 2**failures, 2.0))

    def events(self, path: str, *, params: Params | None = None, resume: bool = True) -> Iterator[dict[str, Any]]:
        """Server-Sent Events as their JSON, for ever; after a break it goes on behind the last one.

        Raises:
            Refused: the subscription is not allowed. Unreachable: several tries in a row failed.
        """
        last: str | None = None
        failures = 0
        while True:
            headers = {"Accept": "text/event-stream", **({} if last is None else {"Last-Event-ID": last})}
            asked = _clean(params) if last is None else {k: v for k, v in _clean(params).items() if k != "after"}
            try:
                with self._http.stream(
                    "GET", path, params=asked, headers=headers, timeout=httpx.Timeout(60.0, connect=CONNECT_SECONDS)
                ) as response:
                    if response.status_code >= 400:
                        response.read()
                        raise_for_problem(response)
                    for number, data in _parse_sse(response.iter_lines()):
                        failures = 0
                        last = number or last
                        yield json.loads(data)
            except (httpx.TransportError, ServerFault) as error:
                failures += 1
                if not resume or failures >= 10:
                    raise Unreachable(f"{self.url}: {error or type(error).__name__}") from error
            time.sleep(min(FIRST_PAUSE_SECONDS * 2**failures, 5.0))


def raise_for_problem(response: httpx.Response) -> None:
    """Turn a problem document, or any other error, into its exception."""
    if response.status_code < 400:
        return
    try:
        problem = response.json()
    except ValueError:
        problem = {"title": response.reason_phrase, "detail": response.text[:500]}
    if not isinstance(problem, dict):
        problem = {"detail": str(problem)[:500]}
    raise (Refused if response.status_code < 500 else ServerFault)(response.status_code, problem)


def _clean(params: Params | None) -> dict[str, Any]:
    """Parameters without those that are not given; truth values as JSON spells them."""
    return {
        k: ("true" if v is True else "false" if v is False else v) for k, v in (params or {}).items() if v is not None
    }


def _parse_sse(lines: Iterator[str]) -> Iterator[tuple[str, str]]:
    """(id, data) of each event in the lines of a stream; comments are skipped."""
    number = ""
    data: list[str] = []
    for line in lines:
        if not line:
            if data:
                yield number, "\n".join(data)
            data = []
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data.append(value)
        elif name == "id":
            number = value
