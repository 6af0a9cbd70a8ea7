"""Runs one program each in a forked supervisor; the process behind it (the zygote) starts once per agent.

Starting a Python interpreter costs more CPU than most short jobs, so the agent starts this file once
(`python -I -S supervisor.py FD`) and asks it over a socket to fork. Each fork becomes the supervisor of one worker: it
owns the program, its log, its records and its lease deadline, and outlives both the agent and the zygote.

This file imports nothing of Berth and as little as possible of the standard library: its memory is shared by every
supervisor on the node, and its start is on the path of the first launch.

Files in a worker's directory (`dir` of the request):

    state        JSON, made by link(2), so it appears whole and only once; the program is let go after that, not before.
                 Whoever makes it first decides: a restarted agent that finds none makes a void one, and nothing starts.
    exit         JSON, by rename(2): how it ended. Never there before the last process of the worker is gone.
    stop         "GRACE_MILLISECONDS REASON", written by the agent before it signals the supervisor (SIGTERM).
    log.OFFSET   output of the program; OFFSET is the count of bytes written before this piece. Old pieces are dropped.

Nothing here is synced to disk: after a power loss no process is left, and the boot id in `state` says so.
"""

# pathlib would double the time to start, hence:
# ruff: noqa: PTH104, PTH108, PTH123, PTH208

import ctypes
import gc
import marshal
import os
import select
import signal
import sys
import time
from _socket import AF_UNIX, MSG_DONTWAIT, SOCK_SEQPACKET, socket

MAX_REQUEST_BYTES = 160 * 1024
LOG_READ_BYTES = 64 * 1024
QUIET_LOG_BYTES = 16 * 1024
"""A read below this means a chatty program of short lines: wait a moment and take more at once."""
QUIET_LOG_SECONDS = 0.01
LEFTOVER_GRACE_SECONDS = 2.0
"""What the main program leaves behind gets so long after SIGTERM."""
LEASE_CHECK_SECONDS = 10.0
"""Poll timers stand still while a machine sleeps, so the deadline is looked at this often at least."""
OOM_COUNT_STALE_SECONDS = 10.0
PROGRAM_OOM_SCORE_ADJ = b"300"
"""When memory runs out the kernel should take the program, not the agent or the supervisor."""

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36

libc = ctypes.CDLL(None, use_errno=True)
prctl = libc.prctl
prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]

ZYGOTE_NAME, SUPERVISOR_NAME = ctypes.c_char_p(b"berth-zygote"), ctypes.c_char_p(b"berth-worker")


def _name_process(name: ctypes.c_char_p) -> None:
    """As `ps -o comm` shows it; the arguments of a forked process are those of the first."""
    prctl(PR_SET_NAME, ctypes.cast(name, ctypes.c_void_p).value or 0, 0, 0, 0)


# What one request holds, in order (marshal, both ends are the same interpreter):
#   id, dir, cwd, argv, env, spec (JSON text, kept in `state` as it is), lease path, lease deadline (CLOCK_BOOTTIME ns,
#   0: none), lease grace ms, default grace ms, log piece bytes, boot id
Request = tuple[int, str, str, list[str], dict[str, str], str, str, int, int, int, int, str]


def start_ticks(pid: int) -> int:
    """When `pid` started, in clock ticks since boot (field 22 of /proc/PID/stat); pid and ticks name one process."""
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        stat = os.read(fd, 1024)
    finally:
        os.close(fd)
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def oom_kills() -> int:
    """Processes the kernel killed for memory since boot, in any control group; -1 if it does not say."""
    try:
        fd = os.open("/proc/vmstat", os.O_RDONLY)
    except OSError:
        return -1
    try:
        text = os.read(fd, 65536)
    finally:
        os.close(fd)
    at = text.find(b"oom_kill ")
    return int(text[at + 9 : text.index(b"\n", at)]) if at >= 0 else -1


def descendants(root: int) -> list[int]:
    """Every live process below `root`, parents before children; needs /proc/PID/task/TID/children."""
    found: list[int] = []
    pending = [root]
    while pending:
        pid = pending.pop()
        try:
            tasks = os.listdir(f"/proc/{pid}/task")
        except OSError:
            continue
        for task in tasks:
            try:
                with open(f"/proc/{pid}/task/{task}/children", "rb") as children:
                    below = [int(child) for child in children.read().split()]
            except OSError:
                continue
            found += below
            pending += below
    return found


def json_text(text: str) -> str:
    """A JSON string; enough for paths, reasons and error texts."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " else f"\\u{ord(c):04x}" for c in escaped) + '"'


def write_all(fd: int, data: bytes) -> None:
    """Write `data` whole; a full disk loses output rather than stopping the program."""
    while data:
        data = data[os.write(fd, data) :]


class RefusedError(Exception):
    """The program could not be started."""

    def __init__(self, code: int, stage: str) -> None:
        super().__init__(code, stage)
        self.code = code
        self.stage = stage


class Log:
    """The program's output, from a pipe into pieces of bounded size; the newest and the one before it are kept."""

    def __init__(self, directory: str, piece_bytes: int) -> None:
        self.directory = directory
        self.piece_bytes = piece_bytes
        self.written = 0
        self.starts: list[int] = [0]
        self.file = self._open(0)
        self.source, self.sink = os.pipe()
        os.set_blocking(self.source, False)
        self.is_open = True
        self.quiet_until = 0.0
        self.lost_bytes = 0

    def _open(self, start: int) -> int:
        return os.open(f"{self.directory}/log.{start}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)

    def close_sink(self) -> None:
        os.close(self.sink)

    def pump(self) -> bool:
        """Move what is there once; false when there was nothing to move."""
        try:
            data = os.read(self.source, LOG_READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.is_open = False
            return False
        try:
            if self.written + len(data) - self.starts[-1] > self.piece_bytes:
                self._next_piece()
            write_all(self.file, data)
            self.written += len(data)
        except OSError:
            self.lost_bytes += len(data)
        if len(data) < QUIET_LOG_BYTES:
            self.quiet_until = time.monotonic() + QUIET_LOG_SECONDS
        return True

    def _next_piece(self) -> None:
        fresh = self._open(self.written)
        os.close(self.file)
        self.file = fresh
        self.starts.append(self.written)
        while len(self.starts) > 2:
            os.unlink(f"{self.directory}/log.{self.starts.pop(0)}")

    def drain(self) -> None:
        """Take what is left without waiting: a process outside the worker may hold the pipe open for ever."""
        while self.is_open and self.pump():
            pass


class Supervisor:
    """One worker, from fork to exit record.

    running -> (main program ended, SIGTERM to what it left) leaving -> gone
    running -> (stop asked or lease run out, SIGTERM to the group) stopping -> gone
    leaving, stopping -> (grace over, SIGKILL to all, again and again) killing -> gone
    """

    def __init__(self, request: Request, conn: socket, oom_before: int) -> None:
        (
            self.request_id,
            self.dir,
            self.cwd,
            self.argv,
            self.env,
            self.spec,
            self.lease_path,
            self.lease_deadline_ns,
            self.lease_grace_ms,
            self.default_grace_ms,
            self.log_piece_bytes,
            self.boot_id,
        ) = request
        self.conn: socket | None = conn
        self.unsent: bytes = b""
        self.oom_before = oom_before
        self.pid = 0
        self.started_ns = 0
        self.status: int | None = None
        self.is_alone = False
        self.user_us = self.system_us = self.max_rss_kib = 0
        self.phase = "running"
        self.kill_at = 0.0
        self.kill_pause = 0.02
        self.stop_reason = ""
        self.used_sigkill = False
        self.leftovers = 0

    # -- start

    def run(self) -> None:
        try:
            self._start()
        except RefusedError as refused:
            try:
                self._write_exit(refused)
            except OSError:
                pass  # the directory itself may be what is wrong
            self._say((self.request_id, "refused", refused.code, refused.stage))
            self._flush_say()
            return
        self._say((self.request_id, "started", self.pid, self.ticks, self.own_pid, self.own_ticks, self.started_ns))
        self._watch()
        self.log.drain()
        self._write_exit(None)

    def _start(self) -> None:
        os.setsid()
        _name_process(SUPERVISOR_NAME)
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.wake, wake_in = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_in, False)
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        stage = "log"
        try:
            self.log = Log(self.dir, self.log_piece_bytes)
            stage = "fork"
            ours, theirs = os.pipe(), os.pipe()  # "go" to the child; an error number back, closed by a successful exec
            self.own_pid = os.getpid()
            self.own_ticks = start_ticks(self.own_pid)
            self.pid = os.fork()
            if self.pid == 0:
                self._become_program(ours[0], ours[1], theirs[1])
            os.close(ours[0])
            os.close(theirs[1])
            self.log.close_sink()
            stage = "record"
            self.started_ns = time.time_ns()
            self._write_state()
        except OSError as error:
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
            raise RefusedError(error.errno or 0, stage) from None
        os.write(ours[1], b"g")
        os.close(ours[1])
        answer = os.read(theirs[0], 64)
        os.close(theirs[0])
        if answer:
            code, _, stage_text = answer.decode().partition(" ")
            raise RefusedError(int(code), stage_text)

    def _become_program(self, go: int, go_in: int, error_out: int) -> None:
        """In the child: wait for the word, then turn into the program. Never returns."""
        stage = "exec"
        try:
            signal.set_wakeup_fd(-1)
            os.setpgid(0, 0)
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            os.close(go_in)
            if os.read(go, 1) != b"g" or os.getppid() != self.own_pid:
                os._exit(125)
            for number in (
                signal.SIGCHLD,
                signal.SIGTERM,
                signal.SIGINT,
                signal.SIGHUP,
                signal.SIGQUIT,
                signal.SIGPIPE,
                signal.SIGXFSZ,
            ):
                signal.signal(number, signal.SIG_DFL)
            try:
                fd = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
                os.write(fd, PROGRAM_OOM_SCORE_ADJ)
            except OSError:
                pass
            stage = "working directory"
            os.chdir(self.cwd)
            stage = "exec"
            os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
            os.dup2(self.log.sink, 1)
            os.dup2(self.log.sink, 2)
            self._exec()
        except OSError as error:
            os.write(error_out, f"{error.errno or 0} {stage}".encode())
        except BaseException as error:
            os.write(error_out, f"22 {stage}: {type(error).__name__}".encode()[:60])
        os._exit(127)

    def _exec(self) -> None:
        """execve with the lookup of execvp: a name without a slash is sought on the program's own PATH."""
        name = self.argv[0]
        if "/" in name:
            os.execve(name, self.argv, self.env)
        denied: OSError | None = None
        for folder in self.env.get("PATH", "/usr/bin:/bin").split(":"):
            try:
                os.execve(f"{folder or '.'}/{name}", self.argv, self.env)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except PermissionError as error:
                denied = error
        raise denied or FileNotFoundError(2, "not found on PATH", name)

    def _write_state(self) -> None:
        text = (
            f'{{"pid":{self.pid},"start_ticks":{self._program_ticks()},"supervisor_pid":{self.own_pid},'
            f'"supervisor_start_ticks":{self.own_ticks},"boot_id":{json_text(self.boot_id)},'
            f'"started_at_ns":{self.started_ns},"spec":{self.spec}}}\n'
        )
        draft = f"{self.dir}/state.{self.own_pid}"
        self._write_file(draft, text)
        try:
            os.link(draft, f"{self.dir}/state")
        finally:
            os.unlink(draft)

    def _program_ticks(self) -> int:
        self.ticks = start_ticks(self.pid)
        return self.ticks

    # -- watch

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self.wake, select.POLLIN)
        self._flush_say()
        if self.conn is not None:
            poller.register(self.conn.fileno(), select.POLLOUT)
        log_polled = False
        while True:
            now = time.monotonic()
            log_wanted = self.log.is_open and now >= self.log.quiet_until
            if log_wanted != log_polled:
                if log_wanted:
                    poller.register(self.log.source, select.POLLIN)
                else:
                    poller.unregister(self.log.source)
                log_polled = log_wanted
            for fd, _ in poller.poll(self._patience_ms(now)):
                if fd == self.wake:
                    self._on_signals(os.read(self.wake, 512))
                elif fd == self.log.source:
                    self.log.pump()
                elif self.conn is not None:
                    self._flush_say()
                    if self.conn is None:
                        poller.unregister(fd)
            self._on_time(time.monotonic())
            if self.is_alone:
                return

    def _patience_ms(self, now: float) -> int:
        wait = 3600.0
        if self.log.is_open and self.log.quiet_until > now:
            wait = self.log.quiet_until - now
        if self.phase != "running":
            wait = min(wait, self.kill_at - now)
        elif self.lease_deadline_ns:
            left = (self.lease_deadline_ns - time.clock_gettime_ns(time.CLOCK_BOOTTIME)) / 1e9
            wait = min(wait, left, LEASE_CHECK_SECONDS)
        return max(int(wait * 1000) + 1, 0)

    def _on_signals(self, numbers: bytes) -> None:
        if signal.SIGTERM in numbers:
            self._on_stop_asked()
        if signal.SIGCHLD in numbers:
            self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                self.is_alone = True
                return
            if pid == 0:
                break
            self.user_us += int(usage.ru_utime * 1e6)
            self.system_us += int(usage.ru_stime * 1e6)
            self.max_rss_kib = max(self.max_rss_kib, usage.ru_maxrss)
            if pid == self.pid:
                self.status = status
        if self.status is not None and self.phase == "running":
            self.leftovers = len(descendants(self.own_pid))
            self._begin_end("leaving", LEFTOVER_GRACE_SECONDS)

    def _on_stop_asked(self) -> None:
        grace_ms, reason = self.default_grace_ms, "signal"
        try:
            with open(f"{self.dir}/stop", "rb") as stop:
                number, _, text = stop.read(4096).decode().partition(" ")
                grace_ms, reason = int(number), text.strip()
        except (OSError, ValueError):
            pass
        self._stop(grace_ms, reason)

    def _stop(self, grace_ms: int, reason: str) -> None:
        if self.status is not None:
            return  # it ended by itself; what it left is on its way out already
        self.stop_reason = self.stop_reason or reason
        if self.phase == "running":
            self._begin_end("stopping", grace_ms / 1000)
        elif self.phase == "stopping":
            self.kill_at = min(self.kill_at, time.monotonic() + grace_ms / 1000)

    def _begin_end(self, phase: str, grace: float) -> None:
        """Ask politely: the whole group, and what has left the group when the main program is gone already."""
        self.phase = phase
        self.kill_at = time.monotonic() + grace
        targets = [-self.pid] if phase == "stopping" else [-self.pid, *descendants(self.own_pid)]
        for target in targets:
            for number in (signal.SIGCONT, signal.SIGTERM):
                self._signal(target, number)

    def _on_time(self, now: float) -> None:
        if self.phase == "running":
            if self.lease_deadline_ns and self._lease_ran_out():
                self._stop(self.lease_grace_ms, "lease")
        elif now >= self.kill_at:
            self.phase = "killing"
            self.used_sigkill = True
            self.kill_at = now + self.kill_pause
            self.kill_pause = min(self.kill_pause * 1.5, 1.0)
            if self.status is None:
                self._signal(-self.pid, signal.SIGKILL)
            for pid in descendants(self.own_pid):
                self._signal(pid, signal.SIGKILL)
            self._reap()

    def _lease_ran_out(self) -> bool:
        now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        if now_ns < self.lease_deadline_ns:
            return False
        try:
            with open(self.lease_path, "rb") as lease:
                deadline, grace_ms = lease.read(64).split()
            self.lease_deadline_ns = max(self.lease_deadline_ns, int(deadline))
            self.lease_grace_ms = int(grace_ms)
        except (OSError, ValueError):
            pass  # no word counts as no renewal
        return now_ns >= self.lease_deadline_ns

    @staticmethod
    def _signal(target: int, number: int) -> None:
        try:
            os.kill(target, number)
        except (ProcessLookupError, PermissionError):
            pass

    # -- words and records

    def _say(self, message: tuple[int | str, ...]) -> None:
        self.unsent = marshal.dumps(message)

    def _flush_say(self) -> None:
        """Tell the agent, then let go of the connection: once all have, the agent knows that no answer can come."""
        if self.conn is None:
            return
        try:
            self.conn.send(self.unsent, MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            pass  # the agent is gone; the records tell its successor
        self.conn.close()
        self.conn = None

    def _write_exit(self, refused: RefusedError | None) -> None:
        status = self.status
        code = os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else -1
        number = os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else 0
        out_of_memory = number == signal.SIGKILL and not self.used_sigkill and 0 <= self.oom_before < oom_kills()
        fields = (
            f'"exit_code":{code},"signal":{number},"started_at_ns":{self.started_ns},"ended_at_ns":{time.time_ns()},'
            f'"user_us":{self.user_us},"system_us":{self.system_us},"max_rss_kib":{self.max_rss_kib},'
            f'"out_of_memory":{"true" if out_of_memory else "false"},"stop_reason":{json_text(self.stop_reason)},'
            f'"used_sigkill":{"true" if self.used_sigkill else "false"},"leftovers":{self.leftovers}'
        )
        if refused is not None:
            fields += f',"refused_errno":{refused.code},"refused_stage":{json_text(refused.stage)}'
        else:
            fields += f',"log_bytes":{self.log.written},"log_lost_bytes":{self.log.lost_bytes}'
        draft = f"{self.dir}/exit.{os.getpid()}"
        self._write_file(draft, f"{{{fields}}}\n")
        os.rename(draft, f"{self.dir}/exit")

    @staticmethod
    def _write_file(path: str, text: str) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640)
        try:
            write_all(fd, text.encode())
        finally:
            os.close(fd)


def serve(conn: socket) -> None:
    """The zygote: fork for each request until the agent goes away."""
    _name_process(ZYGOTE_NAME)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are not waited for; their agent watches them
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    oom_seen, oom_seen_at = oom_kills(), time.monotonic()
    gc.collect()
    gc.disable()
    gc.freeze()  # no collector run may touch, and so copy, the pages that all supervisors share
    while True:
        data = conn.recv(MAX_REQUEST_BYTES)
        if not data:
            return
        now = time.monotonic()
        if now - oom_seen_at > OOM_COUNT_STALE_SECONDS:
            oom_seen, oom_seen_at = oom_kills(), now
        try:
            pid = os.fork()
        except OSError as error:
            conn.send(marshal.dumps((marshal.loads(data)[0], "refused", error.errno or 0, "fork")))
            continue
        if pid == 0:
            code = 1
            try:
                Supervisor(marshal.loads(data), conn, oom_seen).run()
                code = 0
            except BaseException:  # a defect, a full disk: the program dies with this process
                sys.excepthook(*sys.exc_info())
                if conn.fileno() >= 0:
                    conn.send(marshal.dumps((marshal.loads(data)[0], "failed")))
            finally:
                os._exit(code)


if __name__ == "__main__":
    serve(socket(AF_UNIX, SOCK_SEQPACKET, 0, int(sys.argv[1])))
