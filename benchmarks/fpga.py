"""The FPGA hook and tool as installed on hosts, on an emulated card: start time, and bitstreams of 20 MB."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from accelplane.fpga.allocation import HOOK, hook_arguments
from benchmarks.figures import Result, Scale, median
from tests.bitstreams import INTERFACE, NLB0, NLB3, aocx, gbs, metadata

_PROGRAMS = Path("dist/fpga-sw")
_SIZE = 20_000_000


class Runs(msgspec.Struct, frozen=True):
    """The runs of one command: duration and processor time of each in seconds, and the peak memory in KiB."""

    seconds: list[float]
    cpu: list[float]
    memory: int


class HostRuns(msgspec.Struct, frozen=True):
    """The output of `benchmarks.fpga_host`."""

    nothing: Runs
    programming: Runs
    info: Runs


def measure(scale: Scale) -> Result:
    if os.getuid() != 0 or not os.path.exists("/dev/fuse"):
        return Result(skipped="the emulated card needs root and /dev/fuse")
    if not _PROGRAMS.is_dir():
        return Result(skipped=f"{_PROGRAMS}: not found; run make fpga-host")
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        runs = _run_on_emulated_card(Path(directory), count := scale.of(50, 3))
    to_error = [_time_to_error() for _ in range(count)]
    nothing, programming, info = runs.nothing, runs.programming, runs.info
    return Result(
        figures=(
            median("hook with empty input: time to its error", _ms(to_error), "ms", budget=30),
            median("hook with nothing to do: processor time", _ms(nothing.cpu), "ms", budget=30),
            median("hook with nothing to do", _ms(nothing.seconds), "ms"),
            median("hook with nothing to do: memory", [nothing.memory / 1024], "MiB"),
            median("hook programming 20 MB", _ms(programming.seconds), "ms"),
            median("hook programming 20 MB: processor time", _ms(programming.cpu), "ms"),
            median("hook programming 20 MB: memory", [programming.memory / 1024], "MiB"),
            median("info of an AOCX of 20 MB", _ms(info.seconds), "ms"),
            median("info of an AOCX of 20 MB: memory", [info.memory / 1024], "MiB"),
        ),
        notes=("on the emulated card each opened file is a request to another process",),
    )


def _time_to_error() -> float:
    """Seconds until the hook rejects empty input, after all imports, without an emulated kernel."""
    start = time.perf_counter()
    subprocess.run([_PROGRAMS / "intel-fpga-crihook"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return time.perf_counter() - start


def _ms(seconds: list[float]) -> list[float]:
    return [1e3 * each for each in seconds]


def _run_on_emulated_card(directory: Path, count: int) -> HostRuns:
    raw = os.urandom(_SIZE)
    for afu in (NLB0, NLB3):
        (directory / f"{afu}.gbs").write_bytes(gbs(metadata(afu=afu), bytes.fromhex(afu) + raw))
        bundle = directory / afu
        bundle.mkdir()
        oci_config = {
            "process": {"env": ["FPGA_REGIONS=1", f"FPGA_REGION_1={INTERFACE}", f"FPGA_AFU_1={afu}"]},
            "linux": {"devices": [{"path": "/dev/dfl-port.0", "type": "c", "major": 240, "minor": 0}]},
            "hooks": {"createRuntime": [{"path": HOOK, "args": hook_arguments(["dfl-port.0"])}]},
        }
        (bundle / "config.json").write_bytes(msgspec.json.encode(oci_config))
        (directory / f"{afu}.json").write_bytes(msgspec.json.encode({"bundle": str(bundle)}))
    (directory / "design.aocx").write_bytes(aocx(gbs(metadata(), raw)))
    script = Path(__file__).with_name("onhost.py")
    command = [
        *(sys.executable, "-m", "accelplane", "simulate", "fpga", "--"),
        *(sys.executable, "-IS", str(script), str(_PROGRAMS.resolve()), str(directory), str(count), NLB0, NLB3),
    ]
    return msgspec.json.decode(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, type=HostRuns)
