"""`python -m benchmarks.attacker PORT`: hostile clients of a webhook, until standard input ends.

Each kind of client reconnects when the server closes its connection, with a pause. Standard output: what was sent.
"""

import asyncio
import contextlib
import json
import ssl
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator

IDLE = 500
SLOW_BODIES = 14
_RECONNECT = 15.0
_PATH = "/mutate--v1-pod"
_EPC = {"sgx.intel.com/epc": "1"}


class Attack:
    """Clients of one port; `sent` counts their connections and requests."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.sent: Counter[str] = Counter()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE

    async def run(self) -> None:
        """Attacks until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(IDLE):
                tasks.create_task(self._reconnecting(self._idle, tls=number % 2 == 0))
            for _ in range(SLOW_BODIES):
                tasks.create_task(self._reconnecting(self._slow_body))
            for _ in range(4):
                tasks.create_task(self._reconnecting(self._distinct_heads))
            tasks.create_task(self._reconnecting(self._large_pods))

    async def _reconnecting(
        self, client: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], *, tls: bool = True
    ) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                context = self._context if tls else None
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=context)
                self.sent["connections"] += 1
                try:
                    await client(reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(_RECONNECT)

    async def _idle(self, reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def _slow_body(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """All of a body but its last byte."""
        size = 3 * 1024 * 1024
        writer.write(_head(size) + b"x" * (size - 1))
        self.sent["unfinished bodies"] += 1
        await reader.read()

    async def _distinct_heads(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(1_000_000):
            padding = f"{id(writer)}-{number}-".ljust(15_000, "x")
            writer.write(f"GET /healthz?{number} HTTP/1.1\r\nX-Padding: {padding}\r\n\r\n".encode())
            await _skip_response(reader)
            self.sent["distinct heads"] += 1
            await asyncio.sleep(0.02)

    async def _large_pods(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            for body in large_reviews():
                writer.write(_head(len(body)) + body)
                await writer.drain()
                await _skip_response(reader)
                self.sent["large pods"] += 1
                await asyncio.sleep(0.2)


def large_reviews() -> Iterator[bytes]:
    """Pods with 3,000 and 12,000 containers that request EPC, one of 7 MiB, and a hostile one of 2 million values."""
    for count in (3000, 12_000):
        containers = [
            {"name": f"c{number}", "resources": {"limits": _EPC, "requests": _EPC}} for number in range(count)
        ]
        yield _review(json.dumps({"metadata": {}, "spec": {"containers": containers}}, separators=(",", ":")))
    yield _review(json.dumps({"metadata": {"annotations": {"x": "y" * 7_300_000}}, "spec": {"containers": []}}))
    yield _review('{"metadata":{},"spec":{"volumes":[],"containers":[%s{}]}}' % ("{}," * 2_000_000))


def _review(pod: str) -> bytes:
    text = '{"kind":"AdmissionReview","apiVersion":"admission.k8s.io/v1","request":{"uid":"u","object":%s}}'
    return (text % pod).encode()


def _head(size: int) -> bytes:
    return f"POST {_PATH} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n".encode()


async def _skip_response(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    await reader.readexactly(int(head.partition("Content-Length: ")[2].partition("\r\n")[0]))


async def _until_end_of_input(attack: Attack) -> None:
    task = asyncio.create_task(attack.run())
    await asyncio.to_thread(sys.stdin.read)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def main() -> None:
    attack = Attack(int(sys.argv[1]))
    asyncio.run(_until_end_of_input(attack))
    sys.stdout.write(json.dumps(attack.sent))


if __name__ == "__main__":
    main()
