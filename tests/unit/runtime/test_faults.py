import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from berth.runtime.faults import arm, fault_point, parse_fault_point


class Killed(Exception):
    """Stands for the death of the process."""


def die() -> None:
    raise Killed


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    arm(None)


async def test_only_the_named_point_counts_and_only_the_nth_passing_kills() -> None:
    arm("placement.before_commit:3", action=die)

    await fault_point("placement.before_commit")
    await fault_point("placement.after_commit")
    await fault_point("placement.before_commit")
    with pytest.raises(Killed):
        await fault_point("placement.before_commit")
    await fault_point("placement.before_commit")


async def test_nothing_happens_unless_armed() -> None:
    await fault_point("placement.before_commit")


@pytest.mark.parametrize("text", ["", ":3", "a:", "a:0", "a:-1", "A b", "a:1:2"])
def test_what_is_no_fault_point_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_fault_point(text)


def test_the_environment_arms_a_point_that_kills_without_cleanup() -> None:
    code = (
        "import asyncio, atexit; from berth.runtime.faults import fault_point\n"
        "atexit.register(print, 'cleanup')\n"
        "async def main():\n    for i in range(5):\n        print(i, flush=True)\n        await fault_point('x.y')\n"
        "asyncio.run(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "BERTH_FAULT_POINT": "x.y:2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1"]


def test_a_point_costs_next_to_nothing_when_not_armed() -> None:
    async def passes() -> float:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        for _ in range(20_000):
            await fault_point("placement.before_commit")
        return (loop.time() - begin) / 20_000

    assert min(asyncio.run(passes()) for _ in range(3)) < 2e-6
