"""`onload-operator` as a process: flags, environment, election, webhook, and as a part of the other operator."""

import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from kubeapi import KubeApi
from onloadresources import resource
from onloadsetup import Setup, definition, node
from processes import Process
from waiting import until
from webhookprograms import files, port_of, review

from accelplane.cli.onloadoperator import translated

Start = Callable[..., Process]
IMAGE = "registry/onload-device-plugin:1"


@pytest.fixture
async def start(api: KubeApi, tmp_path: Path) -> AsyncGenerator[Start]:
    started: list[Process] = []
    file_arguments = files(api, tmp_path)

    def run_program(*arguments: str, module: str = "onloadoperator", image: str = IMAGE) -> Process:
        addresses = ("-metrics-bind-address=0", "-health-probe-bind-address=0", "-port=0")
        words = [each for each in file_arguments if module == "operator" or not each.startswith("-cert-dir")]
        command = ("-m", f"accelplane.cli.{module}", *words, *addresses, *arguments)
        log = tmp_path / f"log{len(started)}"
        started.append(Process("python", *command, log=log, env={"DEVICE_PLUGIN_IMG": image}))
        return started[-1]

    yield run_program
    for one in started:
        one.kill()
        await one.exit_code()


def prepare(api: KubeApi) -> Setup:
    setup = Setup(api, nodes=1)
    setup.create()
    return setup


async def test_the_program_elects_a_leader_reconciles_and_ends_at_sigterm(api: KubeApi, start: Start) -> None:
    setup = prepare(api)
    process = start("--leader-elect", "-zap-log-level=debug", "--zap-devel=false")
    await until(lambda: api.get("leases", "daabde26.amd.com", "system") is not None)
    await until(lambda: setup.labels("node-0").get(setup.names.module_label) == "8.1.2.26")
    created = api.get("daemonsets", setup.names.daemonset, "default") or {}
    assert created["spec"]["template"]["spec"]["containers"][0]["image"] == IMAGE
    assert await process.terminate() == 0
    assert not (api.get("leases", "daabde26.amd.com", "system") or {})["spec"].get("holderIdentity")


async def test_a_missing_device_plugin_image_ends_the_program(api: KubeApi, start: Start) -> None:
    process = start(image="")
    assert await process.exit_code() == 1
    assert "DEVICE_PLUGIN_IMG: is empty or not set" in process.log()
    assert not api.requests


@pytest.mark.parametrize(
    ("flag", "status"), [("-unknown", 2), ("-zap-encoder=xml", 1), ("-zap-log-level=loud", 1), ("-port=99999", 1)]
)
async def test_wrong_flags_are_reported(start: Start, flag: str, status: int) -> None:
    process = start(flag)
    assert await process.exit_code() == status
    assert flag.partition("=")[0].lstrip("-") in process.log()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"zap-encoder": "json"}, {"log-format": "json"}),
        ({"zap-encoder": "console"}, {"log-format": "text"}),
        ({"zap-log-level": "debug"}, {"v": 1}),
        ({"zap-log-level": "4"}, {"v": 4}),
        ({"zap-log-level": "4", "v": 2}, {"v": 2}),
        ({}, {}),
    ],
)
def test_flags_of_zap_correspond_to_ours(flags: dict[str, str], expected: dict[str, str]) -> None:
    assert expected.items() <= translated(flags).items()


async def test_the_webhook_validates_resources(api: KubeApi, start: Start, tmp_path: Path) -> None:
    api.put("nodes", node("node-0"))
    cert = next(each for each in files(api, tmp_path) if each.startswith("-cert-dir"))
    port = await port_of(start(cert))
    path = "/validate-onload-amd-com-v1alpha1-onload"
    assert (await review(port, path, resource()))["allowed"]
    refused = await review(port, path, resource(onload__version=""))
    assert "onload.version is empty" in json.dumps(refused)


async def test_the_operator_of_the_other_plugins_can_host_it(api: KubeApi, start: Start) -> None:
    setup = prepare(api)
    api.put("customresourcedefinitions", definition())
    process = start("-onload", "-devices=gpu", "-shutdown-delay=0", module="operator")
    await until(lambda: setup.labels("node-0").get(setup.names.module_label) == "8.1.2.26")
    assert api.count("WATCH .*/nodes") == 1, "both products share a watch"
    assert await process.terminate() == 0
    assert await start("-onload", module="operator", image="").exit_code() == 1


async def test_the_hosting_operator_does_its_other_work_without_the_kind(api: KubeApi, start: Start) -> None:
    api.fault("(GET|WATCH) .*/onloads", 404, times=1_000_000)
    process = start("-onload", "-devices=gpu", "-shutdown-delay=0", module="operator")
    await process.wait_for_log("all caches are synced")
    assert "onloads: not served" in process.log()
    assert await process.terminate() == 0
