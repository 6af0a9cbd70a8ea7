"""Train a small language model on the sources of Python itself.

A real training run that any machine can do: numpy only, nothing downloaded, about twenty seconds on one core. It reads
the standard library's source text, learns to predict the next character, and its loss falls from 4.6 to about 2.

It behaves as a well-mannered job on a shared cluster should:

- **gang**: with WORLD_SIZE > 1 every worker computes its share of each batch and gradients are summed over TCP, so all
  workers hold the same model at every step;
- **checkpoints**: written to BERTH_CKPT_DIR under a temporary name, renamed, and declared complete by `manifest.json`,
  which is written last; a directory without one does not exist;
- **resume**: from BERTH_RESUME_FROM or the newest valid manifest; the run continues exactly as if never stopped;
- **preemption**: on SIGTERM, or a request in BERTH_CKPT_CONTROL, all workers agree on one step, save and exit with 85.

Run it alone: `python examples/training/train.py`, or see `--help`.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

# One thread per worker unless told otherwise: workers share the machine, and matrices so small gain nothing from more.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

EXIT_CHECKPOINTED: Final = 85
KEEP_CHECKPOINTS: Final = 3
RENDEZVOUS_SECONDS: Final = 60.0
PEER_SECONDS: Final = 60.0

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


# --- the text ---------------------------------------------------------------------------------------------------------

SOURCES: Final = ("argparse", "ast", "calendar", "datetime", "decimal", "difflib", "doctest", "heapq", "inspect", "pdb")
ALPHABET: Final = "\n" + "".join(chr(code) for code in range(32, 127)) + "?"  # the last stands for any other


def load_text() -> Ints:
    """The standard library's own sources as indices into ALPHABET (about half a million characters)."""
    library = Path(os.__file__).parent
    files = [path for name in SOURCES for path in (library / f"{name}.py", library / f"_py{name}.py") if path.is_file()]
    files = files or sorted(library.glob("*.py"))[:20]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    table = np.full(0x110000, len(ALPHABET) - 1, dtype=np.int64)
    table[[ord(character) for character in ALPHABET[:-1]]] = np.arange(len(ALPHABET) - 1)
    return table[np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)]


# --- the model --------------------------------------------------------------------------------------------------------


class CharacterModel:
    """Predicts a character from the `context` before it: embedding, one hidden layer, softmax; trained with Adam.

    All parameters live in one flat vector, and so do their gradients and moments: that is what is summed between
    workers and saved.
    """

    def __init__(self, *, context: int = 12, embedding: int = 16, hidden: int = 160, seed: int = 0) -> None:
        size = len(ALPHABET)
        self.context = context
        self._shapes = {
            "embed": (size, embedding),
            "w1": (context * embedding, hidden),
            "b1": (hidden,),
            "w2": (hidden, size),
            "b2": (size,),
        }
        total = sum(int(np.prod(shape)) for shape in self._shapes.values())
        self.weights: Floats = np.zeros(total, dtype=np.float32)
        self.moment1: Floats = np.zeros_like(self.weights)
        self.moment2: Floats = np.zeros_like(self.weights)
        rng = np.random.default_rng(seed)
        for name, view in self._views(self.weights).items():
            if not name.startswith("b"):
                view[...] = rng.normal(0, 1 / np.sqrt(view.shape[0] if name != "embed" else embedding), view.shape)

    def gradient(self, inputs: Ints, targets: Ints) -> tuple[float, Floats]:
        """Summed cross-entropy over the rows of `inputs` (count x context), in nats, and its gradient."""
        weights = self._views(self.weights)
        flat: Floats = np.zeros_like(self.weights)
        grads = self._views(flat)
        count = len(inputs)
        x = weights["embed"][inputs].reshape(count, -1)
        hidden = np.tanh(x @ weights["w1"] + weights["b1"])
        probabilities = _softmax(hidden @ weights["w2"] + weights["b2"])
        rows = np.arange(count)
        loss = float(-np.log(probabilities[rows, targets] + 1e-9).sum())
        probabilities[rows, targets] -= 1
        grads["w2"][...] = hidden.T @ probabilities
        grads["b2"][...] = probabilities.sum(0)
        back = (probabilities @ weights["w2"].T) * (1 - hidden * hidden)
        grads["w1"][...] = x.T @ back
        grads["b1"][...] = back.sum(0)
        into = (back @ weights["w1"].T).reshape(count * self.context, -1)
        # One matrix product instead of np.add.at, which is ten times slower here.
        one_hot = np.zeros((count * self.context, len(ALPHABET)), dtype=np.float32)
        one_hot[np.arange(count * self.context), inputs.reshape(-1)] = 1
        grads["embed"][...] = one_hot.T @ into
        return loss, flat

    def update(self, gradient: Floats, *, step: int, rate: float) -> None:
        """One Adam step (Kingma and Ba 2015, algorithm 1); `step` counts from 1."""
        self.moment1 += 0.1 * (gradient - self.moment1)
        self.moment2 += 0.01 * (gradient * gradient - self.moment2)
        mean, spread = self.moment1 / (1 - 0.9**step), self.moment2 / (1 - 0.99**step)
        self.weights -= (rate * mean / (np.sqrt(spread) + 1e-8)).astype(np.float32)

    def sample(self, prompt: str, length: int, *, seed: int) -> str:
        """Continue `prompt` by `length` characters."""
        rng = np.random.default_rng(seed)
        written = [max(ALPHABET.find(character), 0) for character in prompt.rjust(self.context)]
        weights = self._views(self.weights)
        for _ in range(length):
            x = weights["embed"][written[-self.context :]].reshape(1, -1)
            hidden = np.tanh(x @ weights["w1"] + weights["b1"])
            chances = _softmax((hidden @ weights["w2"] + weights["b2"]) * 1.4)[0].astype(np.float64)
            written.append(int(rng.choice(len(chances), p=chances / chances.sum())))
        return "".join(ALPHABET[index] for index in written[self.context :])

    def _views(self, flat: Floats) -> dict[str, Floats]:
        views, start = {}, 0
        for name, shape in self._shapes.items():
            size = int(np.prod(shape))
            views[name] = flat[start : start + size].reshape(shape)
            start += size
        return views


def _softmax(logits: Floats) -> Floats:
    logits = logits - logits.max(1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(1, keepdims=True)
    return logits


def batch_at(text: Ints, step: int, *, size: int, context: int, seed: int) -> tuple[Ints, Ints]:
    """The batch of one step. It depends on the step alone, so a resumed run sees what it would have seen."""
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - context, size)
    return text[starts[:, None] + np.arange(context)], text[starts + context]


# --- the gang ---------------------------------------------------------------------------------------------------------


class Unwanted(Exception):
    """The platform wants the room before the work has begun."""


class Gang:
    """Sums vectors over all workers. Worker 0 listens; the others send it theirs and get the sum back.

    A star is enough for vectors of 200 kB and a handful of workers; a ring would pay off from megabytes on. Frames have
    a fixed size, so nothing that is received is ever interpreted as code.
    """

    _HELLO: Final = struct.Struct("!4sIII")

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._peers: list[socket.socket] = []

    def meet(self, address: str, port: int, *, session: int, is_unwanted: Callable[[], bool]) -> None:
        """Wait until all workers are connected.

        Args:
            session: the same for all workers of one attempt; one left over from an older attempt is turned away.
            is_unwanted: asked now and then; ends the wait.

        Raises:
            Unwanted: the gang was told to go before it was complete.
        """
        if self.size == 1:
            return
        say(f"worker {self.rank} of {self.size}: waiting for the others at {address}:{port}")
        deadline = time.monotonic() + RENDEZVOUS_SECONDS

        def check() -> None:
            if is_unwanted():
                raise Unwanted
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gang was not complete after {RENDEZVOUS_SECONDS:.0f} s")

        if self.rank == 0:
            self._accept_all(address, port, session, check)
        else:
            self._join(address, port, session, check)

    def sum(self, vector: Floats) -> Floats:
        """The sum of every worker's `vector`, bit for bit the same on each; all must call it."""
        if self.size == 1:
            return vector
        if self.rank > 0:
            self._peers[0].sendall(vector.tobytes())
            return self._receive(self._peers[0], len(vector))
        total = vector.copy()
        for peer in self._peers:
            total += self._receive(peer, len(vector))
        for peer in self._peers:
            peer.sendall(total.tobytes())
        return total

    def from_first(self, vector: Floats) -> Floats:
        """Worker 0's `vector`, on every worker."""
        return self.sum(vector if self.rank == 0 else np.zeros_like(vector))

    def close(self) -> None:
        for peer in self._peers:
            peer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_all(self, address: str, port: int, session: int, check: Callable[[], None]) -> None:
        # The own address if it is one of this machine's, else (address translation) all of them.
        try:
            server = socket.create_server((address, port))
        except OSError:
            server = socket.create_server(("", port))
        found: dict[int, socket.socket] = {}
        server.settimeout(0.2)
        with server:
            while len(found) < self.size - 1:
                check()
                try:
                    peer, _ = server.accept()
                except TimeoutError:
                    continue
                rank = self._rank_of(peer, session)
                if rank is None or rank in found:
                    peer.close()
                else:
                    found[rank] = peer
        # In order of rank: floating-point sums depend on it.
        self._peers = [found[rank] for rank in sorted(found)]

    def _rank_of(self, peer: socket.socket, session: int) -> int | None:
        """The rank of whoever has connected; None if it is none of ours."""
        peer.settimeout(PEER_SECONDS)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            magic, rank, size, theirs = self._HELLO.unpack(_exactly(peer, self._HELLO.size))
        except OSError:
            return None
        return int(rank) if (magic, size, theirs) == (b"brth", self.size, session) and 0 < rank < size else None

    def _join(self, address: str, port: int, session: int, check: Callable[[], None]) -> None:
        while not self._peers:
            check()
            try:
                self._peers = [socket.create_connection((address, port), timeout=5)]
            except OSError:
                time.sleep(0.05)  # worker 0 may start later than we
        peer = self._peers[0]
        peer.settimeout(PEER_SECONDS)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(self._HELLO.pack(b"brth", self.rank, self.size, session))

    @staticmethod
    def _receive(peer: socket.socket, length: int) -> Floats:
        return np.frombuffer(_exactly(peer, length * 4), dtype=np.float32).copy()


def _exactly(peer: socket.socket, count: int) -> bytes:
    parts = []
    while count:
        part = peer.recv(min(count, 1 << 20))
        if not part:
            raise ConnectionError("a worker of the gang has left")
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def save_checkpoint(root: Path, model: CharacterModel, step: int, *, fence: int) -> Path:
    """Write the state after `step` steps; returns the manifest's path. Doing it again is harmless."""
    target = root / f"step-{step:07d}"
    manifest = target / "manifest.json"
    if is_valid(manifest):
        return manifest
    shutil.rmtree(target, ignore_errors=True)  # without a valid manifest it does not exist
    temporary = root / f".{target.name}.{os.getpid()}"
    temporary.mkdir(parents=True)
    with (temporary / "model.npz").open("wb") as file:
        np.savez(file, step=step, weights=model.weights, moment1=model.moment1, moment2=model.moment2)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(target)
    size = (target / "model.npz").stat().st_size
    created = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(manifest, {"step": step, "files": {"model.npz": size}, "fence": fence, "created": created})
    for old in sorted(root.glob("step-*"))[:-KEEP_CHECKPOINTS]:
        shutil.rmtree(old, ignore_errors=True)
    return manifest


def is_valid(manifest: Path) -> bool:
    """Whether every file that `manifest` names is there in full."""
    try:
        files = json.loads(manifest.read_text())["files"]
        return all((manifest.parent / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def newest_checkpoint(root: Path | None, asked: str) -> Path | None:
    """The manifest to resume from: the one `asked` for if valid, else the newest valid one below `root`."""
    if asked:
        path = Path(asked)
        path = path / "manifest.json" if path.is_dir() else path
        if is_valid(path):
            return path
        say(f"cannot resume from {asked}: no valid manifest")
    found = sorted(root.glob("step-*/manifest.json"), reverse=True) if root is not None else []
    return next((manifest for manifest in found if is_valid(manifest)), None)


def load_checkpoint(manifest: Path, model: CharacterModel) -> int:
    """Fill `model` from a checkpoint; returns its step."""
    with np.load(manifest.parent / "model.npz", allow_pickle=False) as saved:
        model.weights, model.moment1, model.moment2 = saved["weights"], saved["moment1"], saved["moment2"]
        return int(saved["step"])


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write whole or not at all: readers never see half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


class Requests:
    """What the platform asks of this worker: SIGTERM, or `request.json` in the control directory."""

    NOTHING, SAVE, SAVE_AND_EXIT = range(3)

    def __init__(self, control: Path | None) -> None:
        self._control = control
        self._seen_ns = 0
        self._is_terminated = False
        self._is_save_wanted = False
        self._request_id: object = None
        self._asked = 0.0
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, *_: object) -> None:
        self._is_terminated = True

    def pending(self) -> int:
        """What is asked for now; a look at one file's time, so it can be called at every step."""
        if self._control is not None:
            path = self._control / "request.json"
            try:
                changed_ns = path.stat().st_mtime_ns
                if changed_ns != self._seen_ns:
                    request = json.loads(path.read_text())
                    self._seen_ns = changed_ns
                    self._request_id, self._asked = request["id"], time.monotonic()
                    self._is_save_wanted = request.get("kind") == "save"
                    self._is_terminated = self._is_terminated or not self._is_save_wanted
            except (OSError, ValueError, KeyError):
                pass  # no request
        if self._is_terminated:
            return self.SAVE_AND_EXIT
        return self.SAVE if self._is_save_wanted else self.NOTHING

    def answer(self, manifest: Path | None, step: int) -> None:
        """Tell the platform that the request was met (`manifest` None: nothing to save to)."""
        self._is_save_wanted = False
        if self._control is not None and self._request_id is not None:
            status = "skipped" if manifest is None else "saved"
            seconds = round(time.monotonic() - self._asked, 3)
            content = {"request": self._request_id, "status": status, "step": step, "seconds": seconds}
            write_json(self._control / "ack.json", {**content, "manifest": str(manifest) if manifest else None})
            self._request_id = None


# --- the run ----------------------------------------------------------------------------------------------------------


def say(line: str) -> None:
    """At once, so that whoever follows the log sees it."""
    print(line, flush=True)


def train(options: argparse.Namespace, gang: Gang, requests: Requests) -> int:
    """Train to the end, or to where the platform wants the room; returns the exit code."""
    text = load_text()
    model = CharacterModel(seed=options.seed)
    first = resume(options, gang, model)
    say(f"worker {gang.rank} of {gang.size}: {len(text)} characters, {len(model.weights)} weights, from step {first}")
    began, shown = time.monotonic(), first
    losses: list[float] = []
    for step in range(first + 1, options.steps + 1):
        inputs, targets = batch_at(text, step, size=options.batch, context=model.context, seed=options.seed)
        loss, gradient = model.gradient(inputs[gang.rank :: gang.size], targets[gang.rank :: gang.size])
        # The loss and each worker's wish to stop travel with the gradient: all see the same, so all stop together.
        wish = requests.pending()
        tail = np.array([loss, wish == requests.SAVE, wish == requests.SAVE_AND_EXIT], dtype=np.float32)
        total = gang.sum(np.concatenate([gradient, tail]))
        mean_loss, save, leave = float(total[-3]) / options.batch, total[-2] > 0, total[-1] > 0
        rate = options.rate * min(1.0, step / 50) * (1 - 0.9 * step / options.steps)
        model.update(total[:-3] / options.batch, step=step, rate=rate)
        losses.append(mean_loss)
        if step % options.report_every == 0 or step in {first + 1, options.steps}:
            speed = (step - shown) * options.batch / max(time.monotonic() - began, 1e-6)
            began, shown = time.monotonic(), step
            if gang.rank == 0:
                say(f"step {step:5d}/{options.steps}  loss {sum(losses) / len(losses):.4f}  {speed:7.0f} characters/s")
            losses.clear()
        if step == options.fail_at_step:
            fail_maybe(options, gang.rank)
        if leave or save or step == options.steps or step % options.checkpoint_every == 0:
            manifest = None
            if options.checkpoints is not None:
                if gang.rank == 0:
                    manifest = save_checkpoint(options.checkpoints, model, step, fence=options.fence)
                gang.sum(np.zeros(1, dtype=np.float32))  # nobody reports or leaves before it is written
                manifest = manifest or options.checkpoints / f"step-{step:07d}" / "manifest.json"
            if leave or save:
                requests.answer(manifest, step)
        if leave and step < options.steps:
            say(f"worker {gang.rank}: stopping at step {step}, {'checkpointed' if manifest else 'nothing to save to'}")
            return EXIT_CHECKPOINTED
    say(f"worker {gang.rank}: done, weights {checksum(model.weights)}")
    if gang.rank == 0:
        say("it writes:\n" + model.sample("    def __init__(self", options.sample, seed=options.seed))
    return 0


def resume(options: argparse.Namespace, gang: Gang, model: CharacterModel) -> int:
    """Give every worker worker 0's state: the newest checkpoint if there is one. Returns the steps already done."""
    step = 0
    if gang.rank == 0:
        manifest = newest_checkpoint(options.checkpoints, options.resume_from)
        if manifest is not None:
            step = load_checkpoint(manifest, model)
            say(f"resuming from {manifest}")
    state = np.concatenate([model.weights, model.moment1, model.moment2, [np.float32(step)]], dtype=np.float32)
    state = gang.from_first(state)  # steps are exact in float32 up to 16 million
    model.weights, model.moment1, model.moment2 = (part.copy() for part in np.split(state[:-1], 3))
    return int(state[-1])


def fail_maybe(options: argparse.Namespace, rank: int) -> None:
    """Play a crash: for showing what a retry does."""
    if rank != 0:
        return
    if options.fail_once:
        attempt = os.environ.get("BERTH_ATTEMPT")
        marker = None if options.checkpoints is None else options.checkpoints / ".failed-once"
        if (attempt is not None and attempt != "1") or (attempt is None and marker is not None and marker.exists()):
            return
        if marker is not None:
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    say(f"worker {rank}: failing at step {options.fail_at_step}, as asked")
    raise SystemExit(1)


def checksum(weights: Floats) -> str:
    """A short name for the exact state: workers that agree print the same."""
    return f"{zlib.crc32(weights.tobytes()):08x}"


@contextlib.contextmanager
def lost_peers_reported(rank: int) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, TimeoutError) as error:
        say(f"worker {rank}: lost the gang: {error}")
        raise SystemExit(1) from None


def parse_options(arguments: list[str]) -> argparse.Namespace:
    """Command line first, then what the platform says in the environment, then defaults."""
    directory = os.environ.get("BERTH_CKPT_DIR", "")
    parser = argparse.ArgumentParser(description="Train a small language model on the sources of Python itself.")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=512, help="characters predicted per step, over all workers")
    parser.add_argument("--rate", type=float, default=0.006, help="learning rate at its highest")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--report-every", type=int, default=250, metavar="STEPS")
    parser.add_argument("--checkpoint-every", type=int, default=500, metavar="STEPS")
    parser.add_argument("--checkpoints", type=Path, default=Path(directory) if directory else None, metavar="DIRECTORY")
    parser.add_argument("--sample", type=int, default=160, help="characters to write at the end")
    parser.add_argument("--fail-at-step", type=int, default=0, metavar="N", help="exit with 1 after step N")
    parser.add_argument("--fail-once", action="store_true", help="only in the first attempt")
    options = parser.parse_args(arguments)
    options.resume_from = os.environ.get("BERTH_RESUME_FROM", "")
    options.fence = int(os.environ.get("BERTH_FENCE", "0"))
    return options


def main(arguments: list[str]) -> int:
    env = os.environ
    options = parse_options(arguments)
    rank = int(env.get("RANK", env.get("BERTH_WORKER", "0")))
    size = int(env.get("WORLD_SIZE", env.get("BERTH_WORKERS", "1")))
    control = env.get("BERTH_CKPT_CONTROL")
    requests = Requests(Path(control) if control else None)
    address, port = env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", "29500"))
    session = zlib.crc32(f"{env.get('BERTH_JOB_ID', '')}/{env.get('BERTH_ATTEMPT', '')}".encode())
    with lost_peers_reported(rank), Gang(rank, size) as gang:
        try:
            gang.meet(address, port, session=session, is_unwanted=lambda: requests.pending() == requests.SAVE_AND_EXIT)
        except Unwanted:
            say(f"worker {rank}: told to stop before the start")
            return EXIT_CHECKPOINTED
        return train(options, gang, requests)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
