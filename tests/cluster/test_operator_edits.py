"""Each field of the samples is edited and reverted on a real API server with webhooks: DaemonSets are updated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import yaml
from customresources import resource, sample
from manifests import own_image

from accelplane.operator import models
from accelplane.operator.settings import PLACEHOLDER

from .build import kubernetes_minor
from .installation import CRD, Installation, Object, Operator
from .machine import wait_until

pytestmark = pytest.mark.cluster

_INITS = {"dsa": "idxd-config", "iaa": "idxd-config"}

# The value of a field, and the text that then appears in, or disappears from, the DaemonSet.
Example = tuple[Object, str]
FOR_ALL: Mapping[str, Example] = {
    "image": ({"image": "example.com:5000/x/{image}:0.32.0"}, '"image": "example.com:5000/x/{image}:0.32.0"'),
    "initImage": ({"initImage": "example.com/x/{init}:0.32.0"}, '"image": "example.com/x/{init}:0.32.0"'),
    "logLevel": ({"logLevel": 3}, '"-v", "3"'),
    "nodeSelector": ({"nodeSelector": {"a": "b"}}, '"a": "b"'),
    "podAnnotations": ({"podAnnotations": {"example.com/a": "b"}}, '"annotations": {"example.com/a": "b"}'),
    "priorityClassName": ({"priorityClassName": "system-node-critical"}, '"priorityClassName": "system-node-critical"'),
    "imagePullPolicy": ({"imagePullPolicy": "Always"}, '"imagePullPolicy": "Always"'),
    "imagePullSecrets[].name": ({"imagePullSecrets": [{"name": "mine"}]}, '"imagePullSecrets": [{"name": "mine"}]'),
    "resources.limits": ({"resources": {"limits": {"cpu": "250m"}}}, '"resources": {"limits": {"cpu": "250m"}}'),
    "resources.requests": ({"resources": {"requests": {"cpu": "5m"}}}, '"resources": {"requests": {"cpu": "5m"}}'),
    "tolerations[].key": (
        {"tolerations": [{"key": "k", "operator": "Exists"}]},
        '"tolerations": [{"key": "k", "operator": "Exists"}]',
    ),
    "tolerations[].operator": ({"tolerations": [{"operator": "Exists"}]}, '"tolerations": [{"operator": "Exists"}]'),
    "tolerations[].value": ({"tolerations": [{"key": "k", "value": "v"}]}, '[{"key": "k", "value": "v"}]'),
    "tolerations[].effect": (
        {"tolerations": [{"operator": "Exists", "effect": "NoSchedule"}]},
        '"tolerations": [{"effect": "NoSchedule", "operator": "Exists"}]',
    ),
    "tolerations[].tolerationSeconds": (
        {"tolerations": [{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 7}]},
        '"tolerationSeconds": 7',
    ),
    "updateStrategy.type": ({"updateStrategy": {"type": "OnDelete"}}, '"updateStrategy": {"type": "OnDelete"}'),
    "updateStrategy.rollingUpdate.maxUnavailable": (
        {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}}},
        '"maxUnavailable": "10%"',
    ),
    # It accepts only its default, so setting it has no other effect.
    "updateStrategy.rollingUpdate.maxSurge": (
        {"updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 2}}},
        '"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 2}',
    ),
}
# For all kinds but `generic`, which refuses them.
FOR_CLAIMS: Mapping[str, Example] = {
    "dra.api": ({"dra": {"api": "none"}}, '"-dra-api", "none"'),
    "dra.devices": ({"dra": {"devices": {"0000:03:00.0": "plugin"}}}, '"-dra-api", "dra,0000:03:00.0=plugin"'),
    "dra.deviceStatus": ({"dra": {"deviceStatus": True}}, '"-dra-device-status"'),
    "dra.evict": ({"dra": {"evict": "never"}}, '"-dra-evict", "never"'),
    "dra.manageBinding": ({"dra": {"manageBinding": False}}, '"-dra-manage-binding=false"'),
    "dra.takeOver": ({"dra": {"takeOver": True}}, '"-dra-take-over"'),
}
_PROVISIONING: Example = ({"provisioningConfig": "mine"}, '"name": "mine"')
_SHARED: Example = ({"sharedDevNum": 3}, '"-shared-dev-num", "3"')
OWN: Mapping[str, Mapping[str, Example]] = {
    "dlb": {},
    "dsa": {
        "driver": ({"driver": "vfio-pci"}, '"-driver", "vfio-pci"'),
        "provisioningConfig": _PROVISIONING,
        "sharedDevNum": _SHARED,
    },
    "fpga": {"mode": ({"mode": "regiondevel"}, '"-mode", "regiondevel"')},
    "generic": {
        "cdi": ({"cdi": "all"}, '"--cdi", "all"'),
        "devices": (
            {"devices": [{"name": "fuse", "groups": [{"paths": [{"path": "/dev/fuse"}]}]}]},
            # JSON within JSON
            r'"--device", "{\"name\":\"fuse\",\"groups\":[{\"paths\":[{\"path\":\"/dev/fuse\"}]}]}"',
        ),
        "domain": ({"domain": "other.example"}, '"--domain", "other.example"'),
        "preferredAllocationPolicy": ({"preferredAllocationPolicy": "packed"}, '"--allocation-policy", "packed"'),
    },
    "gpu": {
        "allowIDs": ({"allowIDs": "0x56c0,0x56c1"}, '"-allow-ids", "0x56c0,0x56c1"'),
        "bypathMode": ({"bypathMode": "all"}, '"-bypath", "all"'),
        "denyIDs": ({"denyIDs": "0x56c0"}, '"-deny-ids", "0x56c0"'),
        "enableMonitoring": ({"enableMonitoring": False}, '"-enable-monitoring"'),
        "healthManagement": ({"healthManagement": True}, '"-health-management"'),
        "levelZeroImage": ({"levelZeroImage": "x/intel-gpu-levelzero:0.32.0"}, '"x/intel-gpu-levelzero:0.32.0"'),
        "monitoringMode": ({"monitoringMode": "single"}, '"-monitoring-mode=single"'),
        "preferredAllocationPolicy": ({"preferredAllocationPolicy": "packed"}, '"-allocation-policy", "packed"'),
        "resourceManager": ({"resourceManager": True}, '"-resource-manager"'),
        "sharedDevNum": _SHARED,
        "xpumdEndpoint": ({"xpumdEndpoint": "/run/xpumd/socket"}, '"-xpumd-endpoint=/run/xpumd/socket"'),
    },
    "iaa": {"provisioningConfig": _PROVISIONING, "sharedDevNum": _SHARED},
    "npu": {"sharedDevNum": _SHARED},
    "qat": {
        "dpdkDriver": ({"dpdkDriver": "igb_uio"}, '"-dpdk-driver", "igb_uio"'),
        "kernelVfDrivers": ({"kernelVfDrivers": ["c6xxvf", "6xxxvf"]}, '"-kernel-vf-drivers", "c6xxvf,6xxxvf"'),
        "maxNumDevices": ({"maxNumDevices": 7}, '"-max-num-devices", "7"'),
        "preferredAllocationPolicy": ({"preferredAllocationPolicy": "packed"}, '"-allocation-policy", "packed"'),
        "provisioningConfig": _PROVISIONING,
    },
    "sgx": {
        "dcapInfraResources": ({"dcapInfraResources": True}, '"-dcap-infra-resources"'),
        "enclaveLimit": ({"enclaveLimit": 7}, '"-enclave-limit", "7"'),
        "provisionLimit": ({"provisionLimit": 7}, '"-provision-limit", "7"'),
    },
}

# Rejected edits of a sample, and their messages.
REFUSED: tuple[tuple[str, Object, str], ...] = (
    ("dlb", {"image": "intel/intel-dlb-plugin"}, "image field is incorrect"),
    ("dlb", {"image": "intel/intel-dsa-plugin:0.31.1"}, "image has an incorrect image name"),
    ("dlb", {"image": "intel/intel-dlb-plugin:latest"}, "expected a valid SHA digest"),
    ("dlb", {"image": "intel/intel-dlb-plugin:0.31.0"}, f"expected 0.31.1 or newer; set image to {PLACEHOLDER}/"),
    ("dlb", {"initImage": "intel/intel-qat-initcontainer:0.31.1"}, "initImage has an incorrect image name"),
    ("dsa", {"provisioningConfig": "mine", "initImage": None}, "provisioningConfig is mine and initImage is empty"),
    ("dsa", {"driver": "uio"}, "spec.driver: Unsupported value"),
    ("dsa", {"sharedDevNum": 0}, "spec.sharedDevNum"),
    ("fpga", {"initImage": "intel/intel-fpga-plugin:0.31.1"}, "initImage has an incorrect image name"),
    ("fpga", {"mode": "afu"}, "spec.mode: Unsupported value"),
    ("generic", {"dra": {}, "domain": ".".join("a" * 40)}, "because it is the name of the driver with dra"),
    ("generic", {"devices": []}, "devices is empty, expected one resource or more"),
    ("generic", {"devices": [{"name": "a"}]}, "spec.devices[0].groups: Required value"),
    ("generic", {"devices": [{"name": "a", "groups": [{}]}]}, "expected one of paths, usb, pci and rdma in a group"),
    ("gpu", {"sharedDevNum": 1, "preferredAllocationPolicy": "packed"}, "preferredAllocationPolicy is packed"),
    ("gpu", {"sharedDevNum": 1, "resourceManager": True}, "resourceManager is true and sharedDevNum is 1"),
    ("gpu", {"allowIDs": "0X56C0"}, "allowIDs is "),
    ("gpu", {"denyIDs": "0x56c0, 0x56c1"}, "denyIDs is "),
    ("gpu", {"allowIDs": "0x56c0", "denyIDs": "0x56c1"}, "allowIDs is 0x56c0 and denyIDs is 0x56c1"),
    ("gpu", {"healthManagement": True, "xpumdEndpoint": "/run/x/y"}, "healthManagement is true"),
    ("gpu", {"xpumdEndpoint": "/run/../x"}, "xpumdEndpoint is /run/../x"),
    ("gpu", {"levelZeroImage": "intel/levelzero:0.31.1"}, "levelZeroImage has an incorrect image name"),
    ("iaa", {"initImage": "intel/intel-iaa-initcontainer:0.31.1"}, "initImage has an incorrect image name"),
    ("npu", {"logLevel": -1}, "spec.logLevel"),
    ("qat", {"provisioningConfig": "mine", "kernelVfDrivers": ["c6xxvf"]}, "kernelVfDrivers is c6xxvf"),
    ("qat", {"kernelVfDrivers": ["i915"]}, "Unsupported value"),
    ("sgx", {"initImage": "intel/intel-sgx-initcontainer:latest"}, "initImage field is incorrect"),
    ("sgx", {"nodeSelector": {"a b": "c"}}, "nodeSelector has the key 'a b'"),
    ("sgx", {"imagePullPolicy": "Sometimes"}, "spec.imagePullPolicy: Unsupported value"),
    ("sgx", {"imagePullSecrets": [{"name": "A"}]}, "imagePullSecrets[0].name is 'A'"),
    ("sgx", {"podAnnotations": {"a b": "c"}}, "podAnnotations has the key 'a b'"),
    ("sgx", {"priorityClassName": "A"}, "priorityClassName is 'A'"),
    ("sgx", {"resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "2"}}}, "resources.requests[cpu] is '2'"),
    ("sgx", {"resources": {"limits": {"cpu": "much"}}}, "resources.limits"),
    ("sgx", {"tolerations": [{"key": "k", "operator": "Exists", "value": "v"}]}, "tolerations[0].value is 'v'"),
    ("sgx", {"tolerations": [{"operator": "Exists", "tolerationSeconds": 7}]}, "tolerations[0].tolerationSeconds is 7"),
    ("sgx", {"updateStrategy": {"rollingUpdate": {"maxSurge": 1}}}, "updateStrategy.rollingUpdate.maxSurge is 1"),
    (
        "sgx",
        {"updateStrategy": {"rollingUpdate": {"maxUnavailable": 0}}},
        "maxUnavailable is 0, expected a number",
    ),
    ("sgx", {"updateStrategy": {"type": "OnDelete", "rollingUpdate": {"maxSurge": 0}}}, "updateStrategy"),
)


def fields_of(schema: Object, path: str) -> Iterator[str]:
    """The paths of a schema's fields that have no fields themselves."""
    if "properties" in schema:
        for name, inner in schema["properties"].items():
            yield from fields_of(inner, f"{path}.{name}" if path else name)
    elif "properties" in schema.get("items", {}):
        yield from fields_of(schema["items"], f"{path}[]")
    else:
        yield path


@cache
def fields(family: str) -> list[str]:
    """All spec fields in the definition of a kind."""
    definition = yaml.safe_load((CRD / "bases" / f"deviceplugin.intel.com_{family}deviceplugins.yaml").read_text())
    (version,) = definition["spec"]["versions"]
    found = fields_of(version["schema"]["openAPIV3Schema"]["properties"]["spec"], "")
    if family == "generic":
        # A generic device with all of its fields is one argument.
        found = ("devices" if field.startswith("devices[]") else field for field in found if field not in FOR_CLAIMS)
    return [*dict.fromkeys(found)]


def examples(family: str) -> Mapping[str, Example]:
    return {**FOR_ALL, **({} if family == "generic" else FOR_CLAIMS), **OWN[family]}


def example(family: str, field: str) -> Example:
    known = examples(family)
    assert field in known, f"{field} is a field of {family}, without an example of an edit"
    images = {"{image}": f"intel-{family}-plugin", "{init}": f"intel-{_INITS.get(family, family)}-initcontainer"}
    text = json.dumps(known[field])
    for place, image in images.items():
        text = text.replace(place, image)
    change, shows = json.loads(text)
    return change, shows


def inverse_patch(change: Object, original: Object) -> Object:
    """The merge patch that reverts another one."""
    return {
        name: inverse_patch(value, original[name])
        if isinstance(value, dict) and name in original
        else original.get(name)
        for name, value in change.items()
    }


def desired_part(daemonset: Object) -> Object:
    """The desired part of a DaemonSet."""
    spec = json.loads(json.dumps(daemonset["spec"]))
    pod = spec["template"]["spec"]
    for name in ("serviceAccount", "serviceAccountName"):
        # After another account was set, the default must be set explicitly.
        if pod.get(name) == "default":
            del pod[name]
    return spec


def has_text(daemonset: Object, text: str) -> bool:
    return text in json.dumps(daemonset["spec"], sort_keys=True)


@pytest.fixture(scope="module")
def operator(installation: Installation) -> Iterator[Operator]:
    """An operator with webhooks, and all samples reconciled."""
    installation.configure_webhooks()
    roles = {"DRA_ROLE": "view", "DRA_STATUS_ROLE": "view"}  # roles that exist
    with installation.operator(**roles) as running, installation.one_connection():
        installation.configure_webhooks(running)
        installation.wait_webhooks()
        for family in models.KINDS:
            installation.create(sample(family))
        yield running


def test_every_field_of_every_kind_has_an_example() -> None:
    for family in models.KINDS:
        assert examples(family).keys() - {"initImage"} <= {*fields(family)}
        for field in fields(family):
            assert all(example(family, field))


@pytest.mark.by_turns
@pytest.mark.parametrize("field", sorted({field for family in models.KINDS for field in fields(family)}))
def test_an_edit_and_its_reversal_change_the_daemonsets(
    installation: Installation, operator: Operator, field: str
) -> None:
    edited = {family: f"{family}deviceplugin-sample" for family in models.KINDS if field in fields(family)}
    before = {family: installation.wait_reconciled(family, name) for family, name in edited.items()}
    original = {family: installation.resource(family, name)["spec"] for family, name in edited.items()}

    for family, name in edited.items():
        installation.edit(family, name, **example(family, field)[0])
    for family, name in edited.items():
        after, shows = installation.wait_reconciled(family, name), example(family, field)[1]
        assert has_text(after, shows) != has_text(before[family], shows), (family, after["spec"])
        assert after["metadata"]["uid"] == before[family]["metadata"]["uid"], family

    for family, name in edited.items():
        installation.edit(family, name, **inverse_patch(example(family, field)[0], original[family]))
    for family, name in edited.items():
        assert desired_part(installation.wait_reconciled(family, name)) == desired_part(before[family]), family


def test_forbidden_operations_are_rejected_and_change_nothing(installation: Installation, operator: Operator) -> None:
    before = {family: installation.wait_reconciled(family, f"{family}deviceplugin-sample") for family in models.KINDS}
    for family, change, words in REFUSED:
        code, answer = installation.patch(family, f"{family}deviceplugin-sample", change)
        assert code in (403, 422), (family, change, answer)
        assert words in answer["message"], (family, change)
    for family, daemonset in before.items():
        assert desired_part(installation.daemonset(family, f"{family}deviceplugin-sample")) == desired_part(daemonset)


def test_missing_fields_get_their_defaults(installation: Installation, operator: Operator) -> None:
    specs: dict[str, Any] = {family: installation.create(resource(family, "bare"))["spec"] for family in models.KINDS}
    for family, spec in specs.items():
        assert spec["image"] == own_image(f"intel-{family}-plugin")
    assert [family for family, spec in specs.items() if "initImage" in spec] == ["fpga"]
    for family in models.KINDS:
        installation.wait_reconciled(family, "bare")
        installation.delete(family, "bare")
    wait_until(lambda: len(installation.daemonsets()) == len(models.KINDS), "only DaemonSets of the samples", 60)


CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
INTERFACE, AFU = "69528db6eb31577a8c3668f9faa081f6", "d8424dc4a4a3c413f89e433683f9040b"


def test_names_of_fpgas_have_device_classes_while_the_resource_is_for_claims(
    installation: Installation, operator: Operator
) -> None:
    if kubernetes_minor() < 34:
        pytest.skip("resource.k8s.io/v1 needs Kubernetes 1.34")
    cluster, sample_name = installation.cluster, "fpgadeviceplugin-sample"
    function = {"afuId": AFU, "interfaceId": INTERFACE, "mode": "af"}
    mappings = {("AcceleratorFunction", "f"): function, ("FpgaRegion", "r"): {"interfaceId": INTERFACE}}
    for (kind, name), spec in mappings.items():
        metadata = {"name": name, "namespace": "default"}
        cluster.apply({"apiVersion": "fpga.intel.com/v2", "kind": kind, "metadata": metadata, "spec": spec})
    function_class = f"{CLASSES}/af-{INTERFACE}-{AFU}.fpga.intel.com"
    region_class = f"{CLASSES}/region-{INTERFACE}.fpga.intel.com"
    foreign = {"metadata": {"name": region_class.rpartition("/")[2]}, "spec": {}}
    status, answer = cluster.request("POST", CLASSES, foreign)
    assert status == 201, answer

    installation.edit("fpga", sample_name, dra={})
    try:
        wait_until(lambda: cluster.get(function_class) is not None, "the class of the function")
        installation.wait_condition(
            "fpga", sample_name, "DeviceClassConflict", holds=True, words="without a controller"
        )
        found = cluster.get(function_class) or {}
        # On 1.34 and 1.35 the gate DRAExtendedResource is off, and the API server drops the name.
        if kubernetes_minor() >= 36:
            assert found["spec"]["extendedResourceName"].startswith("fpga.intel.com/af-695.d84.")
        assert INTERFACE in found["spec"]["selectors"][0]["cel"]["expression"]
        cluster.kubectl("delete", "deviceclass", foreign["metadata"]["name"])
        wait_until(lambda: "ownerReferences" in str(cluster.get(region_class)), "the class of the region")
        cluster.kubectl("delete", "acceleratorfunction", "f")
        wait_until(lambda: cluster.get(function_class) is None, "the deletion of the class of the function")
    finally:
        installation.edit("fpga", sample_name, dra=None)
    wait_until(lambda: cluster.get(region_class) is None, "the deletion of the other class")
    cluster.kubectl("delete", "fpgaregion", "r")
