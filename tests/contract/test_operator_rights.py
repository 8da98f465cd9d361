"""`intel_deviceplugin_operator` and `intel_fpga_admissionwebhook` make exactly the calls that their roles grant."""

import copy
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from apicalls import (
    FPGA_NAMES,
    LEADER,
    MUTATING,
    OPERATOR,
    OWN_CERTIFICATE,
    SECRET_AGAIN,
    VALIDATING,
    Call,
    recorded,
)
from customresources import sample
from kubeapi import KubeApi, Object
from processes import Process
from waiting import until
from webhookprograms import files, page, port_of

from accelplane.operator import models

pytestmark = pytest.mark.untraced

SECRET, NAMESPACE = "own-certificate", "system"
INTERFACE, AFU = "69528db6eb31577a8c3668f9faa081f6", "d8424dc4a4a3c413f89e433683f9040b"
# An Event is patched when it is repeated after 30 s.
NOT_IN_THE_SCENARIO: set[Call] = {("events.k8s.io", "events", "patch")}

Start = Callable[..., Process]


@pytest.fixture
async def start(api: KubeApi, tmp_path: Path) -> AsyncGenerator[Start]:
    started: list[Process] = []
    file_arguments = files(api, tmp_path)

    def run_program(*command: str, **environment: str) -> Process:
        arguments = (*command, *file_arguments, "-port=0", "-shutdown-delay=0")
        log = tmp_path / f"log{len(started)}"
        started.append(Process("python", "-m", *arguments, log=log, env=environment))
        return started[-1]

    yield run_program
    for one in started:
        one.kill()
        await one.exit_code()


def put_webhooks(api: KubeApi, plural: str, name: str, service: str) -> None:
    client = {"service": {"name": service, "namespace": NAMESPACE}}
    api.put(plural, {"metadata": {"name": name}, "webhooks": [{"name": "a.b.c", "clientConfig": client}]})


def bundles(api: KubeApi) -> list[str]:
    """The CA bundles of all webhooks."""
    found = [*api.all("mutatingwebhookconfigurations"), *api.all("validatingwebhookconfigurations")]
    return [each["webhooks"][0]["clientConfig"].get("caBundle", "") for each in found]


def put_names(api: KubeApi) -> None:
    """Names for FPGAs, and a pod that was not reviewed."""
    about = {"name": "a", "namespace": "n", "generation": 1}
    spec = {"afuId": AFU, "interfaceId": INTERFACE, "mode": "region"}
    api.put("acceleratorfunctions", {"metadata": dict(about), "spec": spec})
    api.put("fpgaregions", {"metadata": dict(about), "spec": {"interfaceId": INTERFACE}})
    api.put("nodes", {"metadata": {"name": "one", "labels": {}}, "status": {"allocatable": {}}})


def old_resources() -> list[Object]:
    """A resource of each kind with an image to upgrade."""
    found = [sample(family) for family in models.KINDS]
    for each in found:
        each["metadata"]["generation"] = 1
        each["spec"]["image"] = each["spec"]["image"].partition(":")[0] + ":0.30.0"
        each["spec"].pop("initImage", None)
    gpu = next(each for each in found if each["kind"] == "GpuDevicePlugin")
    gpu["spec"] |= {"resourceManager": True, "sharedDevNum": 2}
    fpga = next(each for each in found if each["kind"] == "FpgaDevicePlugin")
    fpga["spec"]["dra"] = {}
    qat = next(each for each in found if each["kind"] == "QatDevicePlugin")
    qat["spec"] |= {"provisioningConfig": "functions", "initImage": "intel/intel-qat-initcontainer:0.31.1"}
    return found


def drift(api: KubeApi, thing: Object) -> None:
    changed = copy.deepcopy(thing)
    changed["spec"]["template"]["spec"]["containers"][0]["image"] = "other"
    api.put("daemonsets", changed)


async def test_the_operator_makes_the_calls_that_its_role_grants_and_no_others(api: KubeApi, start: Start) -> None:
    put_webhooks(
        api,
        "mutatingwebhookconfigurations",
        "inteldeviceplugins-mutating-webhook-configuration",
        "inteldeviceplugins-webhook-service",
    )
    put_webhooks(
        api,
        "validatingwebhookconfigurations",
        "inteldeviceplugins-validating-webhook-configuration",
        "inteldeviceplugins-webhook-service",
    )
    put_names(api)
    for each in old_resources():
        api.put(f"{each['kind'].lower()}s", each)
    addresses = ("-metrics-bind-address=0", "-health-probe-bind-address=0")
    process = start(
        "accelplane.cli.operator",
        "-leader-elect",
        f"-certificate-secret={SECRET}",
        *addresses,
        DEVICEPLUGIN_NAMESPACE=NAMESPACE,
        DRA_ROLE="dra-role",
        DRA_STATUS_ROLE="dra-status-role",
    )
    await until(lambda: len(api.all("daemonsets")) == len(models.KINDS) and all(bundles(api)), 60)
    drift(api, api.all("daemonsets")[0])
    await until(lambda: api.count("PATCH .*/daemonsets/") > 0, 60)
    await until(lambda: len(api.all("deviceclasses")) == 2, 60)
    api.put("deviceclasses", copy.deepcopy(api.all("deviceclasses")[0]) | {"spec": {"selectors": []}})
    await until(lambda: api.count("PATCH .*/deviceclasses/") > 0, 60)
    api.put("clusterroles", copy.deepcopy(api.all("clusterroles")[0]) | {"rules": []})
    for each in api.all("daemonsets"):
        drift(api, each)
    await until(lambda: api.count("PUT .*/clusterroles/") > 0, 60)
    api.put("secrets", copy.deepcopy(api.get("secrets", SECRET, NAMESPACE) or {}) | {"data": {}})
    await until(lambda: bool((api.get("secrets", SECRET, NAMESPACE) or {})["data"]), 60)
    for family in models.KINDS:
        for each in list(api.all(f"{family}deviceplugins")):
            api.remove(f"{family}deviceplugins", each["metadata"]["name"])
    await until(lambda: not any(map(api.all, ("daemonsets", "serviceaccounts", "deviceclasses"))), 60)
    expected = OPERATOR | OWN_CERTIFICATE | SECRET_AGAIN | MUTATING | VALIDATING
    assert await process.terminate() == 0
    await read_metrics(
        api,
        start(
            "accelplane.cli.operator",
            "-devices=gpu",
            "-metrics-secure",
            "-metrics-bind-address=127.0.0.1:0",
            addresses[1],
        ),
    )
    assert recorded(api.requests) <= expected
    assert expected - recorded(api.requests) <= NOT_IN_THE_SCENARIO


async def read_metrics(api: KubeApi, process: Process) -> None:
    user = {"authenticated": True, "user": {"username": "prometheus"}}
    for resource, status in (("tokenreviews", user), ("subjectaccessreviews", {"allowed": True})):
        api.fault(f"POST .*/{resource}", 201, body=json.dumps({"status": status}).encode(), times=10)
    status, _ = await page(await port_of(process, "metrics"), "/metrics", bearer="x", secure=True)
    assert status == 200
    assert await process.terminate() == 0


async def test_the_fpga_webhook_makes_the_calls_that_its_role_grants_and_no_others(api: KubeApi, start: Start) -> None:
    put_webhooks(api, "mutatingwebhookconfigurations", "intelfpgawebhook-mutating-webhook-configuration", "x")
    put_names(api)
    start("accelplane", "webhook", "fpga")
    expected = FPGA_NAMES
    await until(lambda: recorded(api.requests) >= expected - NOT_IN_THE_SCENARIO, 60)
    assert recorded(api.requests) <= expected | LEADER
