"""Commands of the record: write it to a file, and run its decisions again."""

from __future__ import annotations

import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from berth.client.cli.session import NEGATIVE, Json, connect, leave, print_json, say, usage

if TYPE_CHECKING:
    from berth.replay.rerun import Verdict

record_app = typer.Typer(help="The record of events and decisions.", no_args_is_help=True)


@record_app.command("export")
def record_export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; packed where it ends in .gz.")],
    since: Annotated[
        str | None, typer.Option(help="Decisions from this instant on, such as 2026-03-02T08:00Z.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Up to this instant.")] = None,
    as_json: Json = False,
) -> None:
    """Write events and decisions of the pool to a file that `berth replay` runs again, anywhere (operators)."""
    from dataclasses import asdict

    from berth.client.record import export

    started = time.monotonic()
    with connect() as api:
        try:
            done = export(
                api,
                file,
                since=_instant(since, "--since"),
                until=_instant(until, "--until"),
                say=lambda text: None if as_json else say(f"[dim]{text}[/]"),
            )
        except OSError as error:
            usage(f"{file}: {error.strerror or error}")
    if as_json:
        print_json({**asdict(done), "path": str(done.path)})
        return
    print(
        f"{done.commits} commits and {done.events} events ({done.first_seq} to {done.last_seq}) in {file}, "
        f"{done.bytes / 1e6:.1f} MB, {time.monotonic() - started:.1f} s"
    )


def _instant(text: str | None, option: str) -> datetime | None:
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        usage(f"{option} {text}: write an instant with its zone, such as 2026-03-02T08:00Z")
    return found


def replay(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Written by berth record export.")] = None,
    sim: Annotated[int | None, typer.Option(help="Instead of a file: simulate a pool twice with this seed.")] = None,
    as_json: Json = False,
) -> None:
    """Decide again what was recorded and report the first difference. Needs no platform. Exit 1 where there is one."""
    if (file is None) == (sim is None):
        usage("give a file, or --sim SEED")
    started = time.monotonic()
    if sim is not None:
        from berth.replay.simulated import replay_simulation

        verdict = replay_simulation(sim)
    else:
        verdict = _replay_file(file)
    seconds = time.monotonic() - started
    if as_json:
        from dataclasses import asdict

        print_json({**asdict(verdict), "is_equal": verdict.is_equal, "seconds": round(seconds, 3)})
    else:
        _print(verdict, seconds)
    if not verdict.is_equal:
        leave(NEGATIVE)


def _replay_file(file: Path | None) -> Verdict:
    from berth.replay.record_file import BadRecord, read
    from berth.replay.rerun import explain_difference
    from berth.replay.rerun import replay as run_again

    assert file is not None
    try:
        verdict = run_again(read(file))
        if verdict.difference is not None:
            verdict.difference = explain_difference(verdict.difference, read(file))
    except BadRecord as error:
        usage(f"{file}: {error}")
    except OSError as error:
        usage(f"{file}: {error.strerror or error}")
    return verdict


def _print(verdict: Verdict, seconds: float) -> None:
    for note in verdict.notes:
        say(f"[yellow]{note}[/]")
    counted = f"{verdict.commits} commits, {verdict.events} events"
    if verdict.difference is None:
        print(f"{counted}, equal")
        say(
            f"[dim]{verdict.emissions} events and commands decided anew, {verdict.restarts} starts, "
            f"{verdict.policies} policies, {seconds:.1f} s[/]"
        )
        return
    print(f"{counted} up to the first difference")
    sys.stdout.write("\n".join(verdict.difference.lines()) + "\n")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(record_app, name="record")
    app.command("replay")(replay)
