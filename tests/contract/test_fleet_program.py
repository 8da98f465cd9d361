"""The fleet server as a program, with the double of the API server."""

import asyncio
import json
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from cluster.pki import Authority
from fleetagents import AgentDouble, node
from fleetpages import Caller, web_token
from kubeapi import KubeApi, kube_api
from waiting import until

from accelplane.fleet.options import FleetOptions, PageOptions
from accelplane.fleet.program import run
from accelplane.http.servingtls import CertificateError


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@asynccontextmanager
async def program(api: KubeApi, pages: PageOptions) -> AsyncIterator["asyncio.Task[None]"]:
    running = asyncio.create_task(run(FleetOptions(loopback_agents=True), pages, api.config))
    try:
        yield running
    finally:
        if not running.done():
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            await running


async def test_the_program_serves_pages_probes_and_metrics_until_it_is_terminated() -> None:
    pages = PageOptions(address=f"127.0.0.1:{free_port()}", health_address=f"127.0.0.1:{free_port()}")
    caller = Caller(int(pages.address.rpartition(":")[2]))
    health = Caller(int(pages.health_address.rpartition(":")[2]))
    async with kube_api() as api, AgentDouble("n1").serving() as agent:
        api.put("nodes", node("n1"))
        api.put("nodes", node("bare", 3))
        api.put("pods", agent.pod())
        async with program(api, pages):

            async def ready() -> bool:
                try:
                    return (await health.get("/readyz")).status == 200
                except OSError:
                    return False

            async def connected() -> bool:
                return "card1" in (await caller.get("/node?node=n1")).text

            await until(ready, 60)
            await until(connected, 60)
            assert (await health.get("/healthz")).status == 200
            bare = (await caller.get("/node?node=bare")).text
            assert "No agent with pages runs on this node" in bare
            assert "No container requests any." in bare
            metrics = (await caller.get("/metrics")).text
            for expected in (
                'accelplane_fleet_nodes{state="connected"} 1.0', 'accelplane_fleet_nodes{state="no_agent"} 1.0',
                'accelplane_fleet_agents{state="connected"} 1.0', "accelplane_fleet_viewers 0.0",
                "accelplane_fleet_generation ", "accelplane_fleet_inventory_seconds_count",
                "accelplane_fleet_inventory_bytes_sum", "rest_client_requests_total",
            ):  # fmt: skip
                assert expected in metrics
        with pytest.raises(OSError, match="Connect call failed"):
            await caller.get("/")


async def test_the_soft_limit_of_open_files_does_not_limit_the_agents(tmp_path: Path) -> None:
    command = os.path.join(os.path.dirname(sys.executable), "accelplane")
    async with kube_api() as api:
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "here"}}],
            "clusters": [{"name": "here", "cluster": {"server": api.url}}],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        process = await asyncio.create_subprocess_exec(
            "/bin/sh", "-c", 'ulimit -Sn 256; ulimit -Hn 2048; exec "$@"', "sh", command, "fleet",
            f"-address=127.0.0.1:{free_port()}", "-health-probe-bind-address=0", f"-kubeconfig={tmp_path}/kubeconfig",
        )  # fmt: skip

        async def raised() -> bool:
            return resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (2048, 2048)

        try:
            await until(raised, 60)
        finally:
            process.terminate()
            await process.wait()


async def test_a_port_in_use_is_reported_with_its_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with kube_api() as api:
            with pytest.raises(OSError, match=f"pages at {address}: "):
                await run(FleetOptions(), PageOptions(address=address, health_address=""), api.config)


API = "https://kubernetes.default.svc"


@pytest.mark.parametrize(
    ("agent", "own", "expected"),
    [
        (web_token({"exp": 9, "aud": [API]}), web_token({"exp": 9, "aud": [API, "k3s"]}), True),
        (web_token({"exp": 9, "aud": ""}), None, True),
        (web_token({"exp": 9, "aud": ["accelplane-agent"]}), web_token({"aud": [API]}), False),
        (web_token({"exp": 9, "aud": ["accelplane-agent"]}), None, False),
        ("opaque", web_token({"exp": 9, "aud": [API]}), False),
    ],
    ids=["same audience", "no audience", "own audience", "outside the cluster", "another format"],
)
async def test_a_token_for_agents_that_the_api_server_accepts_is_reported(
    agent: str, own: str | None, expected: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text(f"{agent}\n")
    (tmp_path / "own").write_text(own or "")
    options = FleetOptions(agent_token=str(tmp_path / "token"))
    async with kube_api() as api:
        config = msgspec.structs.replace(api.config, token=str(tmp_path / "own") if own else None)
        with socket.create_server(("127.0.0.1", 0)) as used:
            pages = PageOptions(address=f"127.0.0.1:{used.getsockname()[1]}", health_address="")
            with pytest.raises(OSError, match="pages at"):
                await run(options, pages, config)
    assert ("is valid for the API server" in caplog.text) is expected


async def test_a_certificate_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    pages = PageOptions(address="", secure_address="127.0.0.1:0", health_address="", tls_directory=str(tmp_path))
    async with kube_api() as api:
        with pytest.raises(CertificateError, match=r"tls\.crt"):
            await run(FleetOptions(), pages, api.config)
        authority = Authority("a")
        credentials = authority.server("x")
        (tmp_path / "tls.crt").write_bytes(credentials.certificate)
        (tmp_path / "tls.key").write_bytes(credentials.key)
        port = free_port()
        context = ssl.create_default_context(cadata=authority.credentials.certificate.decode())

        async def accepts() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="x")
            except ConnectionError:
                return False
            writer.close()
            return True

        async with program(api, msgspec.structs.replace(pages, secure_address=f"127.0.0.1:{port}")):
            await until(accepts, 60)
