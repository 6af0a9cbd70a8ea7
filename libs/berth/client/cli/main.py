"""`berth`: the command line.

Starts fast: models, HTTP and drawing are loaded by the commands that need them, and the embedded platform only when one
of its commands is asked for.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from berth.client.cli import admin, jobs, policy, pool, record
from berth.client.cli.session import Json, chosen, explain, print_json

EMBEDDED: Final = frozenset({"up", "down", "status", "demo", "scenarios"})

EPILOG: Final = (
    "Exit codes: 0 ok · 1 a job failed, or the answer is no · 2 wrong usage · 3 refused by the platform (4xx) · "
    "4 the platform cannot be reached · 5 the platform failed (5xx)."
)

app = typer.Typer(
    name="berth",
    help="Share GPUs, see who gets which and why.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _before(
    url: Annotated[str | None, typer.Option(help="Address of the platform (BERTH_URL).")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with your token (BERTH_TOKEN_FILE, BERTH_TOKEN).")
    ] = None,
    home: Annotated[
        Path | None, typer.Option(help="Data directory of a platform that runs here (BERTH_HOME, else .berth).")
    ] = None,
) -> None:
    chosen.url, chosen.token_file, chosen.home = url, token_file, home


@app.command("version")
def version(as_json: Json = False) -> None:
    """The version of this program."""
    from importlib import metadata

    try:
        found = metadata.version("berth-gpu")
    except metadata.PackageNotFoundError:
        found = "0 (not installed)"
    if as_json:
        print_json({"version": found})
    else:
        print(found)


jobs.register(app)
pool.register(app)
policy.register(app)
admin.register(app)
record.register(app)


def _register_embedded(arguments: list[str]) -> None:
    """Add the commands of `EMBEDDED` where one of them, or help, is asked for and they are installed."""
    words = [argument for argument in arguments if not argument.startswith("-")]
    is_help = not words or "--install-completion" in arguments or "--show-completion" in arguments
    if not is_help and not EMBEDDED.intersection(words):
        return
    try:
        commands = importlib.import_module("berth.embedded.commands")
    except ImportError as error:
        if EMBEDDED.intersection(words[:1]):
            sys.stderr.write(f"the embedded platform is not installed ({error}); pip install 'berth-gpu[server]'\n")
        return
    commands.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    given = sys.argv[1:] if arguments is None else arguments
    _register_embedded(given)
    try:
        app(given, prog_name="berth")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:
        sys.exit(explain(error, as_json="--json" in given))


if __name__ == "__main__":
    main()
