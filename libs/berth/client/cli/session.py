"""What commands share: the platform they talk to, how they print, how they end.

Exit codes: 0 ok; 1 a job failed or the answer is no; 2 wrong usage; 3 refused by the platform (4xx); 4 the platform
cannot be reached; 5 the platform failed (5xx).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from berth.client.transport import Transport

OK: Final = 0
NEGATIVE: Final = 1
USAGE: Final = 2
REFUSED: Final = 3
UNREACHABLE: Final = 4
FAILED: Final = 5

Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output (JSON lines for streams).")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="Id, or a name that only one of your jobs has.")]
Jobs = Annotated[list[str], typer.Argument(metavar="JOB...", help="Ids or names.")]

FINAL_STATES: Final = frozenset({"refused", "succeeded", "failed", "cancelled", "reclaimed"})
STYLES: Final[Mapping[str, str]] = {
    "running": "green",
    "succeeded": "green",
    "ready": "green",
    "healthy": "green",
    "starting": "cyan",
    "stopping": "cyan",
    "submitted": "cyan",
    "waiting": "yellow",
    "suspect": "yellow",
    "cordoned": "yellow",
    "degraded": "yellow",
    "unknown": "magenta",
    "failed": "red",
    "refused": "red",
    "lost": "red",
    "quarantined": "red",
    "not_clean": "red",
}


@dataclass(slots=True)
class Chosen:
    """Options given before the command."""

    url: str | None = None
    token_file: Path | None = None
    home: Path | None = None


chosen: Final = Chosen()


def connect() -> Transport:
    """The platform that was chosen."""
    from berth.client.errors import NotConfigured
    from berth.client.settings import find_target
    from berth.client.transport import Transport

    token = None
    if chosen.token_file is not None:
        try:
            token = chosen.token_file.read_text().strip()
        except OSError as error:
            raise NotConfigured(f"--token-file {chosen.token_file}: {error.strerror}") from None
    target = find_target(url=chosen.url, token=token, home=chosen.home)
    return Transport(target.url, target.token)


def job_path(reference: str, api: Transport) -> str:
    """Path of a job. A name with a slash cannot stand in a path, so its id is looked up."""
    from urllib.parse import quote

    if "/" in reference:
        found = api.call("GET", "/v1/jobs", params={"name": reference, "limit": 20})["jobs"]
        live = [job for job in found if job["state"] not in FINAL_STATES] or found
        if live:
            reference = live[0]["job_id"]
    return f"/v1/jobs/{quote(reference, safe='')}"


# --------------------------------------------------------------------------------------------------------- printing
def console(*, stderr: bool = False) -> Console:
    """Rich's console; wide where nobody looks, so that nothing is cut off in a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else 240, soft_wrap=False)


def print_json(value: object) -> None:
    """One document: indented for people, on one line in a pipe."""
    text = json.dumps(value, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None)
    sys.stdout.write(text + "\n")


def print_line(value: object) -> None:
    """One JSON line of a stream, at once."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """A remark for people, beside the output."""
    console(stderr=True).print(text)


def table(*columns: str, title: str | None = None) -> Table:
    """An empty table."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """A table, or a word on why there is none."""
    made = table(*columns)
    for row in rows:
        made.add_row(*(_cell(value) for value in row))
    if made.row_count:
        console().print(made)
    else:
        say(empty)


def _cell(value: object) -> Any:
    from rich.text import Text

    text = "" if value is None else str(value)
    return Text(text, style=STYLES.get(text, ""))


def age(text: str | None) -> str:
    """How long ago."""
    from datetime import UTC, datetime

    from berth.client.texts import duration

    if not text:
        return ""
    return duration(max(0.0, (datetime.now(UTC) - datetime.fromisoformat(text)).total_seconds()))


# ------------------------------------------------------------------------------------------------------------ ending
def leave(code: int) -> NoReturn:
    """End the command."""
    raise typer.Exit(code)


def usage(message: str) -> NoReturn:
    """End the command because it was called wrongly."""
    say(f"[red]error:[/] {message}")
    raise typer.Exit(USAGE)


def explain(error: Exception, *, as_json: bool) -> int:  # noqa: PLR0912 - one branch for each kind of error
    """Print an error for people (or programs) and return the exit code it stands for."""
    from rich.markup import escape

    from berth.client.documents import DocumentError
    from berth.client.errors import NotConfigured, Refused, ServerFault, Unreachable

    out = console(stderr=True)
    if isinstance(error, (Refused, ServerFault)):
        if as_json:
            print_json(error.problem)
        out.print(f"[red]{'refused' if isinstance(error, Refused) else 'failed'}:[/] {escape(error.detail)}")
        if len(error.errors) > 1:
            for fault in error.errors:
                where = f"{fault.get('field') or 'body'}"
                line = f" (line {fault['line']})" if fault.get("line") else ""
                value = f" [dim]{escape(str(fault['value']))}[/]" if fault.get("value") is not None else ""
                out.print(f"  [bold]{escape(where)}[/]{line}{value}: {escape(str(fault.get('detail', '')))}")
                if fault.get("remedy"):
                    out.print(f"      → {escape(str(fault['remedy']))}")
        else:
            if error.field:
                value = f" = {escape(error.value)}" if error.value is not None else ""
                out.print(f"  field  [bold]{escape(error.field)}[/]{value}")
            if error.remedy:
                out.print(f"  remedy {escape(error.remedy)}")
        return REFUSED if isinstance(error, Refused) else FAILED
    if isinstance(error, Unreachable):
        if as_json:
            print_json({"code": "unreachable", "detail": str(error)})
        out.print(f"[red]cannot reach the platform:[/] {escape(str(error))}")
        out.print("  remedy `berth status` shows what runs here, `berth up` starts it; BERTH_URL names another one")
        return UNREACHABLE
    if isinstance(error, NotConfigured):
        if as_json:
            print_json({"code": "not_configured", "detail": str(error)})
        out.print(f"[red]error:[/] {escape(str(error))}")
        return UNREACHABLE
    if isinstance(error, DocumentError):
        if as_json:
            print_json({"code": error.code, "detail": error.detail, "field": error.field, "remedy": error.remedy})
        out.print(f"[red]cannot read it:[/] {escape(error.detail)}")
        out.print(f"  remedy {escape(error.remedy)}")
        return USAGE
    raise error
