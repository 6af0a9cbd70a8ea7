import json
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.integration.examples.conftest import Run


def announced_port(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """The port in the first line a program prints, and that line."""
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.search(r"127\.0\.0\.1:(\d+)", line)
    assert match is not None, line
    return int(match[1]), line


def get(url: str, data: bytes | None = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, data, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_array_tasks_count_the_primes_of_their_slices(run: Run) -> None:
    tasks = [run("batch/primes.py", BERTH_ARRAY_INDEX="0"), run("batch/primes.py", "1")]

    outputs = [task.communicate(timeout=60)[0] for task in tasks]

    counts = [int(re.findall(r"(\d+) primes", output)[0]) for output in outputs]
    assert counts[0] == 1270607
    assert sum(counts) == 2433654


def test_a_notebook_keeps_state_asks_for_its_token_and_saves_its_history(run: Run, tmp_path: Path) -> None:
    session = run("notebook/session.py", NOTEBOOK_TOKEN="t0ken", BERTH_CKPT_DIR=str(tmp_path))
    port, _ = announced_port(session)

    assert cells(port, "wrong", "1") == ["not the token", ""]
    assert cells(port, "t0ken", "x = 20", "x + 1", "1 / 0") == [
        "ready",
        "",
        "",
        "21",
        "",
        "ZeroDivisionError: division by zero",
        "",
    ]
    assert cells(port, "t0ken", "x") == ["ready", "", "20", ""]

    session.send_signal(signal.SIGTERM)
    assert "saved 4 cells" in session.communicate(timeout=20)[0]
    assert session.returncode == 0
    assert (tmp_path / "history.txt").read_text().splitlines() == ["x = 20", "x + 1", "1 / 0", "x"]


def cells(port: int, token: str, *lines: str) -> list[str]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall("".join(f"{line}\n" for line in (token, *lines)).encode())
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile() as answers:
            return answers.read().splitlines()


def test_a_model_server_is_unhealthy_until_loaded_then_predicts_and_drains(run: Run) -> None:
    server = run("server/serve.py", "--load-seconds", "0.3", "--work-milliseconds", "200", "--version", "2")
    port, _ = announced_port(server)
    base = f"http://127.0.0.1:{port}"

    assert get(f"{base}/healthz")[0] == 503
    assert get(f"{base}/v1/predict", b"x")[0] == 503
    deadline = time.monotonic() + 20
    while get(f"{base}/healthz")[0] != 200:
        assert time.monotonic() < deadline

    status, body = get(f"{base}/v1/predict", b"wo ist der bahnhof")
    assert status == 200
    assert next(iter(json.loads(body)["languages"])) == "german"
    assert json.loads(body)["version"] == "2"
    assert "requests_total 1" in get(f"{base}/metrics")[1]
    assert get(f"{base}/v1/predict", b"x" * 70_000)[0] == 413
    assert get(f"{base}/nothing")[0] == 404

    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi")
        while "requests_running 1" not in get(f"{base}/metrics")[1]:
            assert time.monotonic() < deadline
        server.send_signal(signal.SIGTERM)
        with connection.makefile() as answer:
            assert answer.readline().startswith("HTTP/1.1 200")
    assert "served 2 requests" in server.communicate(timeout=20)[0]
    assert server.returncode == 0
