"""The webhooks for pods over TLS: time for a review on one connection and on sixteen, and what the process takes.

Each is the command that users run; the client is a process of its own, on any core. The FPGAs'
webhook has the names of the mappings that come with it.
"""

import contextlib
import datetime
import http.server
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import yaml

from accelplane.kube.authority import renew
from accelplane.kube.certificates import CertificatePolicy
from benchmarks.figures import Figure, Outcome, Rounds, Scale, median, percentile, single
from benchmarks.reviewer import NAMESPACE

# Reviews a second of Go's webhook for SGX on two cores that it shares with the load; there is no figure of the FPGAs'.
_GO = {1: 5500, 16: 10000}
_MAPPINGS = Path(__file__).parents[1] / "deploy/fpga_admissionwebhook/mappings-collection.yaml"
_PATIENCE = 30.0


def measure(scale: Scale) -> Outcome:
    with webhook("sgx", [], r"serving at port (\d+)") as (process, port):
        sgx = _measured("SGX", process, port, scale)
    with _mapped() as address, tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "kubeconfig")
        config.write_text(json.dumps(_kubeconfig(address)))
        ready = r"webhooks at port (\d+)[^\0]*all caches are synced"
        with webhook("fpga", [f"-kubeconfig={config}"], ready) as (process, port):
            fpga = _measured("FPGA", process, port, scale)
    return Outcome(
        figures=[*sgx, *fpga],
        notes=(
            "SGX: a pod with EPC; FPGA: one with a function to be programmed, in a namespace of 21 mappings",
            "all pods are mutated; webhook and load are a process each",
            "the peer is Go's webhook for SGX in both cases",
        ),
    )


def _measured(what: str, process: int, port: int, scale: Scale) -> Sequence[Figure]:
    figures: list[Figure] = []
    for connections, go in _GO.items():
        rounds: list[Rounds] = []
        spent: list[float] = []
        for _ in range(scale.of(5, 1)):
            before = _cpu_seconds(process)
            rounds.append(_asked(port, what, connections, scale.of(10_000, 300)))
            spent.append((_cpu_seconds(process) - before) / len(rounds[-1].took) * 1e6)
        each = [one.seconds / len(one.took) * 1e6 for one in rounds]
        name = f"{what}, {connections} connection{'s' if connections > 1 else ''}"
        took = [one.took for one in rounds]
        peers = {"Go webhook": 1e6 / go}
        figures += [
            median(f"{name}: time for a review", each, "us", budget=1e6 / go, peers=peers),
            median(f"{name}: reviews", [1e6 / one for one in each], "1/s", peers={"Go webhook": go}),
            median(f"{name}: of it the webhook's processor time", spent, "us"),
            percentile(f"{name}: answer, p50", took, 0.5, "us"),
            percentile(f"{name}: answer, p99", took, 0.99, "us"),
        ]
    figures.append(single(f"{what}: resident", _status(process, "VmRSS") / 1024, "MiB"))
    figures.append(single(f"{what}: of it anonymous", _status(process, "RssAnon") / 1024, "MiB"))
    return figures


@contextlib.contextmanager
def webhook(name: str, flags: Sequence[str], ready: str, wrapper: Sequence[str] = ()) -> Iterator[tuple[int, int]]:
    """Its process id and its port, which is what `ready` finds in its log. `wrapper` goes before the command."""
    with tempfile.TemporaryDirectory() as directory:
        pair = renew(None, ["localhost"], datetime.datetime.now(datetime.UTC), CertificatePolicy())
        for file in ("tls.crt", "tls.key"):
            Path(directory, file).write_bytes(pair.secret_data()[file])
        log = Path(directory, "log")
        module = f"accelplane.cli.{name}webhook"
        command = [*wrapper, sys.executable, "-m", module, "-v=1", "-port=0", f"-cert-dir={directory}", *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield process.pid, _port(log, ready)
        finally:
            process.terminate()
            process.wait(_PATIENCE)


def _port(log: Path, ready: str) -> int:
    end = time.monotonic() + _PATIENCE
    while not (found := re.search(ready, log.read_text())):
        if time.monotonic() > end:
            raise subprocess.SubprocessError(f"the webhook does not serve:\n{log.read_text()}")
        time.sleep(0.05)
    return int(found[1])


@contextlib.contextmanager
def _mapped() -> Iterator[str]:
    """The address of what an API server with the mappings would list. Nothing changes while reviews are timed."""
    objects = [json.loads(json.dumps(each)) for each in yaml.safe_load_all(_MAPPINGS.read_text())]
    for each in objects:
        each["metadata"]["namespace"] = NAMESPACE
    ended = threading.Event()

    class Lists(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            plural = self.path.partition("?")[0].rpartition("/")[2]
            items = [each for each in objects if f"{each['kind'].lower()}s" == plural]
            body = json.dumps({"metadata": {"resourceVersion": "1"}, "items": items}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            if "watch=true" in self.path:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                ended.wait()
                body = b"0\r\n\r\n"
            else:
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - so it is called there
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Lists) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            ended.set()
            server.shutdown()


def _kubeconfig(address: str) -> dict[str, object]:
    return {
        "clusters": [{"name": "c", "cluster": {"server": address}}],
        "contexts": [{"name": "x", "context": {"cluster": "c"}}],
        "current-context": "x",
    }


def _asked(port: int, what: str, connections: int, reviews: int) -> Rounds:
    command = [sys.executable, "-m", "benchmarks.reviewer", str(port), what, str(connections), str(reviews)]
    return msgspec.json.decode(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, type=Rounds)


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(process: int, name: str) -> int:
    """KiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found[1])
