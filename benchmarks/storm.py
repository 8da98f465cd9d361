"""`Allocate` during a storm of file events in a directory that the agent watches.

`python -m benchmarks.storm DIRECTORY` creates and removes files until standard input is closed. Prints their number.
"""

import os
import subprocess
import sys
import threading
import time
import urllib.request

from benchmarks.agent import GPU, agent, free_port, gpu_npu_node
from benchmarks.allocate import check, timed
from benchmarks.figures import Result, Scale, percentile, single
from benchmarks.raw_grpc_client import RawGrpcClient
from benchmarks.reference_kubelet import ALLOCATE, ReferenceClient, ReferenceKubelet, allocate_request

_PAUSE = 0.001
_WARM_UP, _ROUNDS = 200, 5


def measure(scale: Scale) -> Result:
    seconds = scale.of(20, 3)
    address = f"127.0.0.1:{free_port()}"
    with (
        gpu_npu_node() as setup,
        ReferenceKubelet(setup.kubelet_dir) as kubelet,
        agent(setup, "--http-address", address) as running,
    ):
        path = kubelet.registrations(2)[GPU].socket
        update = kubelet.wait_for(lambda update: update.resource == GPU and bool(update.devices))
        request = allocate_request(min(update.devices))
        with ReferenceClient(path) as once:
            check(GPU, once.call(request))
        data = request.SerializeToString()
        with RawGrpcClient(path, ALLOCATE) as client:
            timed(lambda: client.call(data), _WARM_UP)
            scans, cpu = _scans(address), running.cpu_seconds()
            storm = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.storm", f"{setup.root}/dev/dri"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            start = time.monotonic()
            rounds: list[list[float]] = []
            for number in range(1, _ROUNDS + 1):
                times: list[float] = []
                while time.monotonic() - start < seconds * number / _ROUNDS:
                    times += timed(lambda: client.call(data), 1)
                    time.sleep(0.002)  # a kubelet does not call back to back
                rounds.append(times)
            files = int(storm.communicate()[0])
            took = time.monotonic() - start
            scans, cpu = _scans(address) - scans, running.cpu_seconds() - cpu
    return Result(
        figures=(
            percentile("GPU, with CDI, p50", rounds, 0.5, "us", peers={"Go plugin, no storm": 560}),
            percentile("GPU, with CDI, p99", rounds, 0.99, "us", peers={"Go plugin, no storm": 1900}),
            single("slowest", max(max(times) for times in rounds), "us", samples=sum(map(len, rounds))),
            single("files created and removed", files / took, "/s"),
            single("scans", scans / took, "/s"),
            single("processor time of the agent", 100 * cpu / took, "%"),
        ),
        notes=(f"raw gRPC client, a call every 2 ms for {seconds} s",),
    )


def main() -> None:
    directory = sys.argv[1]
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    files = 0
    while not stop.wait(_PAUSE):
        path = f"{directory}/storm{files % 10}"
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC))
        os.unlink(path)
        files += 1
    print(files)


def _scans(address: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as page:
        for line in page.read().decode().splitlines():
            if line.startswith("accelplane_scans_total{") and 'plugin="gpu"' in line:
                return float(line.rsplit(" ", 1)[1])
    raise RuntimeError("/metrics: accelplane_scans_total of the GPU plugin not found")


if __name__ == "__main__":
    main()
