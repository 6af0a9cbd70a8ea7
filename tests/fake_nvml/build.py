"""Builds the stand-in library and writes its state file."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "fake_nvml.c"
SONAME = "libnvidia-ml.so.1"
GPU = {
    "name": "NVIDIA H100 80GB HBM3",
    "memory": 81559,
    "used": 0,
    "reserved": 600,
    "util": 0,
    "power": 70000,
    "energy": 1000,
    "temp": 35,
    "memtemp": 40,
    "smclock": 345,
    "memclock": 2619,
    "reasons": 1,
    "cc": 90,
}


def build(directory: Path) -> Path:
    """Compile the library into `directory`; skips the test where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = directory / SONAME
    command = [compiler, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{SONAME}", "-o", str(library), str(SOURCE)]
    subprocess.run(command, check=True)
    return library


def load(library: Path) -> None:
    """Make this process find the stand-in: the binding's dlopen matches the soname of what is loaded already."""
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


@dataclass
class FakeNvml:
    """The state file, as values."""

    path: Path
    gpus: list[dict[str, object]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path, count: int, **changes: object) -> "FakeNvml":
        """`count` cards that differ only in their identity."""
        gpus = [
            {**GPU, "uuid": f"GPU-{index:08x}-1111-2222-3333-444444444444", "bus": f"00000000:{0x3B + index:02X}:00.0"}
            for index in range(count)
        ]
        return cls(path, [{**gpu, **changes} for gpu in gpus]).write()

    def set(self, index: int, **changes: object) -> "FakeNvml":
        self.gpus[index].update(changes)
        return self.write()

    def say(self, *lines: str) -> "FakeNvml":
        """Add facts that are not a card's."""
        self.lines += lines
        return self.write()

    def unsay(self, lines: Iterable[str]) -> "FakeNvml":
        for line in lines:
            self.lines.remove(line)
        return self.write()

    def write(self) -> "FakeNvml":
        text = ["driver 580.65.06"]
        for index, gpu in enumerate(self.gpus):
            text += [f"gpu {index} {key} {value}" for key, value in gpu.items()]
        draft = self.path.with_suffix(".new")
        draft.write_text("\n".join([*text, *self.lines]) + "\n")
        draft.replace(self.path)
        os.environ["FAKE_NVML_STATE"] = str(self.path)
        return self
