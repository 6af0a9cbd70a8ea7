"""Commands about the policy and quotas."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from berth.client.cli.pool import show_quota
from berth.client.cli.session import NEGATIVE, Json, connect, console, leave, print_json, print_table, say, usage

if TYPE_CHECKING:
    from berth.client.documents import Document

policy_app = typer.Typer(help="The policy of the pool.", no_args_is_help=True)
quota_app = typer.Typer(help="Quota, use and waiting demand by tenant and card type, in GPUs.")

File = Annotated[str, typer.Argument(metavar="FILE|-", help="The document, YAML or JSON.")]
Reason = Annotated[str, typer.Option("--why", help="For the record.")]
Proposal = Annotated[str, typer.Argument(metavar="PROPOSAL", help="Id, as berth policy proposals shows it.")]

PROPOSED = "proposed; the answer is not in yet: berth policy history"
JOBS_SHOWN = 20


# ---------------------------------------------------------------------------------------------------------------- show
@policy_app.command("show")
def policy_show(
    version: Annotated[int | None, typer.Option(min=1, help="An earlier version.")] = None, as_json: Json = False
) -> None:
    """The policy in force, or an earlier version, as YAML."""
    with connect() as api:
        found = api.call("GET", "/v1/policy", params={"version": version})
    if as_json:
        print_json(found)
        return
    import yaml

    why = f": {found['why']}" if found["why"] else ""
    approver = f", approved by {found['approver']}" if found.get("approver") else ""
    sys.stdout.write(f"# version {found['version']}, {found['activated_at']}, by {found['author']}{approver}{why}\n")
    sys.stdout.write(yaml.safe_dump(found["document"], sort_keys=False, allow_unicode=True))


@policy_app.command("history")
def policy_history(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=200, help="So many at most.")] = 20,
    before: Annotated[int | None, typer.Option(min=1, help="Only versions before this one.")] = None,
    as_json: Json = False,
) -> None:
    """Versions, newest first: when, by whom, why, and what changed in short."""
    with connect() as api:
        found = api.call("GET", "/v1/policy/history", params={"limit": limit, "before": before})
    if as_json:
        print_json(found)
        return
    rows = [
        (
            v["version"],
            v["activated_at"][:19].replace("T", " "),
            v["author"] + (f" + {v['approver']}" if v["approver"] else ""),
            v["why"],
            v["changed"],
        )
        for v in found["versions"]
    ]
    print_table(("VERSION", "IN FORCE SINCE", "BY", "WHY", "CHANGED"), rows, empty="no policy yet")
    if found["next"]:
        say(f"older ones: berth policy history --before {found['next']}")


@policy_app.command("schema")
def policy_schema() -> None:
    """JSON Schema of the document, for editors; needs no platform."""
    from berth.decisions.policy.schema import schema_text

    sys.stdout.write(schema_text())


# --------------------------------------------------------------------------------------------------------------- check
@policy_app.command("check")
def policy_check(
    file: File,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no platform, even where there is one.")] = False,
    installed: Annotated[
        list[str] | None,
        typer.Option("--installed", metavar="TYPE=N", help="Cards to compare with, without a platform; repeatable."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Every fault of a document, with its path and remedy; changes nothing. Exit 1 where there is one.

    With a platform the document is also compared with the installed cards and with what is held.
    """
    text = _read(file)
    cards = {card_type: int(count or 0) for card_type, count in _amounts(installed or [], "--installed")}
    found = None if offline or cards else _ask_platform(text.value)
    if found is None:
        found = _check_here(text.value, cards)
        if not cards:
            say("checked without a platform: nothing is compared with installed cards (--installed TYPE=N)")
    if as_json:
        print_json(found)
    else:
        _print_faults(found, file, text)
        if not found["problems"]:
            print("the document is right")
        _print_effects(found.get("effects"))
    if found["problems"]:
        leave(NEGATIVE)


def _ask_platform(document: Any) -> dict[str, Any] | None:
    """The platform's answer; None where there is none to ask."""
    from berth.client.errors import NotConfigured, Unreachable

    if not isinstance(document, dict):
        return None
    try:
        with connect() as api:
            if api.call("GET", "/v1/whoami")["role"] != "operator":
                return None
            found: dict[str, Any] = api.call("POST", "/v1/policy/check", body={"document": document}, repeatable=True)
            if found["is_valid"]:
                effects = api.call("POST", "/v1/policy/diff", body={"document": document}, repeatable=True)
                found["effects"] = effects["effects"]
            return found
    except (NotConfigured, Unreachable):
        return None


def _check_here(document: Any, cards: Mapping[str, int]) -> dict[str, Any]:
    from datetime import UTC, datetime

    from berth.decisions.policy.check import check, warnings

    problems = check(document, installed=cards)
    doubts = warnings(document, installed=cards, now=datetime.now(UTC))
    return {
        "is_valid": not problems,
        "problems": [problem.to_json() for problem in problems],
        "warnings": [doubt.to_json() for doubt in doubts],
    }


def _print_faults(found: Mapping[str, Any], file: str, text: Document) -> None:
    marks = {".".join(map(str, place)): mark for place, mark in text.marks.items()}
    for kind, style in (("problems", "red"), ("warnings", "yellow")):
        for problem in found[kind]:
            line = _line(problem["path"], marks)
            where = f"{file}:{line}: " if line else ""
            out = console()
            out.print(f"[{style}]{kind[:-1]}[/] ", end="")
            out.print(f"{where}{problem['path']}: {problem['fault']}", markup=False, soft_wrap=True)
            out.print(f"        → {problem['remedy']}", markup=False, soft_wrap=True)


def _line(path: str, marks: Mapping[str, tuple[int, int]]) -> int | None:
    """The line of a path, or of the closest enclosing one that the text has."""
    while path and path not in marks:
        path = path.rpartition(".")[0]
    return marks[path][0] if path else None


# ---------------------------------------------------------------------------------------------------------------- diff
@policy_app.command("diff")
def policy_diff(
    what: Annotated[str, typer.Argument(metavar="FILE|-|N", help="A document, or the number of a version.")],
    other: Annotated[int | None, typer.Argument(metavar="M", min=1, help="Second version: compare N with M.")] = None,
    as_json: Json = False,
) -> None:
    """What a document or version N changes against the policy in force, and what would follow at once.

    With two numbers: what changed from version N to version M. Exit 1 where the document has a fault.
    """
    body: dict[str, Any]
    if other is not None:
        if not what.isdigit():
            usage("give two versions, or one file")
        body = {"version": other, "base": int(what)}
    elif what.isdigit() and not Path(what).exists():
        body = {"version": int(what)}
    else:
        body = {"document": _mapping(_read(what), what)}
    with connect() as api:
        found = api.call("POST", "/v1/policy/diff", body=body, repeatable=True)
    if as_json:
        print_json(found)
    else:
        _print_diff(found)
    if found["problems"]:
        leave(NEGATIVE)


def _print_diff(found: Mapping[str, Any]) -> None:
    to = f"version {found['to_version']}" if found["to_version"] else "this document"
    out = console()
    out.print(f"from version {found['from_version']} to {to}:", markup=False)
    for change in found["changes"]:
        out.print(f"  {change['text']}", markup=False, soft_wrap=True)
    if not found["changes"]:
        out.print("  nothing")
    for kind, style in (("problems", "red"), ("warnings", "yellow")):
        for problem in found[kind]:
            out.print(f"[{style}]{kind[:-1]}[/] ", end="")
            out.print(f"{problem['path']}: {problem['fault']} → {problem['remedy']}", markup=False, soft_wrap=True)
    _print_effects(found["effects"])
    if found["needs_approval"]:
        out.print("a second operator has to approve it", markup=False)


def _print_effects(effects: Mapping[str, Any] | None) -> None:
    if effects is None:
        return
    lines = list(_effect_lines(effects))
    out = console()
    out.print("at once:" if lines else "at once: nothing is stopped, started or made impossible", markup=False)
    for line in lines:
        out.print(f"  {line}", markup=False, soft_wrap=True)


def _effect_lines(effects: Mapping[str, Any]) -> Iterator[str]:
    """What would follow, in words."""
    for cut in effects["cuts"]:
        line = (
            f"{cut['tenant']} holds {cut['held']:g} {cut['card_type']} and may hold {cut['may_hold']:g}: "
            f"{cut['over']:g} too many"
        )
        if cut["stopped"]:
            line += f", {cut['stopped']:g} are taken back"
        if cut["draining"]:
            staying = [job for job in cut["jobs"] if not job["rule"]]
            line += f", {cut['draining']:g} drain: nothing new starts until jobs end ({_jobs(staying)})"
        yield line
    by_rule: dict[str, list[Mapping[str, Any]]] = {}
    for job in effects["stops"]:
        by_rule.setdefault(job["rule"], []).append(job)
    for rule, jobs in by_rule.items():
        yield f"would be stopped ({rule.replace('_', ' ')}): {_jobs(jobs)}"
    if effects["stops_more"]:
        yield f"and {effects['stops_more']} more would be stopped"
    for entry in effects["never"]:
        from berth.client.texts import sentence

        reasons = "; ".join(sentence(reason) for reason in entry["reasons"])
        yield f"would never start: {_jobs([entry['job']])}: {reasons}"
    if effects["never_more"]:
        yield f"and {effects['never_more']} more would never start"
    if effects["starts"]:
        more = f" and {effects['starts_more']} more" if effects["starts_more"] else ""
        yield f"would start: {_jobs(effects['starts'])}{more}"
    for line in effects["lines"]:
        yield _line_words(line)
    if not effects["is_tried"]:
        yield "the pool is too large to try it: whom preemption would stop is not told"


def _jobs(jobs: Sequence[Mapping[str, Any]]) -> str:
    shown = [
        f"{job['job_id']} ({job['tenant']}, {job['gpus']:g} GPUs"
        + (f", {job['workers']} workers)" if job["workers"] else ")")
        for job in jobs[:JOBS_SHOWN]
    ]
    more = f" and {len(jobs) - JOBS_SHOWN} more" if len(jobs) > JOBS_SHOWN else ""
    return ", ".join(shown) + more


def _line_words(line: Mapping[str, Any]) -> str:
    if line["change"] == "removed":
        now = "which holds now, " if line["was_open"] else ""
        return f"{line['kind']} {line['name']}, {now}is gone"
    holds = {
        (True, True): "still holds",
        (True, False): "no longer holds",
        (False, True): "holds from now on",
        (False, False): "does not hold now",
    }[line["was_open"], line["is_open"]]
    after = line["next_change"]
    change = f"; the next change is at {after[:16].replace('T', ' ')} UTC" if after else ""
    return f"{line['kind']} {line['name']} ({line['change']}) {holds}{change}"


# --------------------------------------------------------------------------------------------------------------- apply
@policy_app.command("apply")
def policy_apply(
    file: File,
    reason: Reason = "",
    based_on: Annotated[
        int | None, typer.Option("--based-on", min=0, help="Refuse it when another version is in force by then.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would change.")] = False,
    as_json: Json = False,
) -> None:
    """Check a policy and put it in force. A wrong one is refused whole; the old one stays."""
    text = _read(file)
    document = _mapping(text, file)
    if dry_run:
        policy_diff(file, None, as_json)
        return
    body = {"document": document, "why": reason, **({} if based_on is None else {"based_on": based_on})}
    with connect() as api:
        found = api.call("PUT", "/v1/policy", body=body, repeatable=False)
    _print_outcome(found, as_json=as_json)


def _print_outcome(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
    elif found["state"] == "activated":
        print(f"policy version {found['version']} is in force")
    elif found["state"] == "held":
        print(f"another operator has to approve it: berth policy approve {found['proposal_id']}")
    else:
        print(PROPOSED)


@policy_app.command("proposals")
def policy_proposals(as_json: Json = False) -> None:
    """Proposals that wait for a second operator, and what they change."""
    with connect() as api:
        found = api.call("GET", "/v1/policy/proposals")
    if as_json:
        print_json(found)
        return
    for held in found["proposals"]:
        why = f": {held['why']}" if held["why"] else ""
        out = console()
        at = held["proposed_at"][:19].replace("T", " ")
        out.print(f"{held['proposal_id']}  {at}, by {held['author']}{why}", markup=False, soft_wrap=True)
        for change in held["changes"]:
            out.print(f"    {change['text']}", markup=False, soft_wrap=True)
    if not found["proposals"]:
        say("no proposal waits")


@policy_app.command("approve")
def policy_approve(proposal: Proposal, reason: Reason = "", as_json: Json = False) -> None:
    """Approve what another operator proposed; it is in force then."""
    with connect() as api:
        found = api.call("POST", f"{_proposal_path(proposal)}/approve", body={"why": reason}, repeatable=False)
    _print_outcome(found, as_json=as_json)


@policy_app.command("reject")
def policy_reject(proposal: Proposal, reason: Reason = "", as_json: Json = False) -> None:
    """Turn a proposal down (your own, too)."""
    with connect() as api:
        found = api.call("POST", f"{_proposal_path(proposal)}/withdraw", body={"why": reason}, repeatable=False)
    if as_json:
        print_json(found)
    else:
        print(f"{proposal} is turned down")


def _proposal_path(proposal: str) -> str:
    from urllib.parse import quote

    return f"/v1/policy/proposals/{quote(proposal, safe='')}"


# --------------------------------------------------------------------------------------------------------------- quota
@quota_app.callback(invoke_without_command=True)
def quota(
    context: typer.Context,
    tenant: Annotated[str | None, typer.Option(help="Of one tenant.")] = None,
    as_json: Json = False,
) -> None:
    """Quota, use and waiting demand by tenant and card type, in GPUs."""
    if context.invoked_subcommand is None:
        show_quota(tenant, as_json=as_json)


@quota_app.command("set")
def quota_set(
    tenant: Annotated[str, typer.Argument(metavar="TENANT")],
    amounts: Annotated[
        list[str], typer.Argument(metavar="TYPE=N...", help="GPUs by card type; TYPE=none takes the limit away.")
    ],
    reason: Reason = "",
    as_json: Json = False,
) -> None:
    """Set a tenant's quota (operator); types left out stay as they are. It is a policy version of its own."""
    from urllib.parse import quote

    body = {"quota": dict(_amounts(amounts, "TYPE=N")), "why": reason}
    with connect() as api:
        found = api.call("PATCH", f"/v1/tenants/{quote(tenant, safe='')}/quota", body=body, repeatable=False)
    _print_outcome(found, as_json=as_json)


def _amounts(texts: Sequence[str], option: str) -> Iterator[tuple[str, float | None]]:
    """TYPE=N pairs; None for TYPE=none."""
    for text in texts:
        card_type, _, amount = text.partition("=")
        try:
            value = None if amount == "none" else float(amount)
        except ValueError:
            value = -1.0
        if not card_type or (value is not None and not 0 <= value < float("inf")):
            usage(f"{option} {text}: write it as H100-80G=8")
        yield card_type, value


# ------------------------------------------------------------------------------------------------------------- reading
def _read(file: str) -> Document:
    """The one document of a file."""
    from berth.client.documents import read_yaml

    if file == "-":
        text = sys.stdin.buffer.read()
    else:
        path = Path(file)
        if not path.is_file():
            usage(f"no file {file}")
        text = path.read_bytes()
    documents = read_yaml(text)
    if len(documents) != 1:
        usage(f"{file}: a policy is one document, this has {len(documents)}")
    return documents[0]


def _mapping(document: Document, file: str) -> dict[str, Any]:
    if not isinstance(document.value, dict):
        usage(f"{file}: a policy is one mapping")
    found: dict[str, Any] = document.value
    return found


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(policy_app, name="policy")
    app.add_typer(quota_app, name="quota")
