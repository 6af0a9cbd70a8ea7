"""Service processes are started for real: what counts is what a supervisor sees."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

Start = Callable[..., "subprocess.Popen[str]"]

_PREAMBLE = """
import asyncio, time
from berth.runtime import process
from berth.runtime.process import ServiceContext, ServiceExit, run_service
from berth.runtime.settings import BerthSettings
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program that defines `main`; every started process is reaped at the end."""
    running: list[subprocess.Popen[str]] = []

    def begin(
        body: str, *, call: str = "run_service('demo', BerthSettings, main)", **environment: str
    ) -> "subprocess.Popen[str]":
        program = tmp_path / "program.py"
        program.write_text(_PREAMBLE + textwrap.dedent(body) + "\n" + call + "\n")
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BERTH_")}
        process = subprocess.Popen(
            [sys.executable, program],
            env={**clean, "PYTHONPATH": os.pathsep.join(sys.path), "BERTH_HOME": str(tmp_path / "home"), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def wait_for(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    for printed in process.stdout:
        if printed.strip() == line:
            return
    pytest.fail(f"never printed {line!r}: {process.communicate()[1]}")


def test_a_service_runs_reports_itself_and_stops_cleanly_when_told(start: Start, tmp_path: Path) -> None:
    process = start(
        """
        async def main(context: ServiceContext[BerthSettings]) -> None:
            try:
                context.started()
                print("up", flush=True)
                await asyncio.Event().wait()
            finally:
                print("cleaned up", flush=True)
        """
    )
    wait_for(process, "up")
    report = json.loads((tmp_path / "home" / "run" / "demo.json").read_text())
    assert httpx.get(f"http://127.0.0.1:{report['port']}/readyz", trust_env=False).status_code == 200

    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)

    assert process.returncode == 0
    assert "cleaned up" in out
    assert not (tmp_path / "home" / "run" / "demo.json").exists()
    assert [json.loads(line)["message"] for line in err.splitlines()] == [
        "service started",
        "stopping",
        "service ended",
    ]


def test_a_service_may_finish_its_step_before_it_stops(start: Start) -> None:
    process = start(
        """
        async def main(context):
            print("up", flush=True)
            await context.stopping.wait()
            await asyncio.sleep(0.05)
            print("step done", flush=True)
        """,
        call="run_service('demo', BerthSettings, main, drain_seconds=4)",
    )
    wait_for(process, "up")

    process.send_signal(signal.SIGINT)

    assert process.communicate(timeout=20)[0].strip() == "step done"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("work", "complaint"),
    [("raise ValueError('broken promise')", "ValueError: broken promise"), ("return", "CriticalTaskEnded: loop")],
)
def test_a_service_dies_when_a_critical_task_fails_or_ends(start: Start, work: str, complaint: str) -> None:
    process = start(
        f"""
        async def loop():
            await asyncio.sleep(0)
            {work}

        async def main(context):
            context.critical("loop", loop())
            await asyncio.Event().wait()
        """
    )

    _, err = process.communicate(timeout=20)

    assert process.returncode == 1
    crash = next(entry for entry in map(json.loads, err.splitlines()) if entry["message"] == "service crashed")
    assert crash["error"] == complaint
    assert "Traceback" in crash["stack"]


def test_background_work_may_end_and_goes_with_main(start: Start) -> None:
    process = start(
        """
        async def short(): pass
        async def endless(): await asyncio.Event().wait()

        async def main(context):
            await context.background("short", short())
            context.critical("endless", endless())
        """
    )

    process.communicate(timeout=20)

    assert process.returncode == 0


def test_a_service_chooses_its_exit_code(start: Start) -> None:
    process = start("async def main(context): raise ServiceExit(75, 'leadership lost')")

    _, err = process.communicate(timeout=20)

    assert process.returncode == 75
    assert "leadership lost" in err


def test_a_service_that_hangs_at_the_end_is_cut_off(start: Start) -> None:
    process = start(
        """
        process.STOP_SECONDS = 0.3

        async def main(context):
            try:
                print("up", flush=True)
                await asyncio.Event().wait()
            finally:
                time.sleep(60)
        """
    )
    wait_for(process, "up")

    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)

    assert process.returncode == 70
    assert "did not stop in time" in err


def test_a_bad_configuration_is_refused_before_anything_starts(start: Start, tmp_path: Path) -> None:
    process = start("async def main(context): print('ran')", BERTH_HTTP_PORT="x", BERTH_POOOL="y")

    out, err = process.communicate(timeout=20)

    assert process.returncode == 78
    assert out == ""
    assert [line.split(":")[1].strip() for line in err.splitlines()] == ["BERTH_HTTP_PORT", "BERTH_POOOL"]
    assert not (tmp_path / "home").exists()


def test_a_port_that_is_taken_is_a_crash_with_a_reason(start: Start) -> None:
    process = start(
        """
        import socket
        taken = socket.create_server(("127.0.0.1", 0))
        import os
        os.environ["BERTH_HTTP_PORT"] = str(taken.getsockname()[1])
        async def main(context): pass
        """
    )

    _, err = process.communicate(timeout=20)

    assert process.returncode == 1
    assert "address already in use" in err.lower()


def test_a_running_service_can_be_told_to_die_at_a_fault_point(start: Start, tmp_path: Path) -> None:
    process = start(
        """
        from berth.runtime.faults import fault_point

        async def main(context):
            print("up", flush=True)
            while True:
                await fault_point("demo.before_commit")
                await asyncio.sleep(0.001)
        """,
        BERTH_FAULTS_ON_SIGNAL="1",
    )
    wait_for(process, "up")
    (tmp_path / "home" / "run" / "demo.fault").write_text("demo.before_commit:2\n")

    process.send_signal(signal.SIGUSR1)

    assert process.wait(timeout=20) == -signal.SIGKILL
