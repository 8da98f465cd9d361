"""The agent's HTTP pages for scrapers, probes and administrators."""

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

import pytest
from conftest import Start
from kubelets import Kubelet
from pagereaders import Fixed
from waiting import until

from accelplane.devices import Device, Phase, Resource, Skipped
from accelplane.host import Host
from accelplane.http.messages import PAGE_LIMITS
from accelplane.kubelet.server import Stage
from accelplane.node.health_history import HealthChange, Recoveries
from accelplane.node.settings import ConfigurationError
from accelplane.node.status import NodeStatus, PluginStatus, ResourceCounters, ResourceStatus, ScanStatus, UnitHealth
from accelplane.pages import server as pages
from accelplane.plugins import Plugin, Sample, ScanError
from accelplane.plugins.base import Config

Get = Callable[..., Awaitable[tuple[int, str]]]
Serve = Callable[..., AbstractAsyncContextManager[None]]

METERS = "meters.example.com/meter"
DEVICES = {
    "m0": Device(resource="meter", id="m0", topology=None, attributes={"driver": "wheel"}),
    "m1": Device(resource="meter", id="m1", topology=None, health="Unhealthy", reason="dented"),
}
PLUGIN = PluginStatus(
    name="meters",
    namespace="meters.example.com",
    scan=ScanStatus(completed=True, count=3, failures=1, seconds=0.1234567),
    resources={
        "meter": ResourceStatus(
            name=METERS,
            stage=Stage.REGISTERED,
            devices=DEVICES,
            counters=ResourceCounters(
                registrations=2,
                registration_failures={"UNAVAILABLE": 4},
                lists_sent=5,
                last_list_time=1.0,
                allocations=3,
                allocation_failures=1,
                allocation_buckets=(1, 0, 0, 0, 0, 0, 0, 0, 0, 2),
                allocation_seconds_sum=20.5,
            ),
        )
    },
    health={
        "m1": UnitHealth(
            phase=Phase.UNHEALTHY,
            cause="bus",
            reason="dented",
            unknown="no answer",
            changes=(HealthChange(5.0, Phase.UNHEALTHY, "bus", "dented"),),
            unhealthy_seconds=1.5,
        )
    },
    failures={"bus": 2},
    recoveries=Recoveries((0, 0, 1, 0, 0, 0, 0, 0, 0, 0), 7.0),
    skipped=(Skipped("m2", "bound to another driver"),),
    cdi_writes=6,
    cdi_write_failures=7,
)
HEALTHY = NodeStatus(version="1.2", root="/", kubelet_dir="/kubelet", plugins={"meters": PLUGIN})


@pytest.fixture
def port(unused_tcp_port: int) -> int:
    return unused_tcp_port


@pytest.fixture
def get(port: int) -> Get:
    """`await get("/path")`: status code and body."""

    async def get(path: str, method: str = "GET", raw: bytes | None = None) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw or f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split()[1]), body

    return get


@pytest.fixture
def serve(port: int) -> Serve:
    """`async with serve(status)`: the pages of this status, and of `samples`."""

    def serve(
        status: NodeStatus | Callable[[], NodeStatus] = HEALTHY, samples: Sequence[Sample] = ()
    ) -> AbstractAsyncContextManager[None]:
        return pages.serving(
            f"127.0.0.1:{port}", (lambda: status) if isinstance(status, NodeStatus) else status, Fixed(samples)
        )

    return serve


def values(page: str) -> Mapping[str, float]:
    return {name: float(value) for name, value in re.findall(r"^([a-z_]+(?:\{.*\})?) (\S+)$", page, re.MULTILINE)}


async def test_the_metrics_page_shows_the_whole_status_and_the_measurements(serve: Serve, get: Get) -> None:
    async with serve(samples=[Sample("meter_turns_total", "Turns of the wheel.", {"device": "m0"}, 7)]):
        code, text = await get("/metrics")
    assert code == 200
    found = values(text)
    assert found.pop(f'accelplane_last_list_age_seconds{{resource="{METERS}"}}') > 0
    buckets = {name: found.pop(name) for name in list(found) if "_bucket" in name}
    assert [value for name, value in buckets.items() if "allocation" in name] == [1] * 9 + [3]
    assert [value for name, value in buckets.items() if "recovery" in name] == [0, 0, *[1] * 8]
    assert {name: value for name, value in found.items() if not name.startswith("process_")} == {
        'accelplane_build_info{version="1.2"}': 1,
        "accelplane_config_refused": 0,
        f'accelplane_devices{{health="Healthy",resource="{METERS}"}}': 1,
        f'accelplane_devices{{health="Unhealthy",resource="{METERS}"}}': 1,
        'accelplane_unit_health{phase="healthy",plugin="meters",unit="m1"}': 0,
        'accelplane_unit_health{phase="suspect",plugin="meters",unit="m1"}': 0,
        'accelplane_unit_health{phase="unhealthy",plugin="meters",unit="m1"}': 1,
        'accelplane_unit_health{phase="recovering",plugin="meters",unit="m1"}': 0,
        'accelplane_unit_health_known{plugin="meters",unit="m1"}': 0,
        'accelplane_unit_unhealthy_reason{plugin="meters",reason="bus",unit="m1"}': 1,
        'accelplane_unit_unhealthy_seconds_total{plugin="meters",unit="m1"}': 1.5,
        'accelplane_unit_failures_total{plugin="meters",reason="bus"}': 2,
        'accelplane_unit_recovery_seconds_count{plugin="meters"}': 1,
        'accelplane_unit_recovery_seconds_sum{plugin="meters"}': 7,
        'accelplane_skipped{plugin="meters"}': 1,
        'accelplane_scans_total{plugin="meters"}': 3,
        'accelplane_scan_failures_total{plugin="meters"}': 1,
        'accelplane_scan_seconds{plugin="meters"}': 0.1234567,
        'accelplane_scan_failing{plugin="meters"}': 0,
        'accelplane_cdi_writes_total{plugin="meters"}': 6,
        'accelplane_cdi_write_failures_total{plugin="meters"}': 7,
        f'accelplane_registered{{resource="{METERS}"}}': 1,
        f'accelplane_registrations_total{{resource="{METERS}"}}': 2,
        f'accelplane_registration_failures_total{{reason="UNAVAILABLE",resource="{METERS}"}}': 4,
        f'accelplane_lists_sent_total{{resource="{METERS}"}}': 5,
        f'accelplane_allocation_failures_total{{resource="{METERS}"}}': 1,
        f'accelplane_allocation_seconds_count{{resource="{METERS}"}}': 3,
        f'accelplane_allocation_seconds_sum{{resource="{METERS}"}}': 20.5,
        f'accelplane_resource_allocated{{resource="{METERS}"}}': 0,
        'accelplane_holders_source{source="podresources"}': 0,
        'accelplane_holders_source{source="checkpoint"}': 0,
        'accelplane_holders_source{source="none"}': 1,
        'meter_turns_total{device="m0"}': 7,
    }
    assert found["process_resident_memory_bytes"] > 0


async def test_the_metrics_page_shows_how_long_the_pages_before_it_took(serve: Serve, get: Get) -> None:
    async with serve():
        counts = [
            values((await get("/metrics"))[1]).get('accelplane_page_seconds_count{page="metrics"}') for _ in "abc"
        ]
    assert counts == [None, 1, 2]


async def test_the_time_to_make_a_page_is_that_of_each_page_with_data(serve: Serve, get: Get) -> None:
    paths = {"metrics": "/metrics", "status": "/status"}
    paths |= {name: f"/api/v1/{name}" for name in ("inventory", "readings")}
    async with serve():
        for path in (*paths.values(), "/healthz"):
            await get(path)
        found = values((await get("/metrics"))[1])
    counts = {name: value for name, value in found.items() if name.startswith("accelplane_page_seconds_count")}
    assert counts == {f'accelplane_page_seconds_count{{page="{page}"}}': 1 for page in paths}


async def test_every_page_has_names_that_are_no_utf_8_text(serve: Serve, get: Get) -> None:
    device = Device(resource="meter", id="m0", unit="m\udcff", attributes={"\udcfe": "\udcff"}, topology=None)
    resource = ResourceStatus(name=METERS, devices={"m0": device})
    plugin = PluginStatus(
        name="meters",
        namespace="meters.example.com",
        scan=ScanStatus(completed=True, problem="no \udcff"),
        resources={"meter": resource},
        health={"m\udcff": UnitHealth(phase=Phase.UNHEALTHY, reason="\udcff")},
        skipped=(Skipped("card\udcff", "not \udcff"),),
    )
    status = NodeStatus(version="1", root="/\udcff", kubelet_dir="/k", plugins={"meters": plugin})
    async with serve(status):
        answers = [await get(path) for path in ("/status", "/metrics", "/readyz")]
    assert [code for code, _text in answers] == [200, 200, 503]
    assert json.loads(answers[0][1])["plugins"]["meters"]["skipped"][0]["subject"] == "card?"


async def test_the_status_page_has_these_keys(serve: Serve, get: Get) -> None:
    async with serve():
        code, text = await get("/status")
    assert code == 200
    assert json.loads(text) == {
        "version": "1.2",
        "kubelet-dir": "/kubelet",
        "root": "/",
        "config-problem": "",
        "not-ready": [],
        "skipped-plugins": [],
        "plugins": {
            "meters": {
                "namespace": "meters.example.com",
                "scan": {"problem": "", "scans": 3, "failures": 1, "seconds": 0.123457},
                "resources": {
                    METERS: {
                        "stage": "registered",
                        "problem": "",
                        "devices": [
                            {"id": "m0", "unit": "m0", "health": "Healthy", "reason": "", "numa": None,
                             "attributes": {"driver": "wheel"}},
                            {"id": "m1", "unit": "m1", "health": "Unhealthy", "reason": "dented",
                             "numa": None, "attributes": {}},
                        ],
                    }
                },
                "health": {
                    "m1": {
                        "phase": "unhealthy", "cause": "bus", "reason": "dented", "unknown": "no answer",
                        "warning": "", "warning_cause": "other",
                        "changes": [{"time": 5.0, "phase": "unhealthy", "cause": "bus", "reason": "dented"}],
                        "unhealthy_seconds": 1.5,
                    }
                },
                "skipped": [{"subject": "m2", "reason": "bound to another driver", "warning": False}],
                "problems": [],
            }
        },
        "dra": {},
    }  # fmt: skip


def with_plugin(**changes: object) -> NodeStatus:
    fields = {name: getattr(PLUGIN, name) for name in PLUGIN.__struct_fields__} | changes
    return NodeStatus(version="1", root="/", kubelet_dir="/kubelet", plugins={"meters": PluginStatus(**fields)})


@pytest.mark.parametrize(
    ("status", "healthy", "ready"),
    [
        (HEALTHY, (200, "ok\n"), (200, "ok\n")),
        (with_plugin(crashed=True), (503, "plugin meters crashed\n"), (200, "ok\n")),
        (with_plugin(scan=ScanStatus()), (200, "ok\n"), (503, "meters: first scan not done\n")),
        (
            with_plugin(scan=ScanStatus(completed=True, failing=True, problem="no light")),
            (200, "ok\n"),
            (503, "meters: scan fails: no light\n"),
        ),
        (
            with_plugin(resources={"meter": ResourceStatus(name=METERS, problem="no kubelet")}),
            (200, "ok\n"),
            (503, f"{METERS}: waiting: no kubelet\n"),
        ),
    ],
    ids=["healthy", "crashed", "no-scan", "failing-scan", "unregistered"],
)
async def test_health_and_readiness_report_each_problem(
    serve: Serve, get: Get, status: NodeStatus, healthy: tuple[int, str], ready: tuple[int, str]
) -> None:
    async with serve(status):
        assert await get("/healthz") == healthy
        assert await get("/readyz") == ready


@pytest.mark.parametrize(
    ("path", "method", "code"),
    [("/", "GET", 404), ("/metrics/..", "GET", 404), ("/metrics", "POST", 405), ("/status", "DELETE", 405)],
)
async def test_other_requests_get_an_error_status(serve: Serve, get: Get, path: str, method: str, code: int) -> None:
    async with serve():
        assert (await get(path, method))[0] == code


async def test_a_rejected_method_is_answered_with_the_allowed_ones(serve: Serve, port: int) -> None:
    async with serve():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nAllow: GET, HEAD\r\n" in head


@pytest.mark.parametrize(
    "path", ["/metrics", "/status", "/healthz", "/readyz", "/api/v1/inventory", "/api/v1/readings"]
)
async def test_a_head_request_gets_no_body(serve: Serve, get: Get, path: str) -> None:
    async with serve():
        assert await get(path, "HEAD") == (200, "")


async def test_invalid_requests_and_endless_heads_are_rejected_and_the_pages_stay_available(
    serve: Serve, get: Get
) -> None:
    async with serve():
        assert (await get("", raw=b"\x00\xff\r\n\r\n"))[0] == 400
        with contextlib.suppress(ConnectionResetError):  # the response is lost if the rest of the request is not read
            assert (await get("", raw=b"GET / HTTP/1.1\r\nX: " + b"x" * 200_000))[0] == 431
        assert await get("/healthz") == (200, "ok\n")


async def test_an_exception_while_a_page_is_rendered_becomes_a_500(serve: Serve, get: Get) -> None:
    calls = 0

    def status() -> NodeStatus:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        return HEALTHY

    async with serve(status):
        assert (await get("/status"))[0] == 500
        assert (await get("/status"))[0] == 200


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "127.0.0.1:port", "192.0.2.1:1", ""])
async def test_an_address_that_cannot_be_bound_is_a_configuration_error(serve: Serve, address: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^-http-address: (found )?'?{address}'?[:,] "):
        async with pages.serving(address, lambda: HEALTHY, Fixed()):
            pass


async def test_the_pages_can_be_served_again_immediately(serve: Serve, get: Get) -> None:
    for _ in range(2):
        async with serve():
            assert await get("/healthz") == (200, "ok\n")


async def test_silent_connections_are_limited_and_do_not_block_requests(serve: Serve, get: Get, port: int) -> None:
    async with serve(), contextlib.AsyncExitStack() as stack:
        idle: list[asyncio.StreamReader] = []
        for _ in range(100):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            stack.callback(writer.close)
            idle.append(reader)
        open_sockets = PAGE_LIMITS.connections + PAGE_LIMITS.accept_queue
        await until(lambda: sum(reader.at_eof() for reader in idle) >= len(idle) - open_sockets)
        assert await get("/healthz") == (200, "ok\n")


@pytest.mark.parametrize(("address", "host"), [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", r"\[::1\]")])
async def test_the_log_has_the_port_that_the_kernel_selected(
    caplog: pytest.LogCaptureFixture, address: str, host: str
) -> None:
    if "::1" in address and not socket.has_ipv6:
        pytest.skip("no IPv6")
    caplog.set_level("INFO")
    async with pages.serving(address, lambda: HEALTHY, Fixed()):
        assert re.search(rf"pages at http://{host}:[1-9]\d*$", caplog.text, re.MULTILINE)


class Meters(Plugin[Config]):
    """Two devices, one of them unhealthy, and one that is skipped."""

    namespace = "meters.example.com"
    failing = False

    def scan(self, host: Host) -> Iterator[Device | Resource | Skipped]:
        if self.failing:
            raise ScanError("no light")
        yield from DEVICES.values()
        yield from PLUGIN.skipped


async def test_the_status_of_an_agent_counts_devices_registrations_lists_and_allocations(
    start_agent: Start, kubelet: Kubelet, serve: Serve, get: Get
) -> None:
    agent = await start_agent(meters=Meters())
    await kubelet.until(lambda resources: resources.get(METERS) == (2, 1))
    await kubelet.run_pod("a", {METERS: 1})
    async with serve(agent.status):
        found = values((await get("/metrics"))[1])
    labels = f'resource="{METERS}"'
    assert found[f'accelplane_devices{{health="Healthy",{labels}}}'] == 1
    assert found[f'accelplane_devices{{health="Unhealthy",{labels}}}'] == 1
    assert found[f"accelplane_registered{{{labels}}}"] == 1
    assert found[f"accelplane_registrations_total{{{labels}}}"] == 1
    assert found[f"accelplane_lists_sent_total{{{labels}}}"] >= 1
    assert found[f"accelplane_allocation_seconds_count{{{labels}}}"] == 1
    assert found[f"accelplane_allocation_failures_total{{{labels}}}"] == 0
    assert found['accelplane_skipped{plugin="meters"}'] == 1


async def test_the_readiness_of_an_agent_follows_registration_and_scans(
    start_agent: Start, idle_kubelet: Kubelet, serve: Serve, get: Get
) -> None:
    plugin = Meters()
    agent = await start_agent(meters=plugin)
    async with serve(agent.status):

        async def wait_for_page(text: str) -> bool:
            return text in (await get("/readyz"))[1]

        await until(lambda: wait_for_page(f"{METERS}: waiting: "))
        await idle_kubelet.start()
        await until(lambda: wait_for_page("ok\n"))
        plugin.failing = True
        agent.runners["meters"].scan.request()
        await until(lambda: wait_for_page("meters: scan fails: no light\n"))
        assert await get("/healthz") == (200, "ok\n"), "a restart does not repair a failing scan"
        await idle_kubelet.kill()


@pytest.mark.parametrize(
    ("address", "host", "code"),
    [
        ("127.0.0.1", "Host: attacker.example.com:9400", 421),
        ("localhost", "Host: attacker.example.com", 421),
        ("127.0.0.1", "Host: localhost:9400", 200),
        ("127.0.0.1", "Host: [::1]:9400", 200),
        ("127.0.0.1", "Accept: */*", 200),
        ("", "Host: 10.1.2.3:9400", 200),
    ],
)
async def test_pages_on_the_loopback_interface_are_served_under_names_of_the_own_machine(
    unused_tcp_port: int, address: str, host: str, code: int
) -> None:
    """A page of another site, whose name leads to 127.0.0.1, can read nothing in a browser."""
    status = HEALTHY
    async with pages.serving(f"{address}:{unused_tcp_port}", lambda: status, Fixed()):
        for path in ("/metrics", "/status", "/api/v1/inventory", "/healthz"):
            reader, writer = await asyncio.open_connection("127.0.0.1", unused_tcp_port)
            writer.write(f"GET {path} HTTP/1.1\r\n{host}\r\nConnection: close\r\n\r\n".encode())
            assert (await reader.read()).split()[1] == str(code).encode(), path
            writer.close()
