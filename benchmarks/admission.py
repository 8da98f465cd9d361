"""The SGX webhook over TLS: time for a review on one connection and on sixteen, and what the process takes.

The webhook is the command that users run; whoever asks is a process of its own, on whichever core the kernel likes.
"""

import contextlib
import datetime
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from accelplane.kube.authority import renewed
from accelplane.kube.certificates import CertificatePolicy
from benchmarks.figures import Figure, Outcome, Rounds, Scale, median, percentile, single

# Reviews a second of the Go webhook on two cores that it shares with the load.
_GO = {1: 5500, 16: 10000}
_PATIENCE = 30.0


def measure(scale: Scale) -> Outcome:
    figures: list[Figure] = []
    with _webhook() as (process, port):
        for connections, go in _GO.items():
            rounds: list[Rounds] = []
            spent: list[float] = []
            for _ in range(scale.of(5, 1)):
                before = _cpu_seconds(process)
                rounds.append(_asked(port, connections, scale.of(10_000, 300)))
                spent.append((_cpu_seconds(process) - before) / len(rounds[-1].took) * 1e6)
            each = [one.seconds / len(one.took) * 1e6 for one in rounds]
            name = f"{connections} connection{'s' if connections > 1 else ''}"
            took = [one.took for one in rounds]
            peers = {"Go webhook": 1e6 / go}
            figures += [
                median(f"{name}: time for a review", each, "us", budget=1e6 / go, peers=peers),
                median(f"{name}: reviews", [1e6 / one for one in each], "1/s", peers={"Go webhook": go}),
                median(f"{name}: of it the webhook's processor time", spent, "us"),
                percentile(f"{name}: answer, p50", took, 0.5, "us"),
                percentile(f"{name}: answer, p99", took, 0.99, "us"),
            ]
        figures.append(single("resident", _status(process, "VmRSS") / 1024, "MiB"))
        figures.append(single("of it anonymous", _status(process, "RssAnon") / 1024, "MiB"))
    return Outcome(
        figures=figures,
        notes=("a pod with EPC, which is mutated; webhook and load are a process each",),
    )


@contextlib.contextmanager
def _webhook() -> Iterator[tuple[int, int]]:
    """Its process id and its port."""
    with tempfile.TemporaryDirectory() as directory:
        pair = renewed(None, ["localhost"], datetime.datetime.now(datetime.UTC), CertificatePolicy())
        for name in ("tls.crt", "tls.key"):
            Path(directory, name).write_bytes(pair.data()[name])
        log = Path(directory, "log")
        command = [sys.executable, "-m", "accelplane.cli.sgxwebhook", "-v=1", "-port=0", f"-cert-dir={directory}"]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process.pid, _port(log)
        finally:
            process.terminate()
            process.wait(_PATIENCE)


def _port(log: Path) -> int:
    end = time.monotonic() + _PATIENCE
    while not (found := re.search(r"serving at port (\d+)", log.read_text())):
        if time.monotonic() > end:
            raise subprocess.SubprocessError(f"the webhook does not serve:\n{log.read_text()}")
        time.sleep(0.05)
    return int(found[1])


def _asked(port: int, connections: int, reviews: int) -> Rounds:
    command = [sys.executable, "-m", "benchmarks.reviewer", str(port), str(connections), str(reviews)]
    return msgspec.json.decode(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, type=Rounds)


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(process: int, name: str) -> int:
    """KiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found[1])
