"""The benches' own way to the API: one kept connection, prepared bodies, no parsing that is not needed.

The load generator shares the machine with what it measures, so it must cost little.
"""

from __future__ import annotations

import http.client
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import orjson

from bench.errors import BenchFailed

PAGE: Final = 500


@dataclass(slots=True)
class Api:
    """One connection; not for two threads at once."""

    url: str
    token: str = field(repr=False)
    timeout_s: float = 60.0
    _connection: http.client.HTTPConnection | None = None

    def submit(self, jobs: bytes) -> list[str]:
        """Ids of the jobs of a body made by `batch_body`, in order."""
        answer = self.call("POST", "/v1/jobs", jobs)
        return [job["job_id"] for job in answer["jobs"]]

    def submit_one(self, job: bytes) -> str:
        """The id of a single job."""
        return str(self.call("POST", "/v1/jobs", job)["job_id"])

    def job(self, job_id: str) -> Mapping[str, Any]:
        """One job."""
        found: Mapping[str, Any] = self.call("GET", f"/v1/jobs/{job_id}")
        return found

    def has_live_jobs(self) -> bool:
        """Whether any job is not over yet."""
        return bool(self.call("GET", "/v1/jobs?state=live&limit=1")["jobs"])

    def outcomes(self) -> dict[str, int]:
        """How many jobs there are in each state; reads all of them."""
        counts: dict[str, int] = {}
        after = ""
        while True:
            page = self.call("GET", f"/v1/jobs?limit={PAGE}{after}")
            for job in page["jobs"]:
                counts[job["state"]] = counts.get(job["state"], 0) + 1
            if not page.get("next"):
                return counts
            after = f"&after={page['next']}"

    def call(self, method: str, path: str, body: bytes | None = None) -> Any:
        """The answer's document.

        Raises:
            BenchFailed: it is not a success; with the problem document.
        """
        headers = {"Authorization": f"Bearer {self.token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = self._open()
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status >= 300:
            raise BenchFailed(f"{method} {path}: {answer.status} {text[:500].decode(errors='replace')}")
        return orjson.loads(text)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _open(self) -> http.client.HTTPConnection:
        if self._connection is None:
            address = urlsplit(self.url)
            self._connection = http.client.HTTPConnection(
                address.hostname or "127.0.0.1", address.port, timeout=self.timeout_s
            )
        return self._connection


def job_spec(name: str, command: Sequence[str], *, tenant: str) -> dict[str, object]:
    """A general job of one GPU."""
    return {"name": name, "tenant": tenant, "class": "general", "gpus": 1, "command": list(command)}


def batch_body(jobs: Sequence[Mapping[str, object]]) -> bytes:
    """The body of a batch submission."""
    return orjson.dumps({"jobs": list(jobs)})
