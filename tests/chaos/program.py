"""The job of the chaos campaign: holds its cards for a while and keeps a record that Berth has no part in.

`python -I -S program.py RECORDS SECONDS VARIANT`, about 15 ms of CPU. It writes to `RECORDS/<job>.log`, one line of JSON
for each thing that happened to it, and holds an exclusive lock on `RECORDS/<GPU UUID>.lock` while it lives. The kernel
gives such a lock back when its holder dies in any way, so a lock that is not to be had means two programs on one card.
In the same way `<job>.<worker>.lock` tells that an earlier attempt still runs.

Variants: `plain`; `fail_once` (the first attempt ends with 3); `fail` (every attempt does); `stubborn` (goes on for a
moment after SIGTERM); `deaf` (the first attempt never ends at SIGTERM, later ones take a second).
"""

import fcntl
import os
import signal
import sys
import time
from typing import NoReturn

# pathlib and json would cost more than all the rest, hence:

EXIT_FAILED = 3
EXIT_TERMINATED = 143
EXIT_TAKEN = 4
STUBBORN_SECONDS = 1.0


class Terminated(BaseException):
    """SIGTERM came."""


def on_term(*_: object) -> None:
    raise Terminated


def main() -> NoReturn:
    records, seconds, variant = sys.argv[1], float(sys.argv[2]), sys.argv[3]
    env = os.environ
    who = (
        f'"job":"{env["BERTH_JOB_ID"]}","attempt":{env["BERTH_ATTEMPT"]},"worker":{env["BERTH_WORKER"]},'
        f'"fence":{env["BERTH_FENCE"]},"node":"{env["BERTH_NODE"]}","pid":{os.getpid()}'
    )
    gpus = [uuid for uuid in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if uuid]
    journal = os.open(f"{records}/{env['BERTH_JOB_ID']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(what: str, more: str = "") -> None:
        now = f'"ns":{time.monotonic_ns()},"wall_ns":{time.time_ns()}'
        os.write(journal, f'{{"what":"{what}",{who},{now}{more}}}\n'.encode())

    def leave(code: int) -> NoReturn:
        note("end", f',"code":{code}')  # before the locks go with the process
        os._exit(code)

    signal.signal(signal.SIGTERM, on_term)
    try:
        note("start", ',"gpus":[' + ",".join(f'"{uuid}"' for uuid in gpus) + "]")
        if variant == "deaf":
            if env["BERTH_ATTEMPT"] == "1":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            else:
                seconds = 1.0
        names = [f"{env['BERTH_JOB_ID']}.{env['BERTH_WORKER']}", *sorted(gpus)]
        locks = [(name, os.open(f"{records}/{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)) for name in names]
        for name, lock in locks:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(lock, 400).decode().replace('"', "'").strip()
                note("taken", f',"lock":"{name}","holder":"{holder}"')
                leave(EXIT_TAKEN)
            os.ftruncate(lock, 0)
            os.write(lock, f"{{{who}}}".encode())
        print(f"attempt {env['BERTH_ATTEMPT']} on {len(gpus)} cards", flush=True)
        time.sleep(seconds)
    except Terminated:
        if variant == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            note("stubborn")
            time.sleep(STUBBORN_SECONDS)
        leave(EXIT_TERMINATED)
    leave(EXIT_FAILED if variant == "fail" or (variant == "fail_once" and env["BERTH_ATTEMPT"] == "1") else 0)


main()
