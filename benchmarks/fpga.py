"""The FPGA hook and tool as hosts have them, on an emulated card: their start, and bitstreams of 20 MB."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.figures import Outcome, Scale, median
from tests.bitstreams import INTERFACE, NLB0, NLB3, aocx, gbs, metadata

_PROGRAMS = Path("dist/fpga-sw")
_SIZE = 20_000_000


class Runs(msgspec.Struct, frozen=True):
    """Of one command: seconds until it had ended, those of the processor's time, and the most memory of any, in KiB."""

    took: list[float]
    busy: list[float]
    memory: int


class Answers(msgspec.Struct, frozen=True):
    """What `benchmarks.onhost` has seen."""

    nothing: Runs
    programming: Runs
    info: Runs


def measure(scale: Scale) -> Outcome:
    if os.getuid() != 0 or not os.path.exists("/dev/fuse"):
        return Outcome(skipped="an emulated card needs root and /dev/fuse")
    if not _PROGRAMS.is_dir():
        return Outcome(skipped=f"{_PROGRAMS} is not there: make fpga-host")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        answers = _answers(Path(directory), count := scale.of(50, 3))
    refused = [_refused() for _ in range(count)]
    nothing, programming, info = answers.nothing, answers.programming, answers.info
    return Outcome(
        figures=(
            median("hook that is given nothing, to its answer", _ms(refused), "ms", budget=30),
            median("hook with nothing to do: processor time", _ms(nothing.busy), "ms", budget=30),
            median("hook with nothing to do", _ms(nothing.took), "ms"),
            median("hook with nothing to do: memory", [nothing.memory / 1024], "MiB"),
            median("hook programming 20 MB", _ms(programming.took), "ms"),
            median("hook programming 20 MB: processor time", _ms(programming.busy), "ms"),
            median("hook programming 20 MB: memory", [programming.memory / 1024], "MiB"),
            median("info of an AOCX of 20 MB", _ms(info.took), "ms"),
            median("info of an AOCX of 20 MB: memory", [info.memory / 1024], "MiB"),
        ),
        notes=("on the emulated card every file that is opened is a question to another process",),
    )


def _refused() -> float:
    """Seconds to everything imported and an empty state refused, without an emulated kernel."""
    start = time.perf_counter()
    subprocess.run([_PROGRAMS / "intel-fpga-crihook"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - start


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * each for each in seconds]


def _answers(directory: Path, count: int) -> Answers:
    raw = os.urandom(_SIZE)
    for afu in (NLB0, NLB3):
        (directory / f"{afu}.gbs").write_bytes(gbs(metadata(afu=afu), bytes.fromhex(afu) + raw))
        bundle = directory / afu
        bundle.mkdir()
        asked = {
            "process": {"env": [f"FPGA_REGION_1={INTERFACE}", f"FPGA_AFU_1={afu}"]},
            "linux": {"devices": [{"path": "/dev/dfl-port.0"}]},
        }
        (bundle / "config.json").write_bytes(msgspec.json.encode(asked))
        (directory / f"{afu}.json").write_bytes(msgspec.json.encode({"bundle": str(bundle)}))
    (directory / "design.aocx").write_bytes(aocx(gbs(metadata(), raw)))
    inside = Path(__file__).with_name("onhost.py")
    command = [
        *(sys.executable, "-m", "accelplane", "simulate", "fpga", "--"),
        *(sys.executable, "-IS", str(inside), str(_PROGRAMS.resolve()), str(directory), str(count), NLB0, NLB3),
    ]
    return msgspec.json.decode(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, type=Answers)
