"""Applications and demos that request QAT, SGX and other devices."""

import hashlib
import json
import re
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from cluster.product_image import image_configs
from manifests import DEPLOY, REPOSITORY, Object, render


def config_map(name: str, **more: object) -> Object:
    return {"configMap": {"name": name, **more}}


PTEST = {
    "crypto": "--ptest throughput --devtype crypto_qat --optype cipher-only --cipher-algo aes-cbc --cipher-op encrypt"
    " --cipher-key-sz 16 --total-ops 10000000 --burst-sz 32 --buffer-sz 64",
    "compress": "--driver-name=compress_qat --input-file=/var/data/file.txt --seg-sz 8192 --compress-level 1:1:9"
    " --num-iter 10 --extended-input-sz 1048576 --max-num-sgl-segs 16 --huffman-enc fixed",
}
MEMORY: dict[str, tuple[str, Object]] = {
    "hugepage": ("/dev/hugepages", {"emptyDir": {"medium": "HugePages"}}),
    "dpdk-runtime": ("/var/run/dpdk", {"emptyDir": {"medium": "Memory"}}),
}


def expected_qat_pod(kind: str, resource: str, data: str) -> Object:
    amounts = {"cpu": "3", "memory": "128Mi", "hugepages-2Mi": "128Mi", f"qat.intel.com/{resource}": "4"}
    volumes = MEMORY | ({"testfile": ("/var/data/", config_map(data))} if data else {})
    container = {
        "name": f"{kind}-perf",
        "image": "intel/crypto-perf:0.31.1",
        "imagePullPolicy": "IfNotPresent",
        "env": [
            {"name": "TESTCMD", "value": kind},
            {"name": "PTEST", "value": PTEST[kind]},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"add": ["IPC_LOCK"]},
        },
        "resources": {"requests": amounts, "limits": amounts},
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"qat-dpdk-test-{kind}-perf"},
        "spec": {
            "restartPolicy": "Never",
            "containers": [container],
            "volumes": [{"name": name, **volume} for name, (_, volume) in volumes.items()],
        },
    }


def test_the_dpdk_applications_request_devices_cpus_and_huge_pages() -> None:
    found = {each["metadata"]["name"]: each for each in render(DEPLOY / "qat_dpdk_app")}
    (data,) = (name for name in found if name.startswith("test-data-"))
    assert found[data]["data"] == {"file.txt": Path(DEPLOY / "qat_dpdk_app/compress-perf/file.txt").read_text()}
    assert found["qat-dpdk-test-crypto-perf"] == expected_qat_pod("crypto", "cy", "")
    assert found["qat-dpdk-test-compress-perf"] == expected_qat_pod("compress", "dc", data)
    assert len(found) == 3
    for kind in ("crypto", "compress"):
        (alone,) = (each for each in render(DEPLOY / f"qat_dpdk_app/{kind}-perf") if each["kind"] == "Pod")
        assert alone == found[f"qat-dpdk-test-{kind}-perf"]


@pytest.mark.parametrize(("kind", "data"), [("crypto", ""), ("compress", "test-data")])
def test_variants_of_the_dpdk_applications_request_generic_devices(kind: str, data: str) -> None:
    file = DEPLOY / f"qat_dpdk_app/{kind}-perf/{kind}-perf-dpdk-pod-requesting-qat-generic.yaml"
    assert yaml.safe_load(file.read_text()) == expected_qat_pod(kind, "generic", data)


def test_the_file_to_compress_is_reproducible() -> None:
    lines = (DEPLOY / "qat_dpdk_app/compress-perf/file.txt").read_text().splitlines()
    assert lines == [hashlib.sha512(str(number).encode()).hexdigest() for number in range(1600)]


QUOTE = {
    "pccs_url": "https://localhost:8081/sgx/certification/v4/",
    "use_secure_cert": False,
    "pccs_api_version": "3.1",
}


def with_comments(text: str) -> Object:
    return json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))


def one_file(volume: str, name: str, config: str) -> tuple[Object, Object]:
    """A mount of one key of a ConfigMap, and its volume."""
    mount = {"name": volume, "mountPath": f"/etc/{name}", "subPath": name}
    return mount, {"name": volume, "configMap": {"name": config, "items": [{"key": name, "path": name}]}}


@pytest.mark.parametrize("directory", ["sgx_aesmd", "sgx_aesmd/base"])
def test_the_aesmd_demo_has_its_configuration_and_devices(directory: str) -> None:
    found = {each["kind"]: each for each in render(DEPLOY / directory)}
    config = found.pop("ConfigMap")
    assert config["metadata"]["name"] == "sgx-attestation-conf"
    assert config["data"].pop("aesmd.conf") == "default quoting type = ecdsa_256\n"
    assert {name: with_comments(text) for name, text in config["data"].items()} == {"sgx_default_qcnl.conf": QUOTE}
    files = [
        one_file("aesmdconf", "aesmd.conf", "sgx-attestation-conf"),
        one_file("qplconf", "sgx_default_qcnl.conf", "sgx-attestation-conf"),
    ]
    container = {
        "name": "aesmd",
        "image": "intel/sgx-aesmd-demo:devel",
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True},
        "resources": {"limits": {"sgx.intel.com/epc": "1Mi"}},
        "volumeMounts": [mount for mount, _ in files],
    }
    labels = {"app": "intel-sgx-aesmd"}
    template = {
        "metadata": {"labels": labels, "annotations": {"sgx.intel.com/quote-provider": "aesmd"}},
        "spec": {"containers": [container], "volumes": [volume for _, volume in files]},
    }
    assert found == {
        "DaemonSet": {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": {"name": "intel-sgx-aesmd", "labels": labels},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        }
    }


# Directory -> name of the job, quote provider, program, where it runs.
ENCLAVES = {
    "sgx_enclave_apps": ("intelsgx-demo-job", "", "sgx-sample-app/sgx-sample-app", "sgx-sample-app/"),
    "sgx_enclave_apps/base": ("intelsgx-demo-job", "", "sgx-sample-app/sgx-sample-app", "sgx-sample-app/"),
    "sgx_enclave_apps/overlays/sgx_ecdsa_aesmd_quote": (
        "ecdsa-quote-intelsgx-demo-job", "aesmd", "sgx-quote-generation/sgx-quote-generation", "sgx-quote-generation/",
    ),
    "sgx_enclave_apps/overlays/sgx_ecdsa_inproc_quote": (
        "inproc-ecdsa-quote-intelsgx-demo-job", "intelsgx-demo-job-1", "run-dcap-flow", "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("directory", ENCLAVES)
def test_demos_of_enclaves_request_epc_and_devices(directory: str) -> None:
    name, provider, program, where = ENCLAVES[directory]
    found = {each["kind"]: each for each in render(DEPLOY / directory)}
    container: Object = {
        "name": "intelsgx-demo-job-1",
        "image": "intel/sgx-sdk-demo:devel",
        "imagePullPolicy": "IfNotPresent",
        "command": [f"/opt/intel/{program}"],
        "workingDir": f"/opt/intel/{where}",
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True},
        "resources": {"limits": {"sgx.intel.com/epc": "512Ki"}},
    }
    pod: Object = {"restartPolicy": "Never", "containers": [container]}
    if provider == "intelsgx-demo-job-1":
        config = found.pop("ConfigMap")
        assert config["metadata"]["name"].startswith("inproc-sgx-attestation-conf-")
        assert {name: with_comments(text) for name, text in config["data"].items()} == {"sgx_default_qcnl.conf": QUOTE}
        mount, volume = one_file("qplconf", "sgx_default_qcnl.conf", config["metadata"]["name"])
        # The program writes its quote to its own directory.
        container["securityContext"]["readOnlyRootFilesystem"] = False
        container["volumeMounts"] = [mount]
        pod["volumes"] = [volume]
    metadata: Object = {"labels": {"jobgroup": "intelsgx-demo"}}
    if provider:
        metadata["annotations"] = {"sgx.intel.com/quote-provider": provider}
    assert found == {
        "Job": {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, **deepcopy(metadata)},
            "spec": {"template": {"metadata": metadata, "spec": pod}},
        }
    }


def test_templates_of_the_quote_configuration_have_no_comments() -> None:
    templates = [*DEPLOY.rglob("*.template")]
    assert [json.loads(template.read_text()) for template in templates] == [QUOTE, QUOTE]


def test_manifests_and_demos_name_images_that_are_built() -> None:
    text = "".join(file.read_text() for folder in ("deploy", "demo") for file in (REPOSITORY / folder).rglob("*.yaml"))
    used = set(re.findall(r"image: (accelplane/\S+)", text))
    assert used - set(image_configs()) == set()
