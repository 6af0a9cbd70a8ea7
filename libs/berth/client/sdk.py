"""`BerthClient`: the API with typed answers.

with BerthClient() as berth:                       # address and token as the command line finds them
    job = berth.submit({"name": "train", "class": "training", "gpus": 8, "command": ["python", "train.py"]})
    for chunk in berth.logs(job.job_id, follow=True):
        print(chunk, end="")
    assert berth.wait(job.job_id).state == "succeeded"
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from urllib.parse import quote

import httpx

from berth.client.errors import BerthError, Refused, ServerFault, Unreachable
from berth.client.settings import find_target
from berth.client.transport import PATIENT_TRIES, Transport
from berth.contracts.api import (
    EventView,
    GpuView,
    JobList,
    JobView,
    NodeView,
    Submitted,
    SubmittedBatch,
    TenantView,
    WhyView,
)
from berth.contracts.base import JobClass
from berth.contracts.jobs import JobSpec, JobState
from berth.contracts.requests import PolicyCheckAnswer, QuotaAnswer

if TYPE_CHECKING:
    from berth.telemetry.trace_store import SpanRecord

__all__ = ["BerthClient", "BerthError", "Refused", "ServerFault", "Unreachable"]

Job = JobSpec | Mapping[str, Any]
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}\Z")
POLL_SECONDS: Final = 0.3


def job_path(reference: str) -> str:
    """Path of a job by id or name. A name with a slash cannot stand in a path; `resolve` finds such a job."""
    return f"/v1/jobs/{quote(reference, safe='')}"


class BerthClient:
    """A connection to a platform. url, token: None finds them as the command line does.

    Every method raises `BerthError`: `Refused` says what to change, `Unreachable` is worth another try.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        home: Path | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        target = find_target(url=url, token=token, home=home)
        self.url = target.url
        self.token = target.token
        self._api = Transport(target.url, target.token, transport=transport)

    def close(self) -> None:
        """Close the connections."""
        self._api.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- jobs -------------------------------------------------------------------------------------------------------

    def submit(self, job: Job, *, key: str | None = None) -> Submitted:
        """Submit one job. key: makes repeats harmless; one is made up, so that a lost answer can be asked for again."""
        answer = self._post_jobs(_plain(job), key)
        return Submitted.model_validate(answer)

    def submit_batch(self, jobs: Iterable[Job], *, key: str | None = None) -> SubmittedBatch:
        """Submit several jobs, all or none; answers are in their order."""
        return SubmittedBatch.model_validate(self._post_jobs({"jobs": [_plain(job) for job in jobs]}, key))

    def _post_jobs(self, body: Mapping[str, Any], key: str | None) -> Any:
        headers = {"Idempotency-Key": key or str(uuid.uuid4())}
        return self._api.call("POST", "/v1/jobs", body=body, headers=headers, repeatable=True, tries=PATIENT_TRIES)

    def jobs(
        self,
        *,
        tenant: str | None = None,
        state: str | Sequence[str] | None = None,
        job_class: JobClass | str | None = None,
        name: str | None = None,
        user: str | None = None,
        limit: int | None = None,
    ) -> Iterator[JobView]:
        """Jobs, newest first, page by page. state: names of states, `live` or `over`. limit: None is all."""
        after: str | None = None
        left = limit
        while left is None or left > 0:
            page = JobList.model_validate(
                self._api.call(
                    "GET",
                    "/v1/jobs",
                    params={
                        "tenant": tenant,
                        "state": state if state is None or isinstance(state, str) else list(state),
                        "class": None if job_class is None else str(job_class),
                        "name": name,
                        "user": user,
                        "limit": 500 if left is None else min(left, 500),
                        "after": after,
                    },
                )
            )
            yield from page.jobs
            left = None if left is None else left - len(page.jobs)
            after = page.next
            if after is None:
                return

    def job(self, job: str) -> JobView:
        """A job with specification and attempts, by id or by a name that only one of your jobs has."""
        return JobView.model_validate(self._api.call("GET", self._path(job)))

    def why(self, job: str) -> WhyView:
        """Why it waits, now."""
        return WhyView.model_validate(self._api.call("GET", f"{self._path(job)}/why"))

    def cancel(self, job: str, *, why: str = "") -> JobView:
        """End a job; asking again changes nothing."""
        return JobView.model_validate(
            self._api.call("POST", f"{self._path(job)}/cancel", body={"why": why}, repeatable=True)
        )

    def wait(self, job: str, *, timeout_seconds: float | None = None) -> JobView:
        """Wait until a job is over.

        Raises:
            TimeoutError: it is not, after `timeout_seconds`.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        path = self._path(job)
        while True:
            found = JobView.model_validate(self._api.call("GET", path, tries=PATIENT_TRIES))
            if found.state.is_final:
                return found
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{found.name} ({found.job_id}) is {found.state} after {timeout_seconds} s")
            time.sleep(POLL_SECONDS)

    def logs(
        self, job: str, *, worker: int = 0, attempt: int | None = None, offset: int = 0, follow: bool = False
    ) -> Iterator[str]:
        """What a worker has written, in pieces. offset: in bytes, negative from the end. follow: until it has ended."""
        params = {"worker": worker, "attempt": attempt, "offset": offset, "follow": follow}
        yield from self._api.text(f"{self._path(job)}/logs", params=params)

    def trace(self, job: str) -> list[SpanRecord]:
        """Spans of a job's trace and of the batches they are linked to; empty where it was not sampled."""
        from berth.telemetry.trace_store import SpanRecord

        answer = self._api.call("GET", f"{self._path(job)}/trace")
        return [SpanRecord.from_dict(span) for span in answer["spans"]]

    def resolve(self, job: str) -> str:
        """The id of a job given by id or name; of several of one name the only live one, or the newest."""
        found = list(self.jobs(name=job, limit=20))
        live = [view for view in found if view.state not in _FINAL]
        if not found:
            return job
        return (live or found)[0].job_id

    def _path(self, job: str) -> str:
        return job_path(self.resolve(job) if "/" in job else job)

    # --- the pool -----------------------------------------------------------------------------------------------------

    def nodes(self) -> list[NodeView]:
        """All nodes."""
        return [NodeView.model_validate(node) for node in self._api.call("GET", "/v1/nodes")["nodes"]]

    def node(self, node: str) -> NodeView:
        """One node."""
        return NodeView.model_validate(self._api.call("GET", f"/v1/nodes/{quote(node, safe='')}"))

    def cordon(self, node: str, *, why: str = "", cordoned: bool = True) -> None:
        """Give a node no new work (or, with cordoned False, work again); what runs there stays."""
        body = {"cordoned": cordoned, "why": why}
        self._api.call("POST", f"/v1/nodes/{quote(node, safe='')}/cordon", body=body, repeatable=True)

    def gpus(self, *, node: str | None = None) -> list[GpuView]:
        """Cards with readings and holders."""
        return [GpuView.model_validate(gpu) for gpu in self._api.call("GET", "/v1/gpus", params={"node": node})["gpus"]]

    def quota(self, *, tenant: str | None = None) -> QuotaAnswer:
        """Quota and use by tenant and card type."""
        return QuotaAnswer.model_validate(self._api.call("GET", "/v1/quota", params={"tenant": tenant}))

    def tenants(self) -> list[TenantView]:
        """Tenants you may see."""
        return [TenantView.model_validate(tenant) for tenant in self._api.call("GET", "/v1/tenants")["tenants"]]

    # --- events -------------------------------------------------------------------------------------------------------

    def events(
        self,
        *,
        after: int | None = None,
        follow: bool = False,
        subject: str | None = None,
        type_: str | None = None,
        limit: int = 500,
    ) -> Iterator[EventView]:
        """Events in order, of those you may see. after: a sequence. follow: goes on for ever, also over a restart."""
        params = {"after": after, "subject": subject, "type": type_}
        if follow:
            for event in self._api.events("/v1/events", params={**params, "follow": True}):
                yield EventView.model_validate(event)
            return
        answer = self._api.call("GET", "/v1/events", params={**params, "limit": limit})
        yield from (EventView.model_validate(event) for event in answer["events"])

    # --- administration -----------------------------------------------------------------------------------------------

    def policy(self, version: int | None = None) -> dict[str, Any]:
        """The policy in force (or an earlier version): version, document, author, why, activated_at."""
        found: dict[str, Any] = self._api.call("GET", "/v1/policy", params={"version": version})
        return found

    def check_policy(self, document: Mapping[str, Any]) -> PolicyCheckAnswer:
        """Every fault of a document; changes nothing."""
        return PolicyCheckAnswer.model_validate(
            self._api.call("POST", "/v1/policy/check", body={"document": dict(document)}, repeatable=True)
        )

    def apply_policy(self, document: Mapping[str, Any], *, why: str = "") -> int | None:
        """Put a policy in force; its version, or None when that is not known yet.

        Raises:
            Refused: with every fault in `errors`.
        """
        body = {"document": dict(document), "why": why}
        version: int | None = self._api.call("PUT", "/v1/policy", body=body, repeatable=False)["version"]
        return version

    def create_token(self, user: str, *, tenant: str | None = None, role: str = "member") -> str:
        """A token for a user; it cannot be shown again."""
        body = {"user": user, "tenant": tenant, "role": role}
        token: str = self._api.call("POST", "/v1/tokens", body=body)["token"]
        return token

    def whoami(self) -> dict[str, Any]:
        """User, tenant and role of the token in use."""
        found: dict[str, Any] = self._api.call("GET", "/v1/whoami")
        return found


_FINAL: Final = frozenset(state for state in JobState if state.is_final)


def _plain(job: Job) -> dict[str, Any]:
    if isinstance(job, JobSpec):
        return job.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)
    return dict(job)
