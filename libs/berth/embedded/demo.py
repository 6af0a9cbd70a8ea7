"""`berth demo`: the main job on a platform of its own, with faults on the way, and a table of what became of it.

Everything shown is read back through the public API. The exit status is 0 only when every job ended as it should have;
otherwise the last lines say what to look at.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import yaml
from rich.console import Console
from rich.table import Table

from berth.client.documents import read_jobs
from berth.client.sdk import BerthClient, BerthError
from berth.contracts.api import JobView, WhyView
from berth.contracts.jobs import JobState
from berth.embedded.commands import POLICY, start, stop
from berth.embedded.fleet import DEFAULT_FLEET
from berth.embedded.layout import Layout
from berth.embedded.supervisor import PlatformSettings, is_supervised, read_state

EXAMPLES: Final = Path(__file__).resolve().parents[3] / "examples" / "jobs"
PATIENCE_SECONDS: Final = 180.0
EXPECTED: Final = {
    "train-characters": JobState.SUCCEEDED,
    "flaky": JobState.SUCCEEDED,
    "whole-pool": JobState.SUCCEEDED,
    "long": JobState.CANCELLED,
    "too-big": JobState.REFUSED,
    **{f"primes-{number:02d}": JobState.SUCCEEDED for number in range(20)},
}

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


class DemoFailed(Exception):
    """Something did not go as it should; says what to look at."""


def run_demo(home: Path | None, *, keep: bool) -> int:
    """Run it; the exit status."""
    layout = Layout(home or Path.cwd() / ".berth" / "demo")
    if is_supervised(layout):
        console.print(
            f"[red]a demo is running in {layout.home} already[/]; wait for it, or `berth down --home {layout.home}`"
        )
        return 1
    if home is None:
        shutil.rmtree(layout.home, ignore_errors=True)
    try:
        return _Demo(layout).run()
    except (DemoFailed, BerthError) as error:
        console.print(f"\n[red]The demo failed:[/] {error}")
        console.print(f"logs: {layout.logs} · job output: {layout.nodes}")
        return 1
    finally:
        if keep:
            console.print(f"the platform goes on in {layout.home}; `berth down --home {layout.home}` stops it")
        else:
            _say("stopping everything")
            stop(layout)
            console.print("stopped; nothing is left running")


class _Demo:
    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.client: BerthClient
        self.ids: dict[str, str] = {}

    def run(self) -> int:
        """All acts, in order."""
        self._up()
        self._show_nodes()
        self._submit()
        self._show_waits()
        follower = self._follow_training()
        self._kill("node_agent", "the programs go on without it, and the next agent finds them again")
        self._kill("placement", "a new one takes over from what is stored")
        self._cancel("long")
        self._finish()
        follower.join(timeout=5)
        self._show_outcomes()
        self._show_trace("flaky")
        return self._verdict()

    # --- acts -------------------------------------------------------------------------------------------------------

    def _up(self) -> None:
        _say(f"starting Berth in {self.layout.home}: NATS, PostgreSQL, seven services, three simulated nodes")
        settings = PlatformSettings(fleet=DEFAULT_FLEET, environment={"BERTH_POLICY_FILE": str(POLICY)})
        state = start(self.layout, settings)
        if state.state != "running":
            raise DemoFailed(f"the platform did not start: {state.message}; see {self.layout.log_file('supervisor')}")
        console.print(f"running at {state.url} after {state.ready_at - state.started_at:.1f} s")
        self.client = BerthClient(url=state.url, token=self.layout.token_file.read_text().strip())

    def _show_nodes(self) -> None:
        _until("three nodes are ready", lambda: len([n for n in self.client.nodes() if n.state == "ready"]) == 3)
        table = Table("node", "cards", "links", "state")
        for node in self.client.nodes():
            cards = ", ".join(f"{count} x {kind}" for kind, count in node.card_types.items())
            links = "each with each" if node.link_groups and len(node.link_groups[0]) == node.gpus else "over PCIe"
            table.add_row(node.node, cards, links, node.state)
        console.print(table)

    def _submit(self) -> None:
        _say(
            "submitting: a training gang of 2 workers x 4 GPUs, a job that fails once, one to be cancelled, 20 small ones"
        )
        for name in ("train", "flaky", "long", "whole-pool"):
            self._submit_file(EXAMPLES / f"{name}.yaml")
        self._submit_file(EXAMPLES / "batch.yaml")
        too_big = yaml.safe_load((EXAMPLES / "whole-pool.yaml").read_text()) | {"name": "too-big", "workers": 200}
        answer = self.client.submit(too_big)
        self.ids["too-big"] = answer.job_id
        console.print(f"{len(self.ids)} jobs accepted")

    def _submit_file(self, path: Path) -> None:
        for answer in self.client.submit_batch(read_jobs(path)).jobs:
            self.ids[answer.name] = answer.job_id

    def _show_waits(self) -> None:
        _until("the training gang runs", lambda: self._job("train-characters").state is JobState.RUNNING)
        _until("the refusal is known", lambda: self._job("too-big").state is JobState.REFUSED)
        _until("the whole-pool job waits", lambda: bool(self._job("whole-pool").reasons))
        _say("what waits, and why (`berth why JOB`)")
        for name in ("whole-pool", "too-big", "flaky"):
            why: WhyView = self.client.why(self.ids[name])
            for line in why.text or (f"{why.state}",):
                console.print(f"  {name:<12} {line}")

    def _follow_training(self) -> threading.Thread:
        _say("following the training log (`berth logs -f train-characters`)")

        def follow() -> None:
            with BerthClient(url=self.client.url, token=self.client.token) as client:
                for chunk in client.logs(self.ids["train-characters"], follow=True):
                    for line in chunk.splitlines():
                        console.print(f"  [dim]train |[/] {line}", markup=True)

        thread = threading.Thread(target=follow, name="follow", daemon=True)
        thread.start()
        _until("the loss is printed", lambda: "loss" in self._log("train-characters"))
        return thread

    def _kill(self, service: str, why: str) -> None:
        state = read_state(self.layout)
        pid = 0 if state is None else state.processes[service]
        _say(f"kill -9 {service} (pid {pid}): {why}")
        os.kill(pid, signal.SIGKILL)

        def is_back() -> bool:
            now = read_state(self.layout)
            return (
                now is not None
                and now.processes.get(service, pid) != pid
                and self.layout.service_file(service).exists()
            )

        _until(f"{service} is back", is_back)
        now = read_state(self.layout)
        console.print(f"  {service} is back as pid {now.processes[service] if now else '?'}")

    def _cancel(self, name: str) -> None:
        _until(f"{name} runs", lambda: self._job(name).state is JobState.RUNNING)
        _say(f"cancelling {name}")
        self.client.cancel(self.ids[name], why="the demo is done with it")

    def _finish(self) -> None:
        _say("waiting for the rest")
        last = ""

        def all_final() -> bool:
            nonlocal last
            states = [job.state for job in self._jobs()]
            line = ", ".join(f"{states.count(state)} {state}" for state in JobState if state in states)
            if line != last:
                console.print(f"  {line}")
                last = line
            return all(state.is_final for state in states)

        _until("every job has ended", all_final)

    def _show_outcomes(self) -> None:
        table = Table("job", "class", "waited", "attempts", "ran on", "GPUs", "outcome", title="What became of them")
        for job in sorted(self._jobs(), key=lambda job: job.name):
            waited = "" if job.waited_seconds is None else f"{job.waited_seconds:.1f} s"
            nodes = sorted({a.node for attempt in job.attempts for a in attempt.assignments}) or list(job.nodes)
            table.add_row(job.name, job.job_class, waited, str(job.attempt), ", ".join(nodes), str(job.gpus), job.state)
        console.print(table)

    def _show_trace(self, name: str) -> None:
        _say(
            f"the trace of {name}, which was retried: one trace id, a span from each service on its path (`berth trace {name}`)"
        )
        needed = {"gateway", "admission", "placement", "lifecycle", "node_agent"}

        def is_whole() -> bool:
            return needed <= {span.service for span in self.client.trace(self.ids[name])}

        _until("all spans have arrived", is_whole, seconds=15)
        from berth.telemetry.trace_store import render_trace

        console.print(render_trace(self.client.trace(self.ids[name]), width=console.width))

    def _verdict(self) -> int:
        wrong = []
        for job in self._jobs():
            expected = EXPECTED.get(job.name)
            if job.state is not expected:
                wrong.append(f"{job.name} is {job.state}, not {expected} ({job.message or job.summary})")
        flaky = self._job("flaky")
        if flaky.attempt != 2:
            wrong.append(f"flaky took {flaky.attempt} attempts, not 2")
        if self._job("train-characters").attempt != 1:
            wrong.append("the training job did not survive the agent's death on its first attempt")
        held = [gpu.uuid for gpu in self.client.gpus() if gpu.held_by]
        if held:
            wrong.append(f"{len(held)} GPUs are still held")
        if wrong:
            raise DemoFailed("; ".join(wrong))
        console.print("[green]every job ended as it should; nothing was lost, nothing is held[/]")
        return 0

    # --- reading ----------------------------------------------------------------------------------------------------

    def _job(self, name: str) -> JobView:
        return self.client.job(self.ids[name])

    def _jobs(self) -> list[JobView]:
        return [self.client.job(job_id) for job_id in self.ids.values()]

    def _log(self, name: str) -> str:
        return "".join(self.client.logs(self.ids[name]))


def _say(text: str) -> None:
    console.print(f"\n[bold]▸ {text}[/]")


def _until(what: str, holds: Callable[[], bool], *, seconds: float = PATIENCE_SECONDS) -> None:
    """Ask again until it holds.

    Raises:
        DemoFailed: it does not within `seconds`.
    """
    deadline = time.monotonic() + seconds
    trouble = ""
    while time.monotonic() < deadline:
        try:
            if holds():
                return
            trouble = ""
        except BerthError as error:
            trouble = f" ({error})"
        time.sleep(0.2)
    raise DemoFailed(f"after {seconds:.0f} s it is still not so that {what}{trouble}")
