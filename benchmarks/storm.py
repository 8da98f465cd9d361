"""`Allocate` while files come and go without end where the agent looks for cards.

`python -m benchmarks.storm DIRECTORY` makes the storm until its standard input ends, and prints how many files it was.
"""

import os
import subprocess
import sys
import threading
import time
import urllib.request

from benchmarks.agent import GPU, agent, free_port, world
from benchmarks.allocate import check, timed
from benchmarks.figures import Outcome, Scale, percentile, single
from benchmarks.peer import ALLOCATE, ReferenceClient, Registry, allocate_request
from benchmarks.raw_grpc_client import RawGrpcClient

_PAUSE = 0.001
_WARM_UP, _ROUNDS = 200, 5


def measure(scale: Scale) -> Outcome:
    seconds = scale.of(20, 3)
    address = f"127.0.0.1:{free_port()}"
    with world() as here, Registry(here.kubelet_dir) as registry, agent(here, "--http-address", address) as running:
        path = registry.registrations(2)[GPU].socket
        listed = registry.until(lambda listed: listed.resource == GPU and bool(listed.devices))
        request = allocate_request(min(listed.devices))
        with ReferenceClient(path) as once:
            check(GPU, once.call(request))
        data = request.SerializeToString()
        with RawGrpcClient(path, ALLOCATE) as client:
            timed(lambda: client.call(data), _WARM_UP)
            scans, cpu = _scans(address), running.cpu_seconds()
            storm = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.storm", f"{here.root}/dev/dri"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            start = time.monotonic()
            rounds: list[list[float]] = []
            for number in range(1, _ROUNDS + 1):
                times: list[float] = []
                while time.monotonic() - start < seconds * number / _ROUNDS:
                    times += timed(lambda: client.call(data), 1)
                    time.sleep(0.002)  # a kubelet asks now and then, not back to back
                rounds.append(times)
            files = int(storm.communicate()[0])
            took = time.monotonic() - start
            scans, cpu = _scans(address) - scans, running.cpu_seconds() - cpu
    return Outcome(
        figures=(
            percentile("GPU, with CDI, p50", rounds, 0.5, "us", peers={"Go plugin, no storm": 560}),
            percentile("GPU, with CDI, p99", rounds, 0.99, "us", peers={"Go plugin, no storm": 1900}),
            single("slowest", max(max(times) for times in rounds), "us", samples=sum(map(len, rounds))),
            single("files made and removed", files / took, "/s"),
            single("scans", scans / took, "/s"),
            single("processor time of the agent", 100 * cpu / took, "%"),
        ),
        notes=(f"raw gRPC client, a call every 2 ms for {seconds} s",),
    )


def main() -> None:
    directory = sys.argv[1]
    over = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
    files = 0
    while not over.wait(_PAUSE):
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
    raise RuntimeError("no accelplane_scans_total of the GPU plugin among the metrics")


if __name__ == "__main__":
    main()
