"""The pod webhooks over TLS: time per review on one and on sixteen connections, processor time and memory.

Each webhook is the command that users run. The client is a separate process on any core. The FPGA webhook has the
mappings of its deployment tree.
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
from benchmarks.figures import Figure, Result, ReviewTimes, Scale, median, percentile, single
from benchmarks.reviewer import NAMESPACE

# Reviews per second of the Go SGX webhook on two cores shared with the client. The Go FPGA webhook was not measured.
_GO = {1: 5500, 16: 10000}
_MAPPINGS = Path(__file__).parents[1] / "deploy/fpga_admissionwebhook/mappings-collection.yaml"
_TIMEOUT = 30.0


def measure(scale: Scale) -> Result:
    with webhook("sgx", [], r"serving at port (\d+)") as (process, port):
        sgx = _measure("SGX", process, port, scale)
    with _mapping_server() as address, tempfile.TemporaryDirectory() as directory:
        config = Path(directory, "kubeconfig")
        config.write_text(json.dumps(_kubeconfig(address)))
        ready = r"webhooks at port (\d+)[^\0]*all caches are synced"
        with webhook("fpga", [f"-kubeconfig={config}"], ready) as (process, port):
            fpga = _measure("FPGA", process, port, scale)
    return Result(
        figures=[*sgx, *fpga],
        notes=(
            "SGX: a pod that requests EPC; FPGA: a pod that requests a function, in a namespace with 21 mappings",
            "all pods are mutated; webhook and client are separate processes",
            "the peer is the Go SGX webhook in both cases",
        ),
    )


def _measure(family: str, process: int, port: int, scale: Scale) -> Sequence[Figure]:
    figures: list[Figure] = []
    for connections, go in _GO.items():
        rounds: list[ReviewTimes] = []
        cpu_times: list[float] = []
        for _ in range(scale.of(5, 1)):
            before = _cpu_seconds(process)
            rounds.append(_send_reviews(port, family, connections, scale.of(10_000, 300)))
            cpu_times.append((_cpu_seconds(process) - before) / len(rounds[-1].latencies) * 1e6)
        each = [one.seconds / len(one.latencies) * 1e6 for one in rounds]
        name = f"{family}, {connections} connection{'s' if connections > 1 else ''}"
        latencies = [one.latencies for one in rounds]
        peers = {"Go webhook": 1e6 / go}
        figures += [
            median(f"{name}: time per review", each, "us", budget=1e6 / go, peers=peers),
            median(f"{name}: reviews", [1e6 / one for one in each], "1/s", peers={"Go webhook": go}),
            median(f"{name}: processor time of the webhook per review", cpu_times, "us"),
            percentile(f"{name}: latency, p50", latencies, 0.5, "us"),
            percentile(f"{name}: latency, p99", latencies, 0.99, "us"),
        ]
    figures.append(single(f"{family}: resident", _status(process, "VmRSS") / 1024, "MiB"))
    figures.append(single(f"{family}: anonymous", _status(process, "RssAnon") / 1024, "MiB"))
    return figures


@contextlib.contextmanager
def webhook(name: str, flags: Sequence[str], ready: str, wrapper: Sequence[str] = ()) -> Iterator[tuple[int, int]]:
    """Runs a webhook. Yields its process ID, and its port, which `ready` matches in the log. `wrapper` is a prefix."""
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
            process.wait(_TIMEOUT)


def _port(log: Path, ready: str) -> int:
    end = time.monotonic() + _TIMEOUT
    while not (found := re.search(ready, log.read_text())):
        if time.monotonic() > end:
            raise subprocess.SubprocessError(f"webhook: not ready after {_TIMEOUT:.0f} s, log:\n{log.read_text()}")
        time.sleep(0.05)
    return int(found[1])


@contextlib.contextmanager
def _mapping_server() -> Iterator[str]:
    """An API server that lists the mappings, and whose watches report no changes. Yields its URL."""
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

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name in the base class
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


def _send_reviews(port: int, family: str, connections: int, reviews: int) -> ReviewTimes:
    command = [sys.executable, "-m", "benchmarks.reviewer", str(port), family, str(connections), str(reviews)]
    return msgspec.json.decode(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout, type=ReviewTimes)


def _cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status(process: int, name: str) -> int:
    """KiB."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    assert found, name
    return int(found[1])
