"""`intel_deviceplugin_operator` as a process: flags, webhooks, probes, election, end."""

import base64
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from customresources import resource
from kubeapi import KubeApi
from manifests import own_image
from processes import Process, run_main
from waiting import until
from webhookprograms import files, page, port_of, review

from accelplane.admission import deviceconfig
from accelplane.cli import operator
from accelplane.cli.goflags import parse
from accelplane.kube.testing import apply_json_patch

IMAGE = "intel/intel-gpu-plugin:0.31.1"
ADDRESSES = ("-metrics-bind-address=0", "-health-probe-bind-address=0", "-port=0", "-shutdown-delay=0")

Start = Callable[..., Process]


@pytest.fixture
async def start(api: KubeApi, tmp_path: Path) -> AsyncGenerator[Start]:
    started: list[Process] = []
    file_arguments = files(api, tmp_path)

    def run_program(*arguments: str, **environment: str) -> Process:
        command = ("-m", "accelplane.cli.operator", *file_arguments, *ADDRESSES)
        log = tmp_path / f"log{len(started)}"
        started.append(Process("python", *command, *arguments, log=log, env=environment))
        return started[-1]

    yield run_program
    for one in started:
        one.kill()
        await one.exit_code()


async def test_the_program_reconciles_and_ends_at_sigterm(api: KubeApi, start: Start) -> None:
    api.put("nodes", {"metadata": {"name": "one", "labels": {"kubernetes.io/arch": "amd64"}}})
    process = start("--devices=gpu", "--devices", "sgx", "-leader-elect", DEVICEPLUGIN_NAMESPACE="plugins")
    port = await port_of(process)
    await until(lambda: api.get("leases", "d1c7b6d5.intel.com", "system") is not None)
    api.put("gpudeviceplugins", resource("gpu", image=IMAGE))
    await until(lambda: api.get("daemonsets", "intel-gpu-plugin-mine", "plugins") is not None)

    unset = resource("gpu", "other")
    defaulted = await review(port, "/mutate-deviceplugin-intel-com-v1-gpudeviceplugin", unset)
    patch = json.loads(base64.b64decode(defaulted["patch"]))
    whole = apply_json_patch(unset, patch)
    assert whole["spec"]["image"] == own_image("intel-gpu-plugin")
    judged = await review(port, "/validate-deviceplugin-intel-com-v1-gpudeviceplugin", whole)
    assert judged["allowed"]
    assert any("GpuDevicePlugin mine also selects node one" in each for each in judged["warnings"])
    is_refused = await review(
        port, "/validate-deviceplugin-intel-com-v1-gpudeviceplugin", resource("gpu", image="a/b:1.2.3")
    )
    assert is_refused["status"]["code"] == 403
    assert "incorrect image name" in is_refused["status"]["message"]
    off = await review(port, "/validate-deviceplugin-intel-com-v1-qatdeviceplugin", resource("qat"))
    assert "QatDevicePlugin is not enabled" in off["status"]["message"]
    limits = {"sgx.intel.com/epc": "1Mi"}
    pod = {"metadata": {}, "spec": {"containers": [{"name": "a", "resources": {"limits": limits, "requests": limits}}]}}
    assert (await review(port, "/mutate--v1-pod", pod))["patch"]

    assert await process.terminate() == 0
    assert not (api.get("leases", "d1c7b6d5.intel.com", "system") or {})["spec"].get("holderIdentity")


async def test_pods_are_mutated_by_the_mappings_of_their_namespace(api: KubeApi, start: Start) -> None:
    interface, afu = "69528db6eb31577a8c3668f9faa081f6", "d8424dc4a4a3c413f89e433683f9040b"
    function = {"metadata": {"name": "nlb0", "namespace": "here"}}
    api.put("acceleratorfunctions", function | {"spec": {"afuId": afu, "interfaceId": interface, "mode": "region"}})
    process = start("-devices=fpga,gpu")
    port = await port_of(process)
    await process.wait_for_log("all caches are synced")
    limits = {"fpga.intel.com/nlb0": "1"}
    container = {"name": "a", "resources": {"limits": limits, "requests": dict(limits)}}

    async def mutated(namespace: str) -> dict[str, Any]:
        pod = {"metadata": {"namespace": namespace}, "spec": {"containers": [container]}}
        answer = await review(port, "/pods", pod, "Pod")
        return apply_json_patch(pod, json.loads(base64.b64decode(answer["patch"]))) if answer["allowed"] else answer

    (one,) = (await mutated("here"))["spec"]["containers"]
    assert one["resources"]["limits"] == {f"fpga.intel.com/region-{interface}": "1"}
    variables = {"FPGA_REGIONS": "1", "FPGA_REGION_1": interface, "FPGA_AFU_1": afu}
    assert one["env"] == [{"name": name, "value": value} for name, value in variables.items()]
    assert "namespace 'there' has no AcceleratorFunction" in (await mutated("there"))["status"]["message"]
    api.remove("acceleratorfunctions", "nlb0", "here")

    async def is_refused() -> bool:
        return "status" in await mutated("here")

    await until(is_refused)


async def test_pods_without_sgx_are_unchanged(start: Start) -> None:
    port = await port_of(start("-devices=gpu,npu"))
    assert await review(port, "/mutate--v1-pod", {"metadata": {}, "spec": {"containers": []}}) == {"http": 404}


async def test_configurations_of_claims_are_checked(start: Start) -> None:
    port = await port_of(start("-devices=gpu"))
    opaque = {
        "driver": "gpu.intel.com",
        "parameters": {"apiVersion": "gpu.intel.com/v1alpha1", "kind": "GpuConfig", "acess": "vfio"},
    }
    claim = {"spec": {"devices": {"config": [{"opaque": opaque}]}}}
    answer = await review(port, deviceconfig.PATH, claim, "ResourceClaim", "resource.k8s.io")
    assert not answer["allowed"]
    assert "did you mean access?" in answer["status"]["message"]


async def test_an_older_installation_works_without_its_missing_objects(api: KubeApi, start: Start) -> None:
    api.fault("GET .*/npudeviceplugins", 404, times=1_000_000)
    api.fault("GET .*/nodes", 403, times=1_000_000)
    process = start()
    await process.wait_for_log("npudeviceplugins: not served")
    for name in ("one", "two"):
        api.put("gpudeviceplugins", resource("gpu", name, image=IMAGE))
    await until(lambda: len(api.all("daemonsets")) == 2)
    assert process.log().count("nodes may not be listed") == 1
    assert "/api/v1/nodes" not in process.log(), "no request is logged"
    assert await process.terminate() == 0


async def test_a_kind_whose_definition_is_created_later_is_managed_without_a_restart(
    api: KubeApi, start: Start
) -> None:
    unknown = api.fault("GET .*/npudeviceplugins", 503, times=1_000_000)
    process = start("-devices=npu,gpu", "--health-probe-bind-address=127.0.0.1:0")
    health = await port_of(process, "health")
    api.put("gpudeviceplugins", resource("gpu", image=IMAGE))
    await until(lambda: len(api.all("daemonsets")) == 1)
    status, text = await page(health, "/readyz")
    assert (status, "cache npudeviceplugins" in text) == (503, True)
    api.put("npudeviceplugins", resource("npu", image="intel/intel-npu-plugin:0.34.0"))
    unknown.times = 0
    await until(lambda: len(api.all("daemonsets")) == 2, 10)
    assert await page(health, "/readyz") == (200, "ok")


async def test_metrics_need_tls_and_authorization(api: KubeApi, start: Start) -> None:
    token_review = {"metadata": {}, "spec": {}, "status": {"authenticated": True, "user": {"username": "u"}}}
    may = {"metadata": {}, "spec": {}, "status": {"allowed": True}}
    api.fault("POST .*/tokenreviews", 201, times=9, body=json.dumps(token_review).encode())
    api.fault("POST .*/subjectaccessreviews", 201, times=9, body=json.dumps(may).encode())
    port = await port_of(start("--metrics-secure", "--metrics-bind-address=127.0.0.1:0"), "metrics")
    await until(lambda: is_reachable(port, secure=True))
    assert (await page(port, "/metrics", secure=True))[0] == 401
    status, text = await page(port, "/metrics", bearer="t", secure=True)
    assert status == 200
    assert "workqueue_depth" in text


async def is_reachable(port: int, *, secure: bool) -> bool:
    try:
        await page(port, "/healthz", secure=secure)
    except OSError:
        return False
    return True


async def test_the_program_is_ready_when_its_webhooks_are_reachable(start: Start) -> None:
    process = start("-devices=gpu", "--health-probe-bind-address=127.0.0.1:0")
    port = await port_of(process, "health")

    async def is_ready() -> bool:
        return await page(port, "/readyz") == (200, "ok")

    await until(is_ready)
    webhooks = await port_of(process)
    assert (await review(webhooks, "/mutate-deviceplugin-intel-com-v1-gpudeviceplugin", resource("gpu")))["allowed"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-devices=gpu", "-devices=tpu"], 1, "-devices: 'tpu': expected one of dlb, dsa"),
        (["-devices=gpu", "-devices=gpu"], 1, "-devices: 'gpu': found twice, expected once"),
        (["-image-upgrade=yes"], 1, "-image-upgrade: 'yes': expected one of spec, daemonset, off"),
        (["-fpga-resource-naming=old"], 1, "-fpga-resource-naming: 'old': expected one of default, legacy63"),
        (["-image-minimum=new"], 1, "-image-minimum: 'new': expected a version"),
        (
            ["-metrics-bind-address=x"],
            1,
            "-metrics-bind-address: found 'x', expected host:port, for example :8080, or 0",
        ),
        (["-health-probe-bind-address=nowhere.invalid:80"], 1, "health at nowhere.invalid:80: "),
        (["-deviceplugin-namespace=A/b"], 1, "-deviceplugin-namespace: 'A/b': expected a name"),
        (["-certificate-secret=A/b"], 1, "-certificate-secret: 'A/b': expected a name"),
        (["-image-vendor=a b"], 1, "-image-vendor: 'a b': expected"),
        (["-kubeconfig=/etc/passwd"], 1, "/etc/passwd: "),
        (["-port=70000"], 1, "-port: 70000"),
        (["-name-prefix=A_"], 1, "-name-prefix: 'A_': expected the beginning of a name"),
        (["-shutdown-delay=100"], 1, "-shutdown-delay: 100: expected 0 to 60 seconds"),
        (["-cert-dir=/nowhere"], 1, "/nowhere/tls.crt"),
        (["-kubeconfig=/nowhere"], 1, "/nowhere: No such file or directory; expected a kubeconfig; set --kubeconfig"),
        (["-nonsense"], 2, "flag provided but not defined: -nonsense"),
    ],
)
def test_startup_errors_are_reported(tmp_path: Path, arguments: list[str], code: int, words: str) -> None:
    ended = run_main(operator.main, *files(None, tmp_path), *ADDRESSES, *arguments)
    assert ended.returncode == code
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_unknown_command_does_not_run_the_operator(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        operator.main(["rendr", "file.yaml"], "accelplane operator")
    assert ended.value.code == 2
    assert "unexpected argument 'rendr'" in capsys.readouterr().err


def test_flags_and_environment_are_those_of_the_go_operator() -> None:
    parsed, _ = parse(operator.FLAGS, ["--devices=qat", "-devices", "npu", "--deviceplugin-namespace=n", "-v=2"])
    values = {flag.name: flag.default for flag in operator.FLAGS} | parsed
    assert operator.options(values | {"fpga-resource-naming": "legacy63"}, {}).settings.fpga_naming == "legacy63"
    found = operator.options(values, {"DEVICEPLUGIN_SECRET": "s", "INTEL_GPU_PLUGIN_SHA": "x@sha256:0", "HOME": "/"})
    assert found.families == ["qat", "npu"]
    assert (found.settings.namespace, found.settings.pull_secret) == ("n", "s")
    assert found.settings.images.overrides == {"INTEL_GPU_PLUGIN_SHA": "x@sha256:0"}
    assert operator.options(values, {"DEVICEPLUGIN_NAMESPACE": "e"}).settings.namespace == "e"
    assert operator.options(values, {"DEVICEPLUGIN_NAMESPACE": ""}).settings.namespace == "n"


def test_names_of_the_installations_objects_come_from_variables_or_the_prefix() -> None:
    values = {flag.name: flag.default for flag in operator.FLAGS} | {"name-prefix": "mine-"}
    found = operator.options(values, {"WEBHOOK_SERVICE": "x-hooks", "GPU_MANAGER_ROLE": "", "HOME": "/"})
    assert found.settings.gpu_manager_role == "mine-gpu-manager-role"
    assert found.certificate.service == "x-hooks"
    assert found.certificate.configurations == {
        "MutatingWebhookConfiguration": ["mine-mutating-webhook-configuration"],
        "ValidatingWebhookConfiguration": ["mine-validating-webhook-configuration"],
    }
    with pytest.raises(ValueError, match="GPU_MANAGER_ROLE: 'A/b': expected a name"):
        operator.options(values, {"GPU_MANAGER_ROLE": "A/b"})
