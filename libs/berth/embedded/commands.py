"""`berth up`, `down`, `status`, `demo`, `scenarios`: registered by the CLI where the server parts are installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from berth.embedded.fleet import DEFAULT_FLEET, node_names
from berth.embedded.layout import SERVICES, Layout, home_from_environment
from berth.embedded.leftovers import end_services, end_work
from berth.embedded.supervisor import PlatformSettings, PlatformState, is_supervised, read_state

UP_SECONDS: Final = 90.0
DOWN_SECONDS: Final = 90.0
EXIT_USAGE: Final = 2
EXIT_FAILED: Final = 1
POLICY: Final = Path(__file__).resolve().parents[3] / "policies" / "mixed.yaml"

console = Console(stderr=True, highlight=False, soft_wrap=True)

HomeOption = Annotated[Path | None, typer.Option("--home", help="Data directory (BERTH_HOME, else ./.berth).")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the CLI."""
    app.command("up")(up)
    app.command("down")(down)
    app.command("status")(status)
    app.command("demo")(demo)
    app.command("scenarios")(scenarios)


def up(
    home: HomeOption = None,
    fleet: Annotated[
        str,
        typer.Option(help="Nodes: name=8xH100-80G:nvswitch,... for simulated cards, or nvml for this machine's own."),
    ] = "",
    port: Annotated[int, typer.Option(help="Port of the API; 0 keeps the last one or takes a free one.")] = 0,
    pool: Annotated[str, typer.Option(help="Name of the pool.", envvar="BERTH_POOL")] = "default",
    policy: Annotated[
        Path | None, typer.Option(help="First policy document of a new platform.", envvar="BERTH_POLICY_FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start the embedded platform: NATS, PostgreSQL, all services and a fleet. Data are kept between starts."""
    layout = Layout(home_from_environment(home))
    chosen = fleet or detect_fleet()
    try:
        node_names(chosen)
    except ValueError as error:
        console.print(f"[red]--fleet:[/] {error}")
        raise typer.Exit(EXIT_USAGE) from None
    if policy is not None:
        _check_policy(policy)
    _check_surroundings(layout)
    if is_supervised(layout):
        state = wait_for(layout, {"running", "failed", "stopped"}, UP_SECONDS)
        _tell_running(layout, state, as_json=as_json, is_new=False)
        raise typer.Exit(0 if state is not None and state.state == "running" else EXIT_FAILED)
    settings = PlatformSettings(
        pool=pool, fleet=chosen, http_port=port, environment={"BERTH_POLICY_FILE": str((policy or POLICY).absolute())}
    )
    if not as_json:
        console.print(f"starting Berth in {layout.home} ...")
    state = start(layout, settings)
    _tell_running(layout, state, as_json=as_json, is_new=True)
    if state.state != "running":
        raise typer.Exit(EXIT_FAILED)


def _check_surroundings(layout: Layout) -> None:
    """Refuse variables that no service would start with, and a data directory that cannot be made."""
    from berth.runtime.settings import environment_faults

    faults = environment_faults()
    try:
        layout.home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        faults.append(f"{layout.home}: cannot be made ({error.strerror}); choose another with --home or BERTH_HOME")
    for fault in faults:
        console.print(f"refused: {fault}", markup=False)
    if faults:
        raise typer.Exit(EXIT_USAGE)


def _check_policy(file: Path) -> None:
    """Refuse a first policy that the platform would refuse: it would hold every job."""
    import yaml

    from berth.decisions.policy.check import check

    try:
        problems = check(yaml.safe_load(file.read_text()))
    except (OSError, ValueError, yaml.YAMLError) as error:
        console.print(f"[red]--policy {file}:[/] {error}")
        raise typer.Exit(EXIT_USAGE) from None
    for problem in problems:
        console.print(f"[red]--policy {file}:[/] {problem.path}: {problem.fault}; {problem.remedy}")
    if problems:
        raise typer.Exit(EXIT_USAGE)


def down(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Stop the embedded platform and the work on its nodes. Data stay; `berth up` goes on with them."""
    layout = Layout(home_from_environment(home))
    was_running = stop(layout)
    message = "stopped" if was_running else "nothing was running"
    if as_json:
        print(json.dumps({"home": str(layout.home), "was_running": was_running, "message": message}))
    else:
        console.print(f"{message} ({layout.home})")


def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Say what runs: processes, restarts, readiness. Exit status 1 where the platform does not run."""
    import asyncio

    from berth.embedded.probe import readiness

    layout = Layout(home_from_environment(home))
    state = read_state(layout)
    if state is None or not is_supervised(layout):
        if as_json:
            print(json.dumps({"home": str(layout.home), "state": "stopped"}))
        else:
            console.print(f"no platform runs in {layout.home}; `berth up` starts one")
        raise typer.Exit(EXIT_FAILED)

    async def ask() -> dict[str, tuple[bool, str]]:
        found = await asyncio.gather(*(readiness(layout, service) for service in SERVICES))
        return dict(zip(SERVICES, found, strict=True))

    ready = asyncio.run(ask())
    if as_json:
        services = {name: {"ready": ok, "pid": state.processes.get(name)} for name, (ok, _) in ready.items()}
        print(json.dumps({**asdict(state), "home": str(layout.home), "services": services}))
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table("service", "pid", "ready", "restarts", title=f"Berth {state.state} at {state.url}")
    for name, (ok, why) in ready.items():
        table.add_row(
            name,
            str(state.processes.get(name, "")),
            "[green]yes[/]" if ok else f"[red]no[/]: {escape(why)}",
            str(state.restarts.get(name, 0)),
        )
    Console().print(table)
    print(f"logs  {layout.log_file('SERVICE')}")


def demo(
    home: HomeOption = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the platform running afterwards.")] = False,
) -> None:
    """Bring a platform up, run the main job on real programs with faults on the way, show what happened, stop."""
    from berth.embedded.demo import run_demo

    raise typer.Exit(run_demo(home_from_environment(home) if home else None, keep=keep))


def scenarios(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Scenario files or folders.")],
    trace: Annotated[str, typer.Option(metavar="ID", help="Play this one only and show every decision.")] = "",
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only those whose id begins so.")] = "",
) -> None:
    """Play acceptance scenarios against the decisions under a simulated clock. Exit status 1 when one failed."""
    from berth.sim.scenarios.command import main as play

    missing = [path for path in paths if not path.exists()]
    if missing:
        console.print(f"[red]no such file or folder:[/] {missing[0]}")
        raise typer.Exit(EXIT_USAGE)
    options = [*(["--trace", trace] if trace else []), *(["--only", only] if only else [])]
    raise typer.Exit(play([*map(str, paths), *options]))


# --- used by the commands, the demo, benches and tests ---------------------------------------------------------------


def detect_fleet() -> str:
    """This machine's NVIDIA cards where there are any, else the simulated fleet."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return "nvml"
    return DEFAULT_FLEET


def start(layout: Layout, settings: PlatformSettings) -> PlatformState:
    """Start a supervisor and wait for its platform to run; the state tells whether it does."""
    for folder in (layout.home, layout.run, layout.logs, layout.nodes):
        folder.mkdir(parents=True, exist_ok=True)
    layout.run.chmod(0o700)
    if not is_supervised(layout):
        end_services(layout.home, ends_work=False)
    layout.state_file.unlink(missing_ok=True)
    with layout.log_file("supervisor").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "berth.embedded.supervisor", str(layout.home), json.dumps(asdict(settings))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=Path.cwd(),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_import_path())},
        )
    state = wait_for(layout, {"running", "failed", "stopped"}, UP_SECONDS, process=process)
    if state is None:
        state = PlatformState(state="failed", message=f"the supervisor ended or did not answer; see {layout.logs}")
    return state


def stop(layout: Layout) -> bool:
    """Stop a platform and wait until all of it is gone; whether there was one."""
    state = read_state(layout)
    if state is None or not is_supervised(layout):
        return stop_leftovers(layout)
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_SECONDS
    # The lock is given up a moment before the process is gone; "stopped" means that nothing is left.
    while (is_supervised(layout) or _lives(state.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return True


def stop_leftovers(layout: Layout) -> bool:
    """End what a supervisor that was killed has left: services and the work on the nodes, then the servers."""
    import asyncio

    from berth.embedded.servers import stop_servers

    state = read_state(layout)
    if state is None:
        return False
    found = end_services(layout.home, ends_work=True)
    end_work(layout.nodes)
    asyncio.run(stop_servers(layout, PlatformSettings(**state.settings)))
    return bool(found)


def wait_for(
    layout: Layout, states: set[str], timeout_s: float, *, process: subprocess.Popen[bytes] | None = None
) -> PlatformState | None:
    """The platform's state once it is one of `states`, or the last one seen after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    state = None
    while time.monotonic() < deadline:
        state = read_state(layout)
        if state is not None and state.state in states:
            return state
        if process is not None and process.poll() is not None:
            return read_state(layout)
        time.sleep(0.03)
    return state


def _lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to take notice does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def _import_path() -> list[str]:
    """Where `berth` and `services` come from, for processes started elsewhere."""
    libs = Path(__file__).resolve().parents[2]
    known = [str(libs), str(libs.parent)] if libs.name == "libs" else [str(libs)]
    return known + [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part not in known]


def _tell_running(layout: Layout, state: PlatformState | None, *, as_json: bool, is_new: bool) -> None:
    if as_json:
        described: dict[str, Any] = {"home": str(layout.home), "token_file": str(layout.token_file), "is_new": is_new}
        if state is not None:
            described.update(state=state.state, url=state.url, message=state.message)
        print(json.dumps(described))
        return
    if state is None or state.state != "running":
        console.print(f"[red]Berth did not start:[/] {state.message if state else 'no answer'}")
        console.print(f"look at {layout.log_file('supervisor')} and the other logs beside it")
        return
    took = f" after {state.ready_at - state.started_at:.1f} s" if is_new else " already"
    console.print(f"[green]Berth runs[/]{took}")
    console.print(f"  API        {state.url}  (OpenAPI: {state.url}/openapi.json)")
    console.print(f"  token      {layout.token_file}")
    console.print(f"  logs       {layout.logs}")
    console.print("  next       berth nodes · berth submit examples/jobs/hello.yaml · berth list · berth down")
