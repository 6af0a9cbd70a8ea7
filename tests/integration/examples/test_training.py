import json
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.examples.conftest import Run

PROGRAM = "training/train.py"
QUICK = ("--batch", "64", "--report-every", "10", "--sample", "0")


def finished(process: "subprocess.Popen[str]", code: int = 0) -> str:
    """The program's output once it has left with `code`."""
    output = process.communicate(timeout=60)[0]
    assert process.returncode == code, output
    return output


def losses_in(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


def checksum_in(output: str) -> str:
    match = re.search(r"weights ([0-9a-f]{8})", output)
    assert match is not None, output
    return match[1]


def read_until(process: "subprocess.Popen[str]", words: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    pytest.fail(f"never said {words!r}")


def gang_of_two(run: Run, port: int, *arguments: str, **environment: str) -> list["subprocess.Popen[str]"]:
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
    return [run(PROGRAM, *QUICK, *arguments, RANK=str(rank), **shared) for rank in (0, 1)]


def test_the_loss_falls_and_a_gang_of_two_agrees_on_the_model(run: Run, free_port: Callable[[], int]) -> None:
    alone = finished(run(PROGRAM, *QUICK, "--steps", "150"))
    first, second = (finished(worker) for worker in gang_of_two(run, free_port(), "--steps", "150"))

    losses = losses_in(first)
    assert losses[0] > 4.4
    assert losses[-1] < 3.3
    assert checksum_in(first) == checksum_in(second)
    # The same batches, only summed in another order.
    assert losses == pytest.approx(losses_in(alone), rel=0.02)


def test_a_run_asked_to_leave_saves_answers_and_resumes_exactly_where_it_was(run: Run, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps({"id": "r1", "kind": "save_and_exit"}))
    steps = (*QUICK, "--steps", "60")
    environment = {"BERTH_CKPT_DIR": str(tmp_path / "ckpt")}

    finished(run(PROGRAM, *steps, BERTH_CKPT_CONTROL=str(tmp_path), **environment), code=85)
    resumed = finished(run(PROGRAM, *steps, **environment))

    ack = json.loads((tmp_path / "ack.json").read_text())
    assert (ack["request"], ack["status"], ack["step"]) == ("r1", "saved", 1)
    assert f"resuming from {ack['manifest']}" in resumed
    assert checksum_in(resumed) == checksum_in(finished(run(PROGRAM, *steps)))


def test_a_whole_gang_stops_at_one_step_when_one_worker_is_told_to(
    run: Run, free_port: Callable[[], int], tmp_path: Path
) -> None:
    port = free_port()
    first, second = gang_of_two(run, port, "--steps", "100000", BERTH_CKPT_DIR=str(tmp_path))
    read_until(first, "step    10")

    second.send_signal(signal.SIGTERM)
    told = [re.findall(r"stopping at step (\d+)", finished(worker, code=85)) for worker in (first, second)]

    assert told[0] == told[1]
    (manifest,) = (
        path for path in tmp_path.glob("*/manifest.json") if json.loads(path.read_text())["step"] == int(told[0][0])
    )
    assert manifest.exists()
    resumed = gang_of_two(run, free_port(), "--steps", str(int(told[0][0]) + 10), BERTH_CKPT_DIR=str(tmp_path))
    outputs = [finished(worker) for worker in resumed]
    assert all(f"from step {told[0][0]}" in output for output in outputs)


def test_a_failed_attempt_is_continued_from_its_last_checkpoint(run: Run, tmp_path: Path) -> None:
    arguments = (*QUICK, "--steps", "60", "--checkpoint-every", "20", "--fail-at-step", "50", "--fail-once")
    environment = {"BERTH_CKPT_DIR": str(tmp_path), "BERTH_FENCE": "7"}

    finished(run(PROGRAM, *arguments, BERTH_ATTEMPT="1", **environment), code=1)
    again = finished(run(PROGRAM, *arguments, BERTH_ATTEMPT="2", **environment))

    assert "from step 40" in again
    assert checksum_in(again) == checksum_in(finished(run(PROGRAM, *QUICK, "--steps", "60")))
    manifest = json.loads((tmp_path / "step-0000060" / "manifest.json").read_text())
    assert (manifest["step"], manifest["fence"]) == (60, 7)
    assert manifest["files"] == {"model.npz": (tmp_path / "step-0000060" / "model.npz").stat().st_size}


def test_checkpoints_that_are_not_whole_do_not_exist(run: Run, tmp_path: Path) -> None:
    arguments = (*QUICK, "--checkpoint-every", "10")
    finished(run(PROGRAM, *arguments, "--steps", "30", BERTH_CKPT_DIR=str(tmp_path)))
    (tmp_path / "step-0000030" / "model.npz").write_bytes(b"half")
    (tmp_path / "step-0000020" / "manifest.json").unlink()

    resumed = finished(run(PROGRAM, *arguments, "--steps", "40", BERTH_CKPT_DIR=str(tmp_path)))

    assert "from step 10" in resumed
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == ["step-0000020", "step-0000030", "step-0000040"]


def test_a_request_to_save_is_answered_and_the_run_goes_on(run: Run, tmp_path: Path) -> None:
    control, checkpoints = tmp_path / "control", tmp_path / "ckpt"
    control.mkdir()
    (control / "request.json").write_text(json.dumps({"id": "r1", "kind": "save"}))

    output = finished(
        run(PROGRAM, *QUICK, "--steps", "20", BERTH_CKPT_DIR=str(checkpoints), BERTH_CKPT_CONTROL=str(control))
    )

    ack = json.loads((control / "ack.json").read_text())
    assert (ack["request"], ack["status"], ack["step"]) == ("r1", "saved", 1)
    assert Path(ack["manifest"]).is_file()
    assert "done" in output


def test_a_gang_whose_worker_dies_ends_as_failed(run: Run, free_port: Callable[[], int]) -> None:
    first, second = gang_of_two(run, free_port(), "--steps", "100000")
    read_until(first, "step    10")

    second.kill()

    assert "lost the gang" in finished(first, code=1)


def test_an_incomplete_gang_that_is_told_to_go_does_not_wait(run: Run, free_port: Callable[[], int]) -> None:
    lonely = run(PROGRAM, RANK="1", WORLD_SIZE="2", MASTER_PORT=str(free_port()))
    waiting = run(PROGRAM, RANK="0", WORLD_SIZE="2", MASTER_PORT=str(free_port()))
    for worker in (lonely, waiting):
        read_until(worker, "waiting for")
        worker.send_signal(signal.SIGTERM)

    assert "before the start" in finished(lonely, code=85)
    assert "before the start" in finished(waiting, code=85)
