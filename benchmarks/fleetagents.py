"""`python -m benchmarks.fleetagents NODES`: an API server double and one agent per node.

Prints the URL of the API server. For each line `COUNT` on standard input, COUNT agents change their inventory. All
agents have the same address. Each connection is one agent.
"""

import asyncio
import re
import sys
import time
from collections.abc import Mapping

import msgspec

from accelplane.fleet.objects import AGENT_LABELS, AGENT_PORT
from accelplane.kube.testing import FakeApiServer

UNITS = 8
# Agents that change together are distributed over all nodes, as in a cluster, and are not those of one list.
_STRIDE = 37
_RESOURCE = "gpu.intel.com/i915"
_WAIT = re.compile(rb"wait=(\d+)")


class Agent(asyncio.Protocol):
    """One agent with 8 cards, each allocated to a pod, with a short history."""

    def __init__(self, agents: list["Agent"]) -> None:
        self._number = len(agents)
        self._generation = 1
        self._transport: asyncio.WriteTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        agents.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if data.startswith(b"GET /api/v1/readings"):
            self._send(msgspec.json.encode(readings(time.time())))
            return
        wait = _WAIT.search(data)
        if wait is None or f'"{self._generation}"'.encode() not in data:
            self._answer()
        else:
            self._timer = asyncio.get_running_loop().call_later(int(wait[1]), self._answer_unchanged)

    def change(self) -> None:
        self._generation += 1
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._answer()

    def _answer_unchanged(self) -> None:
        self._timer = None
        self._write(b"HTTP/1.1 304 Not Modified\r\n\r\n")

    def _answer(self) -> None:
        self._send(msgspec.json.encode(inventory(self._number, self._generation)))

    def _send(self, body: bytes) -> None:
        self._write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    def _write(self, answer: bytes) -> None:
        assert self._transport is not None
        self._transport.write(answer)


def inventory(number: int, generation: int) -> Mapping[str, object]:
    """The inventory of one agent."""
    unhealthy = generation % 2 == 0
    units = [
        {
            "plugin": "gpu", "unit": f"card{card}", "device": f"card{card}", "bdf": f"0000:{card + 3:02x}:00.0",
            "model": "Flex 170", "numa": card % 2, "known": True,
            "phase": "unhealthy" if unhealthy and card == 0 else "healthy",
            "reason": "temperature" if unhealthy and card == 0 else "", "text": "", "since": 1764000000 + number,
            "idle_since": 0, "ids": {_RESOURCE: 1},
            "holders": [
                {"namespace": f"team-{number % 50}", "pod": f"job-{number}-{card}", "container": "main",
                 "resource": _RESOURCE, "count": 1, "since": 1764000000 + number}
            ],
            "history": [
                {"time": 1764000000 + card, "phase": phase, "reason": "temperature", "text": f"{90 + card} °C"}
                for phase in ("unhealthy", "healthy")
            ],
        }
        for card in range(UNITS)
    ]  # fmt: skip
    resource = {
        "name": _RESOURCE,
        "stage": "registered",
        "ids": UNITS,
        "healthy": UNITS - unhealthy,
        "allocated": UNITS,
    }
    return {
        "version": 1, "node": "", "agent": "accelplane node", "versions": {"accelplane": "1.0.0"},
        "generation": str(generation), "holders": {"source": "podresources", "age": 1},
        "plugins": [{"name": "gpu", "resources": [resource], "units": units, "skipped": []}],
    }  # fmt: skip


def readings(now: float) -> Mapping[str, object]:
    """The current values of one agent: the counters of busy cards, and the values beside them."""
    devices = [
        {
            "plugin": "gpu", "device": f"card{card}", "bdf": f"0000:{card + 3:02x}:00.0",
            "values": [
                {"name": "accelplane_gpu_idle_seconds_total", "labels": {"gt": "gt0"}, "value": now * (card + 1) / 10},
                {"name": "accelplane_device_energy_joules_total", "labels": {"sensor": "card"}, "value": now * 90},
                *({"name": f"accelplane_device_{name}", "labels": {"sensor": "card"}, "value": 50 + card}
                  for name in ("temperature_celsius", "voltage_volts", "fan_rpm")),
                *({"name": "accelplane_gpu_frequency_hertz", "labels": {"gt": "gt0", "kind": kind}, "value": 1.5e9}
                  for kind in ("actual", "requested", "max", "hardware-max")),
                {"name": "accelplane_device_power_limit_watts", "labels": {"sensor": "card", "limit": "sustained"},
                 "value": 150},
            ],
        }
        for card in range(UNITS)
    ]  # fmt: skip
    return {"version": 1, "time": now, "plugins": [{"name": "gpu", "devices": devices}]}


def fill(api: FakeApiServer, nodes: int, port: int) -> None:
    """Adds nodes with agents."""
    numbers = {_RESOURCE: str(UNITS), "cpu": "64", "memory": "512Gi", "pods": "110"}
    for number in range(nodes):
        name = f"node-{number:05}"
        labels = {"kubernetes.io/hostname": name} | {f"example.com/label-{index}": str(index) for index in range(20)}
        conditions = [{"type": "Ready", "status": "True", "message": "kubelet is posting ready status"}]
        status = {"capacity": numbers, "allocatable": numbers, "conditions": conditions}
        api.put("nodes", {"metadata": {"name": name, "labels": labels}, "status": status})
        ports = [{"name": AGENT_PORT, "containerPort": port}]
        api.put(
            "pods",
            {
                "metadata": {"name": f"agent-{number:05}", "namespace": "kube-system", "labels": dict(AGENT_LABELS)},
                "spec": {
                    "nodeName": name,
                    "serviceAccountName": "accelplane-node",
                    "containers": [{"name": "agent", "ports": ports}],
                },
                "status": {"phase": "Running", "podIP": "127.0.0.1"},
            },
        )


async def main() -> None:
    loop, agents = asyncio.get_running_loop(), list[Agent]()
    server = await loop.create_server(lambda: Agent(agents), "127.0.0.1", 0, backlog=1024)
    async with FakeApiServer() as api:
        fill(api, int(sys.argv[1]), server.sockets[0].getsockname()[1])
        print(api.url, flush=True)
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        first = 0
        while line := await reader.readline():
            for index in range(int(line)):
                agents[(first + index) * _STRIDE % len(agents)].change()
            first += int(line)
    server.close()


if __name__ == "__main__":
    asyncio.run(main())
