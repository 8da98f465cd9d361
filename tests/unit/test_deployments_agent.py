"""The trees of the agent render to a DaemonSet with the mounts of all family plugins together."""

import os
from pathlib import Path, PurePosixPath

import msgspec
import pytest
import yaml
from manifests import (
    APPARMOR,
    DEPLOY,
    SOCKETS,
    UNCONFINED,
    Object,
    Volumes,
    flag_values,
    from_fields,
    host_paths,
    in_order,
    mounts,
    overlay,
    own_image,
    plugin_container,
    plugin_daemonset,
    render,
    resources,
)

from accelplane.cli import clients, fleet
from accelplane.fleet.objects import AGENT_LABELS, AGENT_PORT
from accelplane.fleet.options import FleetOptions
from accelplane.node import config
from accelplane.node.plugins import installed

NAME = "accelplane-node"
VOLUMES: Volumes = {
    "devfs": ("/dev", "ro", ""),
    "debugfsdir": ("/sys/kernel/debug", "ro", ""),
    "cdipath": ("/var/run/cdi", "rw", "DirectoryOrCreate"),
    "fpga-records": ("/run/accelplane-fpga", "ro", "DirectoryOrCreate"),
    **SOCKETS,
}
QAT_VOLUMES: Volumes = {"pcidir": ("/sys/bus/pci", "rw", "")}
CONFIG = {"name": "config", "configMap": {"name": NAME}}
TREES = {
    "accelplane_node": False,
    "accelplane_node/base": False,
    "accelplane_node/overlays/config": True,
}
WITH_FPGAS = "accelplane_node/overlays/fpga"
WITH_QAT = "accelplane_node/overlays/qat"
QAT = "accelplane_node/components/qat"
COMPONENT = "accelplane_node/components/fpga"
PAGES = {
    "accelplane_node/overlays/pages": [
        "--http-address=:9400",
        "--http-tls-dir=/etc/accelplane-tls",
        "--http-authorized",
        "--http-audience=accelplane-agent",
    ],
    "accelplane_node/overlays/pages-plain": ["--http-address=:9400"],
}
PAGE_COMPONENT = "accelplane_node/components/pages"
FLEET_COMPONENT = "fleet/components/authorized-agents"
WITH_CLIENTS = "accelplane_node/overlays/clients"
CLIENTS = "accelplane_node/components/clients"
# Their tests are in test_deployments_dra.
DRA = tuple(f"accelplane_node/{part}" for part in ("overlays/dra", "components/dra", "components/dra/policies"))
FAMILIES = ("gpu", "npu", "qat", "dsa", "iaa", "dlb", "sgx", "fpga")


def expected_daemonset(*, configured: bool) -> Object:
    container = {
        **plugin_container(NAME, VOLUMES, resources(("45Mi", "50m"), ("90Mi", "200m"))),
        "image": own_image("accelplane"),
        "args": ["node", "--config=/etc/accelplane/agent.yaml"] if configured else ["node"],
        "env": from_fields(NODE_NAME="spec.nodeName", HOST_IP="status.hostIP"),
        "terminationMessagePath": "/tmp/termination-log",
    }
    volumes = host_paths(VOLUMES)
    if configured:
        container["volumeMounts"].append({"name": "config", "mountPath": "/etc/accelplane", "readOnly": True})
        volumes.append(CONFIG)
    pod = {"automountServiceAccountToken": False, "containers": [container], "volumes": volumes}
    return plugin_daemonset(NAME, pod | {"serviceAccountName": NAME})


@pytest.mark.parametrize("directory", TREES)
def test_a_tree_renders_only_its_daemonset_and_an_account_without_rights(directory: str) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NAME}}
    assert in_order(render(DEPLOY / directory)) == [
        {**account, "automountServiceAccountToken": False},
        in_order(expected_daemonset(configured=TREES[directory])),
    ]


def test_only_the_qat_component_makes_sysfs_writable_and_disables_apparmor() -> None:
    (daemonset,) = (each for each in render(DEPLOY / WITH_QAT) if each["kind"] == "DaemonSet")
    expected = expected_daemonset(configured=False)
    template = expected["spec"]["template"]
    template["metadata"]["annotations"] = {f"{APPARMOR}{NAME}": "unconfined"}
    (container,) = template["spec"]["containers"]
    container["securityContext"]["appArmorProfile"] = UNCONFINED
    container["volumeMounts"] += mounts(QAT_VOLUMES)
    template["spec"]["volumes"] += host_paths(QAT_VOLUMES)
    assert in_order(daemonset) == in_order(expected)


def test_every_kustomization_is_in_the_table() -> None:
    existing = {str(file.parent.relative_to(DEPLOY)) for file in (DEPLOY / NAME.replace("-", "_")).rglob("kust*.yaml")}
    others = (PAGE_COMPONENT, WITH_FPGAS, COMPONENT, WITH_QAT, QAT, WITH_CLIENTS, CLIENTS)
    assert existing == {*TREES, *PAGES, *DRA, *others}


@pytest.mark.parametrize("directory", PAGES)
def test_the_page_overlays_serve_pages_to_authorized_clients_or_to_namespaces(directory: str) -> None:
    objects = render(DEPLOY / directory)
    [daemonset] = (each for each in objects if each["kind"] == "DaemonSet")
    template = daemonset["spec"]["template"]
    assert AGENT_LABELS.items() <= template["metadata"]["labels"].items()
    container = template["spec"]["containers"][0]
    assert container["args"] == ["node", *PAGES[directory]]
    (port,) = container["ports"]
    assert (port["name"], port["containerPort"]) == (AGENT_PORT, 9400)
    mounts = {each["mountPath"]: each.get("readOnly") for each in container["volumeMounts"]}
    assert mounts["/var/lib/kubelet/pod-resources"]
    others = {(each["kind"], each["metadata"]["name"]): each for each in objects if each is not daemonset}
    if directory.endswith("plain"):
        policy = others.pop(("NetworkPolicy", "accelplane-node-pages"))["spec"]
        assert policy["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        assert not template["spec"]["automountServiceAccountToken"]
        assert {*others} == {("ServiceAccount", NAME)}
        return
    assert template["spec"]["automountServiceAccountToken"]
    assert {name: others["ClusterRole", name]["rules"] for kind, name in others if kind == "ClusterRole"} == {
        "accelplane-metrics-reader": [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}],
        "accelplane-inventory-reader": [{"nonResourceURLs": ["/api/v1/*", "/status"], "verbs": ["get"]}],
        "accelplane-node-reviewer": [
            {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]},
            {"apiGroups": ["authorization.k8s.io"], "resources": ["subjectaccessreviews"], "verbs": ["create"]},
        ],
    }
    assert [name for kind, name in others if kind == "ClusterRoleBinding"] == ["accelplane-node-reviewer"]


def test_the_token_of_the_fleet_is_valid_for_the_agents_only(tmp_path: Path) -> None:
    """A compromised node gets the token of each of its readers: the API server must reject it."""
    objects = render(DEPLOY / "fleet/overlays/authorized-agents")
    (pod,) = (each["spec"]["template"]["spec"] for each in objects if each["kind"] == "Deployment")
    volumes = {each["name"]: each for each in pod["volumes"]}
    (source,) = (each["serviceAccountToken"] for each in volumes["agent-token"]["projected"]["sources"])
    assert f"--http-audience={source['audience']}" in PAGES["accelplane_node/overlays/pages"]
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    values = flag_values(fleet.FLAGS, pod["containers"][0])
    assert values["agent-token"] == f"{mounts['agent-token']}/{source['path']}"
    assert values["agent-ca"] == f"{mounts['agent-ca']}/ca.crt"
    # The same rights as those of the role that the agents' tree has for its readers.
    readers = {each["metadata"]["name"]: each for each in render(DEPLOY / "accelplane_node/overlays/pages")}
    (role,) = (each for each in objects if each["metadata"]["name"].endswith("inventories") and "rules" in each)
    assert role["rules"] == readers["accelplane-inventory-reader"]["rules"]
    # Both overlays of the page together.
    combined = overlay(tmp_path, resources=["deploy/fleet/overlays/secure"], components=[f"deploy/{FLEET_COMPONENT}"])
    (pod,) = (each["spec"]["template"]["spec"] for each in combined if each["kind"] == "Deployment")
    assert {each["name"] for each in pod["volumes"]} == {"agent-ca", "agent-token", "tls"}


@pytest.mark.parametrize("directory", PAGES)
def test_the_fleet_recognises_the_agents_of_the_overlays_by_default(directory: str) -> None:
    (daemonset,) = (each for each in render(DEPLOY / directory) if each["kind"] == "DaemonSet")
    options = FleetOptions()
    assert daemonset["metadata"]["namespace"] in options.agent_namespaces
    assert daemonset["spec"]["template"]["spec"]["serviceAccountName"] in options.agent_accounts


def test_pages_and_fpgas_can_be_combined(tmp_path: Path) -> None:
    components = [os.path.relpath(DEPLOY / each, tmp_path) for each in (COMPONENT, "accelplane_node/components/pages")]
    base = os.path.relpath(DEPLOY / "accelplane_node/base", tmp_path)
    content = {"namespace": "x", "resources": [base], "components": components}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content))
    kinds = [each["kind"] for each in render(tmp_path)]
    assert (kinds.count("ServiceAccount"), kinds.count("DaemonSet"), kinds.count("ClusterRoleBinding")) == (1, 1, 2)


# Additions for FPGAs.


def with_fpgas(objects: list[Object]) -> tuple[dict[str, Object], Object]:
    """The other objects by their kinds, and the pod of the DaemonSet."""
    by_kind = {each["kind"]: each for each in objects}
    assert len(by_kind) == len(objects)
    return by_kind, by_kind.pop("DaemonSet")["spec"]["template"]["spec"]


def of_the_fpga_plugin() -> tuple[dict[str, Object], Object]:
    return with_fpgas(render(DEPLOY / "fpga_plugin/base"))


def combined(directory: Path) -> list[Object]:
    """An overlay with configuration file and FPGAs in its own namespace."""
    content = {
        "namespace": "accelerators",
        "resources": [os.path.relpath(DEPLOY / "accelplane_node/overlays/config", directory)],
        "components": [os.path.relpath(DEPLOY / COMPONENT, directory)],
    }
    (directory / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return render(directory)


@pytest.mark.parametrize("configured", [False, True], ids=["alone", "with-the-configuration-file"])
def test_the_fpga_component_installs_programs_and_grants_reading_nodes(tmp_path: Path, configured: bool) -> None:
    objects, pod = with_fpgas(combined(tmp_path) if configured else render(DEPLOY / WITH_FPGAS))
    others, plugin = of_the_fpga_plugin()
    # The same as for the FPGA plugin, with the account of the agent.
    assert pod["initContainers"] == plugin["initContainers"]
    assert objects["ClusterRole"]["rules"] == others["ClusterRole"]["rules"]
    namespace = "accelerators" if configured else "kube-system"
    account = {"name": NAME, "namespace": namespace}
    assert objects["ServiceAccount"]["metadata"] == account
    assert objects["ClusterRoleBinding"]["subjects"] == [{"kind": "ServiceAccount", **account}]
    assert objects["ClusterRoleBinding"]["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]
    assert objects.keys() == {"ServiceAccount", "ClusterRole", "ClusterRoleBinding"}
    # There are no other differences.
    expected = expected_daemonset(configured=configured)["spec"]["template"]["spec"]
    expected |= {"automountServiceAccountToken": True}
    expected["initContainers"] = plugin["initContainers"]
    expected["volumes"] += [volume for volume in plugin["volumes"] if volume["name"] == "intel-fpga-sw"]
    assert in_order(pod) == in_order(expected)


# The GPU use of containers.


def test_only_the_container_reader_has_the_additional_capabilities() -> None:
    objects = render(DEPLOY / WITH_CLIENTS)
    daemonsets = {each["metadata"]["name"]: each for each in objects if each["kind"] == "DaemonSet"}
    assert daemonsets.keys() == {NAME, "accelplane-clients"}
    pod = daemonsets["accelplane-clients"]["spec"]["template"]["spec"]
    (reader,) = pod["containers"]
    assert pod["hostPID"] is True
    assert reader["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["SYS_PTRACE"]}
    assert (reader["image"], pod["automountServiceAccountToken"]) == (own_image("accelplane"), False)
    assert [volume["hostPath"]["path"] for volume in pod["volumes"]] == ["/run/accelplane-clients"]
    command, *flags = reader["args"]
    assert command == "clients"
    socket = str(flag_values(clients.FLAGS, {"args": flags})["socket"])
    # The agent has the socket and the kubelet's, and no other difference.
    agent = daemonsets[NAME]["spec"]["template"]["spec"]
    expected = expected_daemonset(configured=False)["spec"]["template"]["spec"]
    expected["containers"][0]["args"] += [f"--metrics-clients={socket}", "--http-address=127.0.0.1:9400"]
    places = {"clients": "/run/accelplane-clients", "podresources": "/var/lib/kubelet/pod-resources"}
    expected["containers"][0]["volumeMounts"] += [
        {"name": name, "mountPath": path, "readOnly": True} for name, path in places.items()
    ]
    expected["volumes"] += [
        {"name": "clients", "hostPath": {"path": places["clients"], "type": "DirectoryOrCreate"}},
        {"name": "podresources", "hostPath": {"path": places["podresources"]}},
    ]
    assert in_order(agent) == in_order(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_agent_mounts_the_paths_of_each_family_plugin(family: str) -> None:
    """Every container has a read-only sysfs, so only writable parts of it are mounted."""
    (daemonset,) = (each for each in render(DEPLOY / f"{family}_plugin/base") if each["kind"] == "DaemonSet")
    pod = daemonset["spec"]["template"]["spec"]
    mounted = {each["name"]: each for each in pod["containers"][0]["volumeMounts"]}
    writable = {each["mountPath"] for each in mounted.values() if not each.get("readOnly")}
    for volume in pod["volumes"]:
        if volume["name"] not in mounted:
            continue
        path = volume["hostPath"]["path"]
        if path.startswith("/sys/") and path not in writable and not path.startswith("/sys/kernel/debug"):
            continue
        modes = ("rw",) if path in writable else ("rw", "ro")
        volumes = VOLUMES | (QAT_VOLUMES if family == "qat" else {})
        places = [place for place, mode, _ in volumes.values() if mode in modes]
        assert any(PurePosixPath(path).is_relative_to(place) for place in places), path


def test_the_example_configuration_is_valid() -> None:
    (example,) = yaml.safe_load_all((DEPLOY / "accelplane_node/overlays/config/agent-config.yaml").read_text())
    assert (example["kind"], example["metadata"]) == ("ConfigMap", {"name": NAME})
    (name,) = example["data"]
    assert name == "agent.yaml"
    content = msgspec.convert(yaml.safe_load(example["data"][name]), config.AgentConfig)
    assert content.enabled == list(FAMILIES)
    config.check_names(content, installed().types, name)
    assert config.choose(content, installed(content.enabled), name).plugins.keys() == set(FAMILIES)
