"""The trees of the one agent for all families render to a DaemonSet that sees what the families' own see together."""

from pathlib import PurePosixPath

import msgspec
import pytest
import yaml
from manifests import (
    DEPLOY,
    SOCKETS,
    Object,
    Volumes,
    from_fields,
    host_paths,
    in_order,
    plugin_container,
    plugin_daemonset,
    render,
    resources,
)

from accelplane.node import config
from accelplane.node.plugins import installed

NAME = "accelplane-node"
VOLUMES: Volumes = {
    "devfs": ("/dev", "ro", ""),
    "debugfsdir": ("/sys/kernel/debug", "ro", ""),
    "pcidir": ("/sys/bus/pci", "rw", ""),
    "cdipath": ("/var/run/cdi", "rw", "DirectoryOrCreate"),
    "fpga-records": ("/run/accelplane-fpga", "ro", "DirectoryOrCreate"),
    **SOCKETS,
}
CONFIG = {"name": "config", "configMap": {"name": NAME}}
APPARMOR = {f"container.apparmor.security.beta.kubernetes.io/{NAME}": "unconfined"}
TREES = {
    "accelplane_node": False,
    "accelplane_node/base": False,
    "accelplane_node/overlays/config": True,
}
FAMILIES = ("gpu", "npu", "qat", "dsa", "iaa", "dlb", "sgx")


def expected_daemonset(*, configured: bool) -> Object:
    container = {
        **plugin_container(NAME, VOLUMES, resources(("45Mi", "50m"), ("90Mi", "200m"))),
        "image": "accelplane/accelplane:devel",
        "args": ["node", "--config=/etc/accelplane/agent.yaml"] if configured else ["node"],
        "env": from_fields(NODE_NAME="spec.nodeName", HOST_IP="status.hostIP"),
        "terminationMessagePath": "/tmp/termination-log",
    }
    volumes = host_paths(VOLUMES)
    if configured:
        container["volumeMounts"].append({"name": "config", "mountPath": "/etc/accelplane", "readOnly": True})
        volumes.append(CONFIG)
    pod = {"automountServiceAccountToken": False, "containers": [container], "volumes": volumes}
    expected = plugin_daemonset(NAME, pod)
    expected["spec"]["template"]["metadata"]["annotations"] = APPARMOR
    return expected


@pytest.mark.parametrize("directory", TREES)
def test_a_tree_renders_to_its_daemonset_and_nothing_else(directory: str) -> None:
    assert in_order(render(DEPLOY / directory)) == [in_order(expected_daemonset(configured=TREES[directory]))]


def test_every_kustomization_is_in_the_table() -> None:
    there = {str(file.parent.relative_to(DEPLOY)) for file in (DEPLOY / NAME.replace("-", "_")).rglob("kust*.yaml")}
    assert there == set(TREES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_agent_sees_what_the_plugin_of_a_family_sees(family: str) -> None:
    """Of sysfs every container has a view that is read-only, so only what is writable or no sysfs need be mounted."""
    (daemonset,) = render(DEPLOY / f"{family}_plugin/base")
    pod = daemonset["spec"]["template"]["spec"]
    writable = {each["mountPath"] for each in pod["containers"][0]["volumeMounts"] if not each.get("readOnly")}
    for volume in pod["volumes"]:
        path = volume["hostPath"]["path"]
        if path.startswith("/sys/") and path not in writable and not path.startswith("/sys/kernel/debug"):
            continue
        modes = ("rw",) if path in writable else ("rw", "ro")
        places = [place for place, mode, _ in VOLUMES.values() if mode in modes]
        assert any(PurePosixPath(path).is_relative_to(place) for place in places), path


def test_the_example_of_a_configuration_is_one() -> None:
    (example,) = yaml.safe_load_all((DEPLOY / "accelplane_node/overlays/config/agent-config.yaml").read_text())
    assert (example["kind"], example["metadata"]) == ("ConfigMap", {"name": NAME})
    (name,) = example["data"]
    assert name == "agent.yaml"
    content = msgspec.convert(yaml.safe_load(example["data"][name]), config.AgentConfig)
    assert content.enabled == list(FAMILIES)
    config.check_names(content, installed(), name)
    assert config.plugins(content, installed(content.enabled), name).keys() == set(FAMILIES)
