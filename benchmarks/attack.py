"""The SGX webhook under attack, in a memory control group of 30 MiB.

Attackers hold 500 idle connections and send distinct request heads, unfinished bodies and the largest pods. At the same
time two clients send reviews, one on a persistent connection and one on new connections, as the API server does.
"""

import re
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.admission import webhook
from benchmarks.figures import Result, Scale, percentile, single
from benchmarks.memory_cgroup import CgroupUnavailable, CgroupUsage, MemoryCgroup, memory_cgroup
from benchmarks.reviewer import request

LIMIT_MIB = 30
_P99_MS = 100
_PAUSE = 0.02
_NEW_PAUSE = 0.1


def measure(scale: Scale) -> Result:
    try:
        with memory_cgroup(LIMIT_MIB * 1024 * 1024) as group:
            persistent, new, usage, sent = measure_attack(group, scale.of(60, 10))
    except CgroupUnavailable as error:
        return Result(skipped=str(error))
    return Result(
        figures=(
            percentile("review on a persistent connection, p99", [persistent], 0.99, "ms", budget=_P99_MS),
            percentile("review on a new connection, p99", [new], 0.99, "ms", budget=_P99_MS),
            single("slowest", max(*persistent, *new), "ms", samples=len(persistent) + len(new)),
            single("peak memory of the cgroup", usage.peak or usage.anonymous, "MiB", budget=LIMIT_MIB),
            single("OOM kills", usage.killed, "times", budget=0),
        ),
        notes=(f"sent by the attackers: {sent}", "all reviews were answered with the complete patch"),
    )


def measure_attack(group: MemoryCgroup, seconds: float) -> tuple[Sequence[float], Sequence[float], CgroupUsage, str]:
    """Milliseconds of reviews on a persistent and on new connections, the cgroup's usage, the attackers' requests."""
    with webhook("sgx", [], r"serving at port (\d+)", group.command()) as (_, port):
        attackers = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.attacker", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            persistent, new = _review_for(port, seconds)
        finally:
            sent = attackers.communicate()[0].decode()
        return persistent, new, group.usage(), re.sub(r'[{}"]', "", sent)


def _review_for(port: int, seconds: float) -> tuple[Sequence[float], Sequence[float]]:
    """Milliseconds of each review on a persistent connection, which the server may close, and on new connections.

    Both run at the same time, so that a slow review of one kind does not delay the other.
    """
    with ThreadPoolExecutor() as threads:
        new = threads.submit(_review_on_new_connections, port, seconds)
        return _review_on_persistent_connection(port, seconds), new.result()


def _review_on_persistent_connection(port: int, seconds: float) -> Sequence[float]:
    message = request("SGX")
    latencies: list[float] = []
    end = time.monotonic() + seconds
    connection = _connect(port)
    while time.monotonic() < end:
        started = time.perf_counter()
        if not _send_review(connection, message):
            connection.close()
            connection = _connect(port)
        latencies.append((time.perf_counter() - started) * 1000)
        time.sleep(_PAUSE)
    connection.close()
    return latencies


def _review_on_new_connections(port: int, seconds: float) -> Sequence[float]:
    message = request("SGX")
    latencies: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        started = time.perf_counter()
        with _connect(port) as once:
            _send_review(once, message)
        latencies.append((time.perf_counter() - started) * 1000)
        time.sleep(_NEW_PAUSE)
    return latencies


def _connect(port: int) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=30))


def _send_review(connection: ssl.SSLSocket, message: bytes) -> bool:
    """Sends a review; returns whether the connection stays open."""
    connection.sendall(message)
    answer = connection.recv(65536)
    if not answer.startswith(b"HTTP/1.1 200 ") or b"JSONPatch" not in answer:
        raise RuntimeError(f"expected a patch, found {answer[:200]!r}")
    return b"Connection: close" not in answer
