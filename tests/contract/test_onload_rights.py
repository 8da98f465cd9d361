"""`onload-operator` as a process: warnings of the webhook, metrics, and exactly the rights of its role."""

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from apicalls import ONLOAD, recorded
from kubeapi import KubeApi
from onloadresources import MAPPING, resource
from onloadsetup import NAMES, Setup, app
from processes import Process
from waiting import until
from webhookprograms import files, page, port_of, review

from accelplane.cli import onloadoperator
from accelplane.cli.goflags import parse, with_defaults
from accelplane.onload.program import LEASE
from accelplane.onload.webhooks import PATH

IMAGE = "accelplane/onload-device-plugin:1"
VERSION, NEW = "8.1.2.26", "8.2"
Start = Callable[..., Process]


@pytest.fixture
async def start(api: KubeApi, tmp_path: Path) -> AsyncGenerator[Start]:
    started: list[Process] = []
    kubeconfig, certificate = files(api, tmp_path)

    def run_program(*arguments: str, webhook: bool = True, image: str = IMAGE) -> Process:
        addresses = ["-metrics-bind-address=0", "-health-probe-bind-address=0"]
        if webhook:
            addresses += [certificate, "-port=0", "-shutdown-delay=0"]
        command = ("-m", "accelplane.cli.onloadoperator", kubeconfig, *addresses, *arguments)
        log = tmp_path / f"log{len(started)}"
        environment = {"DEVICE_PLUGIN_IMG": image}
        started.append(Process("python", *command, log=log, env=environment))
        return started[-1]

    yield run_program
    for one in started:
        one.kill()
        await one.exit_code()


@contextlib.asynccontextmanager
async def simulate_cluster(setup: Setup) -> AsyncGenerator[None]:
    task = asyncio.create_task(setup.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not setup.violations


async def test_the_webhook_refuses_and_warns(api: KubeApi, start: Start) -> None:
    Setup(api)
    api.put("onloads", resource("other"))
    process = start()
    port = await port_of(process)
    await process.wait_for_log("all caches are synced")
    refused = await review(port, PATH, resource("mine", onload__version=""), "Onload")
    assert "invalid resource: onload.version is empty" in refused["status"]["message"]
    admitted = await review(port, PATH, resource("mine"), "Onload")
    assert admitted["allowed"]
    assert admitted["warnings"] == ["Onload default/other also selects nodes node-0, node-1; change a selector"]
    assert await process.terminate() == 0


async def test_without_a_certificate_there_is_no_webhook(api: KubeApi, start: Start) -> None:
    setup = Setup(api, nodes=1)
    process = start(webhook=False)
    setup.create()
    async with simulate_cluster(setup):
        await until(lambda: setup.is_ready(VERSION))
    assert "webhooks at port" not in process.log()
    assert await process.terminate() == 0


async def test_metrics_are_for_clients_that_the_cluster_authorizes(api: KubeApi, start: Start) -> None:
    process = start("-metrics-secure", "-metrics-bind-address=127.0.0.1:0")
    port = await port_of(process, "metrics")
    assert (await page(port, "/metrics", secure=True))[0] == 401


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("-metrics-secure", "-metrics-secure: found no certificate"),
        ("-port=70000", "-port: 70000"),
        ("-shutdown-delay=-1", "-shutdown-delay: -1"),
        ("-certificate-secret=A", "-certificate-secret: 'A'"),
    ],
)
def test_wrong_options_name_their_flag(flag: str, message: str) -> None:
    values, _ = parse(onloadoperator.FLAGS, [flag])
    with pytest.raises(ValueError, match=re.escape(message)):
        onloadoperator.options(with_defaults(onloadoperator.FLAGS, values, os.environ), {"DEVICE_PLUGIN_IMG": IMAGE})


# Rights

# Needed after conflicts, which this scenario does not have.
NOT_IN_THE_SCENARIO = {
    ("apps", "daemonsets", "get"),
    ("onload.amd.com", "onloads", "get"),
    ("events.k8s.io", "events", "patch"),
}


async def test_the_operator_makes_the_calls_that_its_role_grants_and_no_others(api: KubeApi, start: Start) -> None:
    setup = Setup(api)
    process = start("-leader-elect", webhook=False)
    await until(lambda: api.get("leases", LEASE, "system") is not None)
    sfc = [{**MAPPING, "sfc": {}}]
    probe = {"verify": {"minReadySeconds": 0, "probe": {"image": "probe:1", "command": ["true"]}}}
    async with simulate_cluster(setup), asyncio.TaskGroup() as tasks:
        task = tasks.create_task(run_probes(api))
        setup.create(onload__kernelMappings=sfc, upgrade=probe)
        await until(lambda: setup.is_ready(VERSION), 60)
        api.put("pods", app("app", "node-0"))
        setup.create(onload__kernelMappings=sfc, upgrade=probe, onload__version=NEW)
        await until(lambda: setup.is_ready(NEW), 60)
        # Without sfc its Module is deleted; another image replaces plugin pods of the same version.
        setup.create(upgrade=probe, onload__version=NEW, devicePlugin__maxPodsPerNode=5)
        await until(lambda: api.get("modules", NAMES.sfc_module, "default") is None, 60)
        await until(lambda: setup.is_ready(NEW), 60)
        setup.delete()
        await until(lambda: setup.onload() is None, 60)
        task.cancel()
    assert await process.terminate() == 0
    assert recorded(api.requests) <= ONLOAD
    assert ONLOAD - recorded(api.requests) <= NOT_IN_THE_SCENARIO


async def run_probes(api: KubeApi) -> None:
    """The scheduler and the kubelet for probe pods."""
    while True:
        for pod in api.all("pods"):
            if "verify" in pod["metadata"]["name"] and pod.get("status", {}).get("phase") != "Succeeded":
                required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
                (node,) = required["nodeSelectorTerms"][0]["matchFields"][0]["values"]
                placed = {**pod["spec"], "nodeName": node}
                api.put("pods", {**pod, "spec": placed, "status": {"phase": "Succeeded"}})
        await asyncio.sleep(0.01)
