"""Commands about jobs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from berth.client.cli.session import (
    FINAL_STATES,
    NEGATIVE,
    OK,
    Job,
    Jobs,
    Json,
    age,
    connect,
    console,
    job_path,
    leave,
    print_json,
    print_line,
    print_table,
    say,
    table,
    usage,
)

if TYPE_CHECKING:
    from berth.client.transport import Transport

POLL_SECONDS: Final = 0.3
PATIENT_TRIES: Final = 8  # as in `transport`, which is not loaded for it
Key = Annotated[str | None, typer.Option(help="Idempotency key: the same content again is the same job.")]
Receipt = Annotated[
    bool, typer.Option("--receipt", help="What the last decision stood on: versions, candidates, reasons, digest.")
]
Wait = Annotated[bool, typer.Option("--wait", "-w", help="Wait until all are over; exit 1 unless all succeeded.")]
Tenant = Annotated[str | None, typer.Option(help="Tenant (BERTH_TENANT); by default the token's own.")]


# --------------------------------------------------------------------------------------------------------- submitting
def submit(
    file: Annotated[
        str, typer.Argument(metavar="FILE|-", help="YAML or JSON: a job, several documents, or jobs: [...].")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a field, as env.LR=0.1; repeatable."),
    ] = None,
    key: Key = None,
    tenant: Tenant = None,
    wait_: Wait = False,
    as_json: Json = False,
) -> None:
    """Submit a job, or a batch that is taken whole or not at all."""
    jobs = _read(file)
    for job in jobs:
        for override in set_ or ():
            _override(job, override)
        _give_tenant(job, tenant)
    _submit(jobs, key=key, is_batch=len(jobs) > 1, wait_=wait_, as_json=as_json)


def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What to run, after `--`.")],
    name: Annotated[str | None, typer.Option(help="Name; by default made from the command.")] = None,
    tenant: Tenant = None,
    job_class: Annotated[str, typer.Option("--class", help="training, inference, interactive or general.")] = "general",
    gpus: Annotated[int, typer.Option(help="GPUs of each worker.")] = 1,
    workers: Annotated[int, typer.Option(help="Workers that start together.")] = 1,
    type_: Annotated[list[str] | None, typer.Option("--type", help="Card type, in order of preference.")] = None,
    priority: Annotated[int | None, typer.Option(help="Higher is more urgent.")] = None,
    time_limit: Annotated[str | None, typer.Option(help="As 30m or 2h.")] = None,
    env: Annotated[list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Repeatable.")] = None,
    secret_env: Annotated[
        list[str] | None, typer.Option("--secret-env", metavar="NAME", help="Pass this variable of yours as a secret.")
    ] = None,
    workdir: Annotated[Path | None, typer.Option(help="Folder on the node; by default this one.")] = None,
    key: Key = None,
    wait_: Wait = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show the output, and wait.")] = False,
    as_json: Json = False,
) -> None:
    """Submit one command: berth run --gpus 2 -- python train.py"""
    variables = dict(_pair(text, "--env") for text in env or ())
    for secret in secret_env or ():
        if secret not in os.environ:
            usage(f"--secret-env {secret}: no such variable here")
        variables[secret] = os.environ[secret]
    job: dict[str, Any] = {
        "name": name or _name_of(command),
        "class": job_class,
        "gpus": gpus,
        "workers": workers,
        "command": command,
        "workdir": str((workdir or Path.cwd()).absolute()),
    }
    optional = {
        "types": type_,
        "priority": priority,
        "time_limit": time_limit,
        "env": variables,
        "secret_env": secret_env,
    }
    job |= {field: value for field, value in optional.items() if value}
    if priority == 0:
        job["priority"] = 0
    _give_tenant(job, tenant)
    _submit([job], key=key, is_batch=False, wait_=wait_ or follow, as_json=as_json, follow=follow)


def _read(file: str) -> list[dict[str, Any]]:
    from berth.client.documents import read_jobs

    if file == "-":
        return read_jobs(None, text=sys.stdin.buffer.read())
    path = Path(file)
    if not path.is_file():
        usage(f"no file {file}")
    return read_jobs(path)


def _override(job: dict[str, Any], text: str) -> None:
    """Carry out `--set key=value`. The value is YAML, except below env and labels, where it is text."""
    from berth.client.documents import read_yaml

    path, value_text = _pair(text, "--set")
    *parents, last = path.split(".")
    value: Any = value_text
    if not parents or parents[0] not in {"env", "labels"}:
        documents = read_yaml(value_text)
        value = documents[0].value if documents else None
    place: Any = job
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            usage(f"--set {text}: {parent} is no mapping")
    if value is None:
        place.pop(last, None)
    else:
        place[last] = value


def _pair(text: str, option: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        usage(f"{option} {text}: write it as NAME=VALUE")
    return name, value


def _give_tenant(job: dict[str, Any], tenant: str | None) -> None:
    if tenant is not None:
        job["tenant"] = tenant
    elif "tenant" not in job and os.environ.get("BERTH_TENANT"):
        job["tenant"] = os.environ["BERTH_TENANT"]


def _name_of(command: Sequence[str]) -> str:
    import uuid

    words = [Path(word).stem for word in command if not word.startswith("-")]
    stem = (
        words[1] if len(words) > 1 and words[0].startswith(("python", "bash", "sh")) else words[0] if words else "job"
    )
    stem = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem)[:40].strip("-") or "job"
    return f"{stem}-{uuid.uuid4().hex[:6]}"


def _submit(
    jobs: list[dict[str, Any]], *, key: str | None, is_batch: bool, wait_: bool, as_json: bool, follow: bool = False
) -> None:
    import uuid

    with connect() as api:
        answer = api.call(
            "POST",
            "/v1/jobs",
            body={"jobs": jobs} if is_batch else jobs[0],
            headers={"Idempotency-Key": key or str(uuid.uuid4())},
            repeatable=True,
            tries=PATIENT_TRIES,
        )
        taken: list[dict[str, Any]] = answer["jobs"] if is_batch else [answer]
        if not wait_:
            if as_json:
                print_json(answer)
            else:
                _print_taken(taken)
            return
        if not as_json:
            _print_taken(taken)
        if follow:
            _follow_when_started(api, taken[0]["job_id"], as_json=as_json)
        _wait_for(api, [job["job_id"] for job in taken], timeout=None, as_json=as_json)


def _print_taken(taken: Sequence[Mapping[str, Any]]) -> None:
    for job in taken[:20]:
        again = " (submitted before)" if job.get("is_repeat") else ""
        print(f"{job['job_id']}  {job['name']}{again}")
    if len(taken) > 20:
        print(f"… {len(taken)} jobs in all")
    if len(taken) == 1 and sys.stdout.isatty():
        say(f"[dim]berth why {taken[0]['job_id']} · berth logs -f {taken[0]['job_id']}[/]")


def _follow_when_started(api: Transport, job_id: str, *, as_json: bool) -> None:
    told = ""
    while True:
        job = api.call("GET", job_path(job_id, api))
        if job["attempts"] or job["state"] in FINAL_STATES:
            break
        if job["summary"] != told and not as_json:
            told = job["summary"]
            say(f"[dim]{told}[/]")
        time.sleep(POLL_SECONDS)
    if job["attempts"]:
        _print_log(api, job_id, {"worker": 0, "follow": True}, as_json=as_json)


# ------------------------------------------------------------------------------------------------------------- reading
def list_(
    tenant: Annotated[str | None, typer.Option(help="Of one tenant.")] = None,
    state: Annotated[list[str] | None, typer.Option("--state", "-s", help="A state, live or over; repeatable.")] = None,
    job_class: Annotated[str | None, typer.Option("--class", help="Of one class.")] = None,
    name: Annotated[str | None, typer.Option(help="Of this name.")] = None,
    user: Annotated[str | None, typer.Option(help="Submitted by this user.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="So many at most.")] = 50,
    as_json: Json = False,
) -> None:
    """Jobs, newest first."""
    from berth.client.texts import duration

    with connect() as api:
        found: list[dict[str, Any]] = []
        after: str | None = None
        while len(found) < limit:
            params = {
                "tenant": tenant,
                "state": state or None,
                "class": job_class,
                "name": name,
                "user": user,
                "limit": min(limit - len(found), 500),
                "after": after,
            }
            page = api.call("GET", "/v1/jobs", params=params)
            found += page["jobs"]
            after = page["next"]
            if after is None:
                break
    if as_json:
        print_json({"jobs": found, "next": after})
        return
    rows = [
        (
            job["job_id"],
            job["name"],
            job["tenant"],
            job["job_class"],
            job["state"],
            job["gpus"],
            duration(job.get("waited_seconds")),
            age(job["submitted_at"]),
            job["summary"],
        )
        for job in found
    ]
    columns = ("JOB", "NAME", "TENANT", "CLASS", "STATE", "GPUS", "WAITED", "AGE", "WHERE / WHY")
    print_table(columns, rows, empty="no jobs; submit one: berth submit FILE")


def show(job: Job, receipt: Receipt = False, as_json: Json = False) -> None:
    """A job with its specification and attempts."""
    from berth.client.texts import duration, sentence

    if receipt:
        _print_receipt(job, as_json=as_json)
        return
    with connect() as api:
        found = api.call("GET", job_path(job, api))
    if as_json:
        print_json(found)
        return
    spec = found.get("spec") or {}
    facts = table("", "")
    facts.show_header = False
    rows: list[tuple[str, object]] = [
        ("job", f"{found['job_id']}  {found['name']}"),
        ("tenant", f"{found['tenant']}, by {found['submitted_by']}"),
        ("class", f"{found['job_class']}, priority {found['priority']}"),
        ("state", f"{found['state']}: {found['summary']}"),
        ("asks for", _asks(found, spec)),
        ("command", " ".join(spec.get("command") or ())),
        ("submitted", f"{found['submitted_at']} ({age(found['submitted_at'])} ago)"),
        ("waited", duration(found.get("waited_seconds"))),
        ("started", found.get("started_at")),
        ("ended", found.get("ended_at")),
        ("message", found.get("message")),
        ("trace", found.get("trace_id")),
    ]
    for name, value in rows:
        if value not in (None, ""):
            facts.add_row(name, str(value))
    console().print(facts)
    if found["attempts"]:
        made = table("ATTEMPT", "NODES", "GPUS", "PLACED", "STARTED", "ENDED", "OUTCOME", "CAUSE")
        for attempt in found["attempts"]:
            assignments = attempt.get("assignments") or ()
            cause = attempt.get("cause")
            made.add_row(
                str(attempt["attempt"]),
                ", ".join(sorted({a["node"] for a in assignments})),
                str(sum(len(a.get("gpus") or ()) for a in assignments)),
                attempt.get("placed_at") or "",
                attempt.get("started_at") or "",
                attempt.get("ended_at") or "",
                attempt.get("outcome") or "",
                sentence(cause) if cause else "",
            )
        console().print(made)


def _asks(job: Mapping[str, Any], spec: Mapping[str, Any]) -> str:
    types = ", ".join(spec.get("types") or ()) or "any type"
    workers = f"{job['workers']} workers, " if job["workers"] > 1 else ""
    parts = [f"{name} {spec[name]}" for name in ("share", "memory_gib", "slice") if spec.get(name) is not None]
    return f"{workers}{job['gpus']} GPUs in all, {types}{''.join(', ' + part for part in parts)}"


def why(job: Job, receipt: Receipt = False, as_json: Json = False) -> None:
    """Why a job waits, now, with numbers and what would help."""
    if receipt:
        _print_receipt(job, as_json=as_json)
        return
    with connect() as api:
        found = api.call("GET", f"{job_path(job, api)}/why")
    if as_json:
        print_json(found)
        return
    place = f", place {found['place']} of {found['waiting']}" if found.get("place") else ""
    policy = f" (policy version {found['policy_version']})" if found.get("policy_version") else ""
    console().print(f"[bold]{found['state']}[/]{place}{policy}")
    for text in found["text"]:
        console().print(f"  • {text}", markup=False)


def _print_receipt(job: str, *, as_json: bool) -> None:
    """What the last decision about a job stood on."""
    from berth.client.texts import sentence

    with connect() as api:
        found = api.call("GET", f"{job_path(job, api)}/receipts", params={"limit": 1})
    if as_json:
        print_json(found)
        return
    if not found["receipts"]:
        print(f"nothing has been decided about {found['job_id']} yet")
        return
    last = found["receipts"][0]
    out = console()
    attempt = f", attempt {last['attempt']}" if last.get("attempt") else ""
    out.print(f"[bold]{last['decision']}[/] by {last['service']}{attempt}, {last['decided_at']}")
    out.print(
        f"  on policy {last['policy_version']}, state {last['state_version']}, decisions {last['decisions_version']}; "
        f"digest {last['digest']}",
        highlight=False,
    )
    for reason in last["reasons"]:
        out.print(f"  because {sentence(reason)}", markup=False, highlight=False)
    for candidate in last["candidates"]:
        mark = "took" if candidate.get("chosen") else "considered"
        facts = ", ".join(f"{name} {value}" for name, value in candidate.items() if name != "chosen")
        out.print(f"  {mark} {facts}", markup=False, highlight=False)
    for name, count in last["filtered"].items():
        out.print(f"  {name.replace('_', ' ')}: {count}", markup=False, highlight=False)
    out.print(f"  event {last['event_id']}; berth record export and berth replay decide it again", highlight=False)


def logs(
    job: Job,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until it has ended.")] = False,
    worker: Annotated[int, typer.Option("--worker", min=0, help="Number of the worker.")] = 0,
    attempt: Annotated[int | None, typer.Option(min=1, help="By default the latest.")] = None,
    tail: Annotated[int | None, typer.Option(min=1, help="Only the last so many bytes.")] = None,
    as_json: Json = False,
) -> None:
    """What a worker has written."""
    params = {"worker": worker, "attempt": attempt, "offset": -tail if tail else 0, "follow": follow}
    with connect() as api:
        if as_json and not follow:
            print_json({**_whole_log(api, job, params), "worker": worker})
            return
        _print_log(api, job, params, as_json=as_json)


def _whole_log(api: Transport, job: str, params: Mapping[str, Any]) -> dict[str, Any]:
    path, asked, text = f"{job_path(job, api)}/logs", dict(params), ""
    while True:
        response = api.send("GET", path, params=asked)
        text += response.text
        following = int(response.headers.get("Berth-Next-Offset", 0))
        if response.headers.get("Berth-Is-Cut") != "true":
            return {"attempt": int(response.headers.get("Berth-Attempt", 0)), "next_offset": following, "text": text}
        asked["offset"] = following


def _print_log(api: Transport, job: str, params: Mapping[str, Any], *, as_json: bool) -> None:
    for chunk in api.text(f"{job_path(job, api)}/logs", params=params):
        if as_json:
            print_line({"text": chunk})
        else:
            sys.stdout.write(chunk)
            sys.stdout.flush()


def trace(
    job: Job,
    width: Annotated[int | None, typer.Option(min=60, help="Columns; by default those of the terminal.")] = None,
    as_json: Json = False,
) -> None:
    """The way of a job through the services, as a waterfall."""
    from berth.telemetry.trace_store import SpanRecord, render_trace

    with connect() as api:
        found = api.call("GET", f"{job_path(job, api)}/trace")
    if as_json:
        print_json(found)
        return
    spans = [SpanRecord.from_dict(span) for span in found["spans"]]
    out = console()
    out.print(render_trace(spans, trace_id=found["trace_id"], width=width or min(out.width, 160)))


# ------------------------------------------------------------------------------------------------------------ changing
def cancel(
    jobs: Jobs,
    reason: Annotated[str, typer.Option("--why", help="For the record.")] = "",
    wait_: Annotated[bool, typer.Option("--wait", "-w", help="Wait until they are over.")] = False,
    as_json: Json = False,
) -> None:
    """End jobs; asking again changes nothing."""
    with connect() as api:
        found = [
            api.call("POST", f"{job_path(job, api)}/cancel", body={"why": reason}, repeatable=True) for job in jobs
        ]
        if wait_:
            found = [_until_over(api, job["job_id"], None) for job in found]
    if as_json:
        print_json({"jobs": found} if len(found) > 1 else found[0])
        return
    for job in found:
        print(f"{job['job_id']}  {job['name']}  {job['summary']}")


def wait(
    jobs: Jobs,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds to wait at most.")] = None,
    as_json: Json = False,
) -> None:
    """Wait until jobs are over; exit 1 unless all succeeded."""
    with connect() as api:
        _wait_for(api, jobs, timeout=timeout, as_json=as_json)


def _wait_for(api: Transport, jobs: Sequence[str], *, timeout: float | None, as_json: bool) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    over = []
    for job in jobs:
        found = _until_over(api, job, deadline)
        over.append(found)
        if not as_json:
            print(f"{found['job_id']}  {found['name']}  {found['summary']}")
    if as_json:
        print_json({"jobs": over} if len(over) > 1 else over[0])
    is_good = all(job["state"] == "succeeded" for job in over)
    leave(OK if is_good else NEGATIVE)


def _until_over(api: Transport, job: str, deadline: float | None) -> dict[str, Any]:
    while True:
        found: dict[str, Any] = api.call("GET", job_path(job, api), tries=PATIENT_TRIES)
        if found["state"] in FINAL_STATES or (deadline is not None and time.monotonic() >= deadline):
            return found
        time.sleep(POLL_SECONDS)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command("submit")(submit)
    app.command("run")(run)
    app.command("list")(list_)
    app.command("show")(show)
    app.command("why")(why)
    app.command("logs")(logs)
    app.command("cancel")(cancel)
    app.command("wait")(wait)
    app.command("trace")(trace)
