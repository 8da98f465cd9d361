"""`inspect --cluster --fleet` with a server of devices, and a kubectl that leads to it."""

import asyncio
import csv
import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from processes import run_command

from accelplane.fleet.devicelist import DeviceItem, FleetDeviceList, NodeProblem
from accelplane.fleet.serve import listen, open_gate
from accelplane.fleet.simulated import SimulatedFleet
from accelplane.fleet.web.site import Screens
from accelplane.http.messages import PAGE_LIMITS, Request, Response
from accelplane.http.server import HttpServer
from accelplane.report.inventory import Holder

pytestmark = pytest.mark.memory

I915 = "gpu.intel.com/i915"
HOLDER = Holder(namespace="research", pod="train", container="main", resource=I915, count=2, since=1.7e9)
DEVICES = (
    DeviceItem(
        node="one", plugin="gpu", unit="card0", device="card0", bdf="0000:03:00.0", model="Flex", numa=0,
        ids={I915: 4}, holders=(HOLDER,),
    ),
    DeviceItem(
        node="two", plugin="gpu", unit="card0", device="card0", state="unhealthy", reason="memory", text="not\x1bok",
        state_since=1.7e9, ids={I915: 4}, current=False,
    ),
    DeviceItem(node="two", plugin="qat", unit="0000:6b:00.0", ids={"qat.intel.com/cy": 16}),
)  # fmt: skip
KUBECTL = """#!{python}
import os, signal, sys, time
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if {problem!r}:
    os.close(1)
    for part in ({problem!r}[:20], {problem!r}[20:]):  # a reader gets the first part alone
        os.write(2, part.encode())
        time.sleep(0.2)
    sys.exit(1)
def end(*_):
    with open({log!r}, "a") as log:
        print("ended", file=log)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("Forwarding from 127.0.0.1:{port} -> 8080", flush=True)
print("Handling connection for 8080 " * 1000, flush=True)
while True:
    signal.pause()
"""


class Fleet:
    """The server, and the directory with kubectl."""

    def __init__(self, directory: Path) -> None:
        self.listed = FleetDeviceList(devices=DEVICES)
        self.status = 200
        self.content: bytes | None = None
        self.requests: list[str] = []
        self.port = 0
        self.bin = directory / "bin"
        self.log = directory / "kubectl.log"
        self.bin.mkdir()

    def handle(self, request: Request) -> Response:
        self.requests.append(f"{request.path}?{request.query}" if request.query else request.path)
        content = msgspec.json.encode(self.listed) if self.content is None else self.content
        return Response(self.status, content)

    def install(self, problem: str = "") -> None:
        script = self.bin / "kubectl"
        script.write_text(KUBECTL.format(python=sys.executable, log=str(self.log), port=self.port, problem=problem))
        script.chmod(0o755)

    async def inspect(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """The command, while this process serves."""
        words = ("inspect", "--cluster", "--fleet", *arguments)
        return await asyncio.to_thread(run_command, "accelplane", *words, env={"PATH": str(self.bin)})

    async def report(self, *arguments: str) -> Any:
        answer = await self.inspect("-o", "json", *arguments)
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    instance = Fleet(tmp_path)
    server = HttpServer(instance.handle, PAGE_LIMITS, methods=("GET", "HEAD"))
    await server.start("127.0.0.1", 0)
    instance.port = server.addresses[0][1]
    instance.install()
    yield instance
    await server.stop()


async def test_devices_have_their_states_and_holders_and_the_forwarding_ends(fleet: Fleet) -> None:
    answer = await fleet.inspect("-o", "csv", "--context=far", "--kubeconfig=/k", "--fleet-namespace=acc")
    assert answer.returncode == 0, answer.stderr
    rows = list(csv.DictReader(io.StringIO(answer.stdout)))
    assert [(row["NODE"], row["DEVICE"], row["STATE"]) for row in rows] == [
        ("one", "card0", "healthy"),
        ("two", "card0", "unhealthy (outdated)"),
        ("two", "0000:6b:00.0", "healthy"),
    ]
    assert (rows[0]["IDS"], rows[0]["ALLOCATED"], rows[0]["HOLDERS"]) == ("4", "2", "research/train/main (2)")
    assert (rows[0]["HOLDER SINCE"], rows[1]["STATE SINCE"]) == ("2023-11-14T22:13:20Z",) * 2
    assert rows[1]["REASON"] == "memory: not?ok"
    called, ended = fleet.log.read_text().splitlines()
    options = "--kubeconfig=/k --context=far --namespace=acc --address=127.0.0.1"
    assert called == f"port-forward {options} deployment/accelplane-fleet :8080"
    assert ended == "ended"


async def test_devices_are_selected_by_node_resource_and_namespace(fleet: Fleet) -> None:
    assert [item["node"] for item in (await fleet.report("--node", "two"))["devices"]] == ["two", "two"]
    assert fleet.requests == ["/api/v1/devices?node=two"]
    assert [item["plugin"] for item in (await fleet.report("--resource", "qat."))["devices"]] == ["qat"]
    assert [item["node"] for item in (await fleet.report("-n", "research"))["devices"]] == ["one"]


async def test_unreadable_parts_of_the_fleet_are_reported_and_the_exit_code_is_1(fleet: Fleet) -> None:
    fleet.listed = FleetDeviceList(
        problem="no answer", problems=(NodeProblem(node="one", problem="no agent with pages"),)
    )
    answer = await fleet.inspect()
    assert answer.returncode == 1
    assert answer.stderr.splitlines() == [
        "accelplane inspect: API server: no answer",
        "accelplane inspect: node one: no agent with pages",
    ]


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (403, b"", "/api/v1/devices: found status 403"),
        (200, b"<html>", "/api/v1/devices: not a list of devices"),
    ],
)
async def test_other_responses_are_errors(fleet: Fleet, status: int, content: bytes, message: str) -> None:
    fleet.status, fleet.content = status, content
    answer = await fleet.inspect()
    assert (answer.returncode, answer.stdout) == (1, "")
    assert message in answer.stderr


async def test_a_port_that_cannot_be_forwarded_is_an_error_with_the_message_of_kubectl(fleet: Fleet) -> None:
    message = 'Error from server (NotFound): deployments.apps "accelplane-fleet" not found'
    fleet.install(message)
    answer = await fleet.inspect()
    assert answer.returncode == 1
    assert answer.stderr == (f"accelplane inspect: kubectl port-forward deployment/accelplane-fleet: {message}\n")
    (fleet.bin / "kubectl").unlink()
    answer = await fleet.inspect()
    assert answer.stderr == "accelplane inspect: kubectl: not found on PATH; install it\n"


async def test_the_fleet_page_serves_the_devices_of_its_snapshot(fleet: Fleet) -> None:
    view = SimulatedFleet(5, now=1764000000)
    screens = Screens(view)
    async with listen(screens, open_gate("127.0.0.1:0"), "127.0.0.1:0") as fleet.port:
        fleet.install()
        answer = await fleet.inspect("-o", "json")
        one = await fleet.inspect("-o", "name", f"--node={min(view.cluster().nodes)}")
    units = {(node.name, unit.unit) for node in view.cluster().nodes.values() for unit in node.units}
    assert len(units) > 5
    assert {(item["node"], item["unit"]) for item in json.loads(answer.stdout)["devices"]} == units
    assert {line.partition("/")[0] for line in one.stdout.splitlines()} == {min(view.cluster().nodes)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "--fleet", "--waiting"], "--waiting: found with --fleet"),
        (["--fleet"], "--fleet: found without --cluster, expected both"),
        (["--cluster", "--fleet-namespace=x"], "--fleet-namespace: found without --fleet, expected both"),
        (["--cluster", "--fleet", "--fleet-namespace=--x"], "expected the name of a namespace"),
        (["--cluster", "--fleet", "-A", "-n", "x"], "-n and -A: found both"),
        (["--cluster", "--fleet", "--sort-by=SPEED"], "--sort-by: found 'SPEED'"),
    ],
)
async def test_contradictory_flags_are_rejected(arguments: list[str], message: str) -> None:
    answer = await asyncio.to_thread(run_command, "accelplane", "inspect", *arguments)
    assert answer.returncode == 2
    assert message in answer.stderr
