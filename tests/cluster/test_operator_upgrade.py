"""Existing objects on a real API server: older images, image variables, DaemonSets of the Go operator."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from customresources import resource

from .installation import NAMESPACE, Installation, Object
from .machine import wait_until

pytestmark = pytest.mark.cluster

OVERRIDDEN = "ImageOverridden"
OLD = {"image": "example.com/x/intel-qat-plugin:0.28.0", "initImage": "example.com/x/intel-qat-initcontainer:0.28.0"}
NEW = {"image": "example.com/x/intel-qat-plugin:0.31.1", "initImage": "example.com/x/intel-qat-initcontainer:0.31.1"}
PINNED = f"example.com/y/intel-qat-plugin@sha256:{'0' * 64}"
# The field manager of the Go operator.
GO = "intel_deviceplugin_operator"


@pytest.fixture(autouse=True)
def clean(installation: Installation) -> Iterator[None]:
    """Leaves no custom resource, no DaemonSet and no webhook behind."""
    yield
    installation.delete_all()


def runs(installation: Installation) -> Object:
    """The images of the DaemonSet, by field of the resource."""
    daemonset = installation.daemonset("qat", "one")
    if not daemonset:
        return {}
    pod = daemonset["spec"]["template"]["spec"]
    (init,) = pod["initContainers"]
    return {"image": pod["containers"][0]["image"], "initImage": init["image"]}


def image_fields(installation: Installation) -> Object:
    """The images of the resource."""
    spec = installation.resource("qat", "one")["spec"]
    return {name: spec[name] for name in ("image", "initImage")}


def effective(installation: Installation) -> Object:
    """The images that differ from the resource, from the status."""
    status = installation.resource("qat", "one")["status"]
    names = {"effectiveImage": "image", "effectiveInitImage": "initImage"}
    return {names[name]: value for name, value in status.items() if name in names}


def wait_running(installation: Installation, images: Object) -> None:
    wait_until(lambda: runs(installation) == images, f"a DaemonSet with {images}", 60)


@pytest.mark.parametrize(
    ("upgrade", "spec", "run", "expected"),
    [("spec", NEW, NEW, {}), ("daemonset", OLD, NEW, NEW), ("off", OLD, OLD, {})],
)
def test_older_images_of_existing_resources_are_upgraded_as_the_flag_selects(
    installation: Installation, upgrade: str, spec: Object, run: Object, expected: Object
) -> None:
    installation.create(resource("qat", "one", **OLD))
    with installation.operator(f"-image-upgrade={upgrade}"):
        wait_running(installation, run)
        installation.wait_condition("qat", "one", OVERRIDDEN, holds=bool(expected), words=expected.get("image", ""))
        assert image_fields(installation) == spec
        assert effective(installation) == expected


def test_an_image_of_the_environment_applies_while_the_variable_is_set(installation: Installation) -> None:
    installation.create(resource("qat", "one", **NEW))
    with installation.operator("-image-upgrade=daemonset", INTEL_QAT_PLUGIN_SHA=PINNED):
        wait_running(installation, NEW | {"image": PINNED})
        installation.wait_condition(
            "qat", "one", OVERRIDDEN, holds=True, words="from INTEL_QAT_PLUGIN_SHA of the operator"
        )
        assert effective(installation) == {"image": PINNED}
        assert image_fields(installation) == NEW
    with installation.operator("-image-upgrade=daemonset"):
        wait_running(installation, NEW)
        installation.wait_condition("qat", "one", OVERRIDDEN, holds=False)
        assert effective(installation) == {}


def test_an_image_of_the_environment_is_written_into_the_resource_and_admitted(installation: Installation) -> None:
    installation.create(resource("qat", "one", **OLD))
    with installation.process(INTEL_QAT_PLUGIN_SHA=PINNED) as operator:
        installation.configure_webhooks(operator)
        operator.start()
        wait_running(installation, NEW | {"image": PINNED})
        wait_until(lambda: image_fields(installation) == NEW | {"image": PINNED}, "the resource: upgraded", 60)
        installation.wait_condition("qat", "one", OVERRIDDEN, holds=False)
        operator.stop()
    with installation.operator():
        # Images in the resource are kept, whichever manager wrote them.
        installation.wait_condition("qat", "one", "Available", holds=True)
        installation.wait_reconciled("qat", "one")
        assert runs(installation)["image"] == PINNED


def go_daemonset(spec: Object, name: str, init: Object, container: Object, volumes: list[Object]) -> Object:
    """A DaemonSet as created by the Go operator 0.31.1."""
    family = spec["kind"].removesuffix("DevicePlugin").lower()
    label = {"app": f"intel-{family}-plugin"}
    owner = {"apiVersion": spec["apiVersion"], "kind": spec["kind"], "controller": True, "blockOwnerDeletion": True}
    secure = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
    env = [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    plugin = {"name": f"intel-{family}-plugin", "env": env, "securityContext": secure, **container}
    pod = {
        "initContainers": [{"imagePullPolicy": "IfNotPresent", "securityContext": secure, **init}],
        "containers": [{"imagePullPolicy": "IfNotPresent", **plugin}],
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "volumes": [{"name": each["name"], "hostPath": {"path": each["mountPath"]}} for each in volumes],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "labels": label,
            "ownerReferences": [owner | {"name": spec["metadata"]["name"], "uid": spec["metadata"]["uid"]}],
        },
        "spec": {
            "selector": {"matchLabels": label},
            "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "template": {"metadata": {"labels": label}, "spec": pod},
        },
    }


def gpu_of_go(spec: Object) -> Object:
    """The DaemonSet has the name of releases with one resource per kind."""
    devices = {"name": "devfs", "mountPath": "/dev/dri", "readOnly": True}
    drm = {"name": "sysfsdrm", "mountPath": "/sys/class/drm", "readOnly": True}
    kubelet = {"name": "kubeletsockets", "mountPath": "/var/lib/kubelet/device-plugins"}
    features = {"name": "nfd-features", "mountPath": "/etc/kubernetes/node-feature-discovery/source.d/"}
    container = {
        "image": "intel/intel-gpu-plugin:0.31.1",
        "args": ["-v", "2", "-shared-dev-num", "1", "-allocation-policy", "none"],
        "volumeMounts": [devices, drm, kubelet],
    }
    init = {"name": "intel-gpu-initcontainer", "image": "intel/intel-gpu-initcontainer:0.31.1"}
    init_mounts: dict[str, Any] = {"volumeMounts": [features]}
    return go_daemonset(spec, "intel-gpu-plugin", init | init_mounts, container, [devices, drm, kubelet, features])


def qat_of_go(spec: Object) -> Object:
    devices = {"name": "devdir", "mountPath": "/dev/vfio", "readOnly": True}
    debug = {"name": "debugfsdir", "mountPath": "/sys/kernel/debug", "readOnly": True}
    pci = {"name": "pcidir", "mountPath": "/sys/bus/pci"}
    kubelet = {"name": "kubeletsockets", "mountPath": "/var/lib/kubelet/device-plugins"}
    sysfs = {"name": "sysfs", "mountPath": "/sys"}
    drivers = ("-dpdk-driver", "vfio-pci", "-kernel-vf-drivers", "c6xxvf,4xxxvf", "-max-num-devices", "32")
    container = {
        "image": "intel/intel-qat-plugin:0.31.1",
        "args": ["-v", "0", *drivers],
        "volumeMounts": [devices, debug, pci, kubelet],
    }
    init = {"name": "intel-qat-initcontainer", "image": "intel/intel-qat-initcontainer:0.31.1", "volumeMounts": [sysfs]}
    return go_daemonset(spec, "intel-qat-plugin-one", init, container, [devices, debug, pci, kubelet, sysfs])


@pytest.mark.parametrize(("family", "made"), [("gpu", gpu_of_go), ("qat", qat_of_go)])
def test_daemonsets_of_the_go_operator_are_adopted_and_their_pods_are_replaced_one_at_a_time(
    installation: Installation, family: str, made: Any
) -> None:
    resource_object = installation.create(resource(family, "one", image=f"intel/intel-{family}-plugin:0.31.1"))
    installation.cluster.kubectl(
        "create", f"--field-manager={GO}", "--filename=-", text=json.dumps(made(resource_object))
    )
    wait_until(lambda: ready(installation) == 2, "the pods of the Go DaemonSet: ready", 60)
    (before,) = installation.daemonsets()
    name = before["metadata"]["name"]
    words = ("annotate", "daemonset", name, f"--namespace={NAMESPACE}", "--field-manager=somebody", "example.com/a=b")
    installation.cluster.kubectl(*words)

    with installation.operator() as operator:
        after = installation.wait_reconciled(family, "one")
        installation.wait_condition(
            family, "one", "Available", holds=True, words="2 of 2 pods are ready, 2 are updated"
        )
        wait_until(lambda: nodes(installation, family) == ["kwok-0", "kwok-1"], "the nodes in the status", 60)
        assert "created" not in operator.text()

    assert len(installation.daemonsets()) == 1
    assert (after["metadata"]["name"], after["metadata"]["uid"]) == (name, before["metadata"]["uid"])
    # All changes in one write: pods are replaced once.
    assert after["metadata"]["generation"] == before["metadata"]["generation"] + 1
    assert after["spec"]["selector"] == before["spec"]["selector"]
    assert after["metadata"]["annotations"]["example.com/a"] == "b"
    pod = after["spec"]["template"]["spec"]
    assert "initContainers" not in pod
    assert not {"nfd-features", "sysfs"} & {each["name"] for each in pod["volumes"]}
    assert pod["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    managers = {(each["manager"], each.get("subresource", "")) for each in after["metadata"]["managedFields"]}
    assert (GO, "") not in managers
    status = installation.resource(family, "one")["status"]
    assert status["controlledDaemonSet"]["uid"] == before["metadata"]["uid"]


def nodes(installation: Installation, family: str) -> list[str]:
    return installation.resource(family, "one")["status"].get("nodeNames", [])


def ready(installation: Installation) -> int:
    (daemonset,) = installation.daemonsets()
    return daemonset["status"]["numberReady"]
