"""The SGX webhook under attack, in a memory control group of 30 MiB.

Attackers hold 500 idle connections, send distinct heads, bodies that never end and the largest pods. Meanwhile two
clients send reviews, one on a kept connection and one on new ones, as the API server does.
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
from benchmarks.figures import Outcome, Scale, percentile, single
from benchmarks.groups import Charged, MemoryGroup, Unavailable, memory_group
from benchmarks.reviewer import request

LIMIT_MIB = 30
_P99_MS = 100
_PAUSE = 0.02
_NEW_PAUSE = 0.1


def measure(scale: Scale) -> Outcome:
    try:
        with memory_group(LIMIT_MIB * 1024 * 1024) as group:
            kept, new, charged, sent = attacked(group, scale.of(60, 10))
    except Unavailable as error:
        return Outcome(skipped=str(error))
    return Outcome(
        figures=(
            percentile("review on a kept connection, p99", [kept], 0.99, "ms", budget=_P99_MS),
            percentile("review on a new connection, p99", [new], 0.99, "ms", budget=_P99_MS),
            single("slowest", max(*kept, *new), "ms", samples=len(kept) + len(new)),
            single("most memory of the group", charged.peak or charged.anonymous, "MiB", budget=LIMIT_MIB),
            single("killed", charged.killed, "times", budget=0),
        ),
        notes=(f"sent by the attackers: {sent}", "all reviews were answered with the complete patch"),
    )


def attacked(group: MemoryGroup, seconds: float) -> tuple[Sequence[float], Sequence[float], Charged, str]:
    """The milliseconds of reviews on a kept and on new connections, the group's memory, and what attackers sent."""
    with webhook("sgx", [], r"serving at port (\d+)", group.command()) as (_, port):
        attackers = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.attacker", str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            kept, new = _review_for(port, seconds)
        finally:
            sent = attackers.communicate()[0].decode()
        return kept, new, group.charged(), re.sub(r'[{}"]', "", sent)


def _review_for(port: int, seconds: float) -> tuple[Sequence[float], Sequence[float]]:
    """Milliseconds of each review on a kept connection, which the server may close, and on new connections.

    Both kinds run at the same time, so that a review that waits does not delay the next measurement of the other kind.
    """
    with ThreadPoolExecutor() as threads:
        new = threads.submit(_review_on_new_connections, port, seconds)
        return _review_on_kept_connection(port, seconds), new.result()


def _review_on_kept_connection(port: int, seconds: float) -> Sequence[float]:
    message = request("SGX")
    took: list[float] = []
    end = time.monotonic() + seconds
    connection = _connect(port)
    while time.monotonic() < end:
        begun = time.perf_counter()
        if not _ask(connection, message):
            connection.close()
            connection = _connect(port)
        took.append((time.perf_counter() - begun) * 1000)
        time.sleep(_PAUSE)
    connection.close()
    return took


def _review_on_new_connections(port: int, seconds: float) -> Sequence[float]:
    message = request("SGX")
    took: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        with _connect(port) as once:
            _ask(once, message)
        took.append((time.perf_counter() - begun) * 1000)
        time.sleep(_NEW_PAUSE)
    return took


def _connect(port: int) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=30))


def _ask(connection: ssl.SSLSocket, message: bytes) -> bool:
    """Sends a review; returns whether the connection stays open."""
    connection.sendall(message)
    answer = connection.recv(65536)
    if not answer.startswith(b"HTTP/1.1 200 ") or b"JSONPatch" not in answer:
        raise RuntimeError(f"expected a patch, found {answer[:200]!r}")
    return b"Connection: close" not in answer
