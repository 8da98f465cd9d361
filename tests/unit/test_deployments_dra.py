"""The trees for DRA: device classes, accounts of nodes with their policies, and additions to the DaemonSets."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

import cel
import pytest
from customresources import plugin
from deployrights import Grant, granted_rights
from dradevices import published_devices
from manifests import (
    APPARMOR,
    DEPLOY,
    UNCONFINED,
    Object,
    Volumes,
    from_fields,
    host_paths,
    in_order,
    mounts,
    overlay,
    render,
    trees,
)

from accelplane.admission import deviceconfig
from accelplane.cli.goflags import flags_of, parse
from accelplane.dra import configuration
from accelplane.dra.configuration import GpuConfig
from accelplane.node.device_api import DeviceApis
from accelplane.node.plugins import installed
from accelplane.node.settings import Settings
from accelplane.operator.daemonsets.dra import account_of, driver
from accelplane.operator.models import KINDS
from accelplane.plugins.generic.config import DEFAULT_DOMAIN
from accelplane.plugins.qat.services import service

FAMILIES = ("dlb", "dsa", "fpga", "gpu", "iaa", "npu", "qat", "sgx")
DRIVERS = sorted(f"{family}.intel.com" for family in FAMILIES)
PLUGINS = [tree for tree in trees() if tree.endswith("_plugin/overlays/dra")]
WITH_DRA = [*PLUGINS, "accelplane_node/overlays/dra"]
VOLUMES: Volumes = {
    "dra-drivers": ("/var/lib/kubelet/plugins", "rw", ""),
    "dra-registration": ("/var/lib/kubelet/plugins_registry", "rw", ""),
    "podresources": ("/var/lib/kubelet/pod-resources", "ro", ""),
}
BITSTREAMS: Volumes = {"bitstreams": ("/srv/intel.com/fpga", "ro", "DirectoryOrCreate")}
CDI: Volumes = {"cdipath": ("/var/run/cdi", "rw", "DirectoryOrCreate")}


# Device classes


def classes(tree: str) -> dict[str, Object]:
    objects = {each["metadata"]["name"]: each["spec"] for each in render(DEPLOY / tree)}
    assert {(each["apiVersion"], each["kind"]) for each in render(DEPLOY / tree)} == {
        ("resource.k8s.io/v1", "DeviceClass")
    }
    return objects


def selector(spec: Object) -> str:
    ((expression,),) = ([each["cel"]["expression"] for each in spec["selectors"]],)
    return expression


EXTENDED = classes("dra/extended-resources")


def test_every_driver_has_a_class_of_its_name() -> None:
    found = classes("dra")
    assert found == classes("dra/classes")
    assert sorted(found) == sorted([*DRIVERS, "gpu-tile.intel.com", "gpu-vfio.intel.com"])
    assert not any("extendedResourceName" in spec for spec in found.values())
    ((config,),) = ([each["opaque"] for each in found["gpu-vfio.intel.com"]["config"]],)
    parameters = {"apiVersion": "gpu.intel.com/v1alpha1", "kind": "GpuConfig", "access": "vfio"}
    assert config == {"driver": "gpu.intel.com", "parameters": parameters}
    assert isinstance(configuration.parse("gpu.intel.com", json.dumps(parameters).encode(), "FromClass"), GpuConfig)
    assert all("config" not in spec for name, spec in found.items() if name != "gpu-vfio.intel.com")


def test_each_extended_resource_has_one_class_named_after_it() -> None:
    found = {spec["extendedResourceName"]: name for name, spec in EXTENDED.items()}
    assert len(found) == len(EXTENDED)
    for resource, name in found.items():
        driver, _, kind = resource.partition("/")
        assert name == f"{kind}.{driver}"
        assert driver in DRIVERS


@pytest.mark.parametrize("name", [*EXTENDED])
def test_selectors_check_the_driver_in_the_expression_that_reads_attributes(name: str) -> None:
    """A device of another driver has no such attribute, and the error would stop the scheduling of the pod."""
    spec = EXTENDED[name]
    driver = spec["extendedResourceName"].partition("/")[0]
    assert selector(spec).startswith(f'device.driver == "{driver}"')
    for foreign in (*DRIVERS, "gpu.example.com"):
        if foreign != driver:
            assert cel.matches(selector(spec), cel.device(foreign, {})) is False
    if "attributes" in selector(spec):
        with pytest.raises(KeyError):
            cel.matches(selector(spec), cel.device(driver, {}))


def matching(driver: str, /, **attributes: object) -> list[str]:
    """The extended resources whose class selects a device."""
    device = cel.device(driver, attributes)
    return [spec["extendedResourceName"] for spec in EXTENDED.values() if cel.matches(selector(spec), device)]


WORDS = ("asym", "sym", "dc", "decomp", "dcc")
# What the drivers of the kernel accept: one service, or two or three of asym, sym, dc and decomp.
SERVICES = [
    *((word,) for word in WORDS),
    *itertools.combinations(WORDS[:4], 2),
    *itertools.combinations(WORDS[:4], 3),
]


@pytest.mark.parametrize("words", SERVICES, ids=";".join)
def test_a_qat_function_is_selected_as_the_resource_of_its_services(words: tuple[str, ...]) -> None:
    attributes = {word: word in words for word in WORDS}
    assert matching("qat.intel.com", **attributes) == [f"qat.intel.com/{service(';'.join(words)).resource}"]


def test_a_qat_function_of_unknown_services_is_generic() -> None:
    assert matching("qat.intel.com", **dict.fromkeys(WORDS, False)) == [f"qat.intel.com/{service('unknown').resource}"]


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_device_is_selected_by_the_classes_of_its_driver_and_of_its_resource(driver: str) -> None:
    devices = published_devices()[driver]
    assert devices
    base = {name: selector(spec) for name, spec in classes("dra").items()}
    for device, resources in devices:
        attributes = device["attributes"][driver]
        is_tile = attributes["type"] == "tile"
        expected = {
            "gpu.intel.com": {"gpu-tile.intel.com"} if is_tile else {"gpu.intel.com", "gpu-vfio.intel.com"}
        }.get(driver, {driver})
        assert {name for name, expression in base.items() if cel.matches(expression, device)} == expected
        # FPGA resources have the names of functions, so their classes depend on the cluster.
        classless = is_tile or driver == "fpga.intel.com"
        assert matching(driver, **attributes) == ([] if classless else [f"{driver}/{each}" for each in resources])
        if driver == "gpu.intel.com" and not is_tile:
            # As while a claim has it by VFIO: the device plugin would not have it either.
            assert matching(driver, **attributes | {"driver": "vfio-pci"}) == []


@pytest.mark.parametrize(
    ("driver", "attributes", "resources"),
    [
        ("dsa.intel.com", {"type": "kernel", "mode": "shared"}, []),
        ("dsa.intel.com", {"type": "vfio", "mode": ""}, ["vfio"]),
        ("iaa.intel.com", {"type": "user", "mode": "shared"}, ["wq-user-shared"]),
        ("dlb.intel.com", {"type": "vf"}, ["vf"]),
        ("sgx.intel.com", {"type": "vepc"}, []),
    ],
)
def test_devices_that_the_simulated_node_does_not_have_are_selected_too(
    driver: str, attributes: dict[str, object], resources: list[str]
) -> None:
    assert matching(driver, **attributes) == [f"{driver}/{each}" for each in resources]


# Accounts and policies


NAMESPACES = {family: installed([family]).types[family].namespace for family in FAMILIES} | {"generic": DEFAULT_DOMAIN}


def test_the_policies_have_no_drivers_of_their_own() -> None:
    policies = [each for each in render(DEPLOY / "dra/policies") if each["kind"] == "ValidatingAdmissionPolicy"]
    names = [f"accelplane-dra-{each}" for each in ("claims", "events", "slices")]
    assert sorted(each["metadata"]["name"] for each in policies) == names
    assert not re.findall(r"[a-z]+\.intel\.com", json.dumps(policies))


def publishable(objects: list[Object]) -> set[str]:
    """The drivers of all accounts. No grant is for all drivers."""
    grants = [each for found in granted_rights(objects).values() for each in found]
    return {each.name for each in grants if (each.resource, each.verb) == ("resourceslices/driver", "publish")}


@pytest.mark.parametrize("tree", WITH_DRA)
def test_an_account_may_publish_the_drivers_of_its_plugins_and_no_others(tree: str) -> None:
    family = tree.partition("_plugin")[0]
    assert publishable(render(DEPLOY / tree)) == ({NAMESPACES[family]} if family in NAMESPACES else {*DRIVERS})


def test_the_operator_names_the_drivers_as_the_plugins_do() -> None:
    assert {family: driver(plugin(family)) for family in NAMESPACES} == NAMESPACES
    assert {*NAMESPACES.values()} == {*DRIVERS, DEFAULT_DOMAIN}
    assert driver(plugin("generic", domain="devices.example.com")) == "devices.example.com"


def writers(objects: list[Object]) -> Iterator[str]:
    for account, found in granted_rights(objects).items():
        if any(each.resource in ("resourceslices", "resourceclaims/status") and each.verb != "get" for each in found):
            yield account


def admission_policies(objects: list[Object]) -> list[Object]:
    """The policies, all of which have a binding that denies."""
    found = {each["metadata"]["name"]: each for each in objects if each["kind"] == "ValidatingAdmissionPolicy"}
    bindings = [each["spec"] for each in objects if each["kind"] == "ValidatingAdmissionPolicyBinding"]
    assert {each["policyName"] for each in bindings if each["validationActions"] == ["Deny"]} == found.keys()
    assert len(found) == 3
    return [*found.values()]


def limits(policy: Object, namespace: str, account: str) -> bool:
    (condition,) = policy["spec"]["matchConditions"]
    (pattern,) = re.findall(r"matches\('(.*)'\)", condition["expression"])
    return bool(re.search(pattern, f"system:serviceaccount:{namespace}:{account}"))


@pytest.mark.parametrize("tree", trees())
def test_accounts_that_write_slices_are_limited_by_the_policies(tree: str) -> None:
    """The policies are tested with an API server, see `tests/cluster/test_dra_policies.py`."""
    objects = render(DEPLOY / tree)
    accounts = [*writers(objects)]
    applied = [*WITH_DRA, "gpu_plugin/overlays/dra-vfio"]
    assert bool(accounts) == (tree in applied or tree == "dra/account" or tree.endswith("overlays/dra/account"))
    if not accounts:
        return
    pods = [each for each in objects if each["kind"] == "DaemonSet"]
    used = {each["spec"]["template"]["spec"]["serviceAccountName"] for each in pods}
    created = {each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"}
    assert used <= created
    for policy in admission_policies(objects):
        assert policy["spec"]["failurePolicy"] == "Fail"
        for name in used or created:
            for prefix in ("", "team-"):
                assert limits(policy, "kube-system", f"{prefix}{name}")


@pytest.mark.parametrize("tree", PLUGINS)
def test_the_policies_of_a_plugin_limit_its_own_account(tree: str) -> None:
    own = tree.partition("_")[0]
    for policy in admission_policies(render(DEPLOY / tree)):
        limited = [family for family in NAMESPACES if limits(policy, "kube-system", f"accelplane-dra-{family}")]
        assert limited == [own]
        assert not limits(policy, "kube-system", "accelplane-node")


def test_the_policies_of_the_operator_limit_all_accounts_that_it_creates() -> None:
    for policy in admission_policies(render(DEPLOY / "operator/overlays/dra")):
        for family, status in itertools.product(KINDS, (False, True)):
            assert limits(policy, "inteldeviceplugins-system", account_of(family, status=status))


def test_deleting_a_tree_deletes_no_object_of_another() -> None:
    """`kubectl delete -k` of one family must not remove the policies that limit the accounts of others."""
    trees_of: dict[tuple[str, str, str], list[str]] = {}
    for tree in (*WITH_DRA, "operator/overlays/dra", "dra", "dra/extended-resources"):
        # Definitions of FPGA names are in two trees: deleting them deletes the names.
        for each in (each for each in render(DEPLOY / tree) if each["kind"] != "CustomResourceDefinition"):
            namespaced = each["kind"] in ("ServiceAccount", "DaemonSet", "Role", "RoleBinding")
            namespace = each["metadata"].get("namespace", "") if namespaced else ""
            trees_of.setdefault((each["kind"], namespace, each["metadata"]["name"]), []).append(tree)
    assert {key: found for key, found in trees_of.items() if len(found) > 1} == {}


STATUS = "dra/components/device-status"


@pytest.mark.parametrize("tree", ["gpu_plugin/overlays/dra", "accelplane_node/overlays/dra"])
def test_the_device_status_needs_a_component(tree: str, tmp_path: Path) -> None:
    objects = overlay(tmp_path, resources=[f"deploy/{tree}"], components=[f"deploy/{STATUS}"])
    added: dict[str, set[Grant]] = {}
    for name, with_status in (("before", render(DEPLOY / tree)), ("after", objects)):
        ((_, found),) = granted_rights(with_status).items()
        added[name] = found
    (daemonset,) = (each for each in objects if each["kind"] == "DaemonSet")
    assert daemonset["spec"]["template"]["spec"]["containers"][0]["args"][-1] == "-dra-device-status"
    group = "resource.k8s.io"
    assert added["after"] - added["before"] == {
        Grant("cluster", group, "resourceclaims/status", "", "update"),
        *(Grant("cluster", group, "resourceclaims/driver", driver, "associated-node:update") for driver in DRIVERS),
    }
    assert added["before"] < added["after"]


# DaemonSets


@pytest.mark.parametrize("tree", WITH_DRA)
def test_a_daemonset_with_dra_has_these_additions_and_no_others(tree: str) -> None:
    base = {"accelplane_node": "base", "fpga_plugin": "overlays/region"}.get(tree.partition("/")[0], "base")
    (plain,) = (each for each in render(DEPLOY / tree.partition("/")[0] / base) if each["kind"] == "DaemonSet")
    (daemonset,) = (each for each in render(DEPLOY / tree) if each["kind"] == "DaemonSet")
    container, pod = plain["spec"]["template"]["spec"]["containers"][0], plain["spec"]["template"]["spec"]
    added = VOLUMES if any(each["mountPath"] == CDI["cdipath"][0] for each in container["volumeMounts"]) else (
        VOLUMES | CDI
    )  # fmt: skip
    container["args"] = [*container.get("args", ()), "-dra-api=dra"]
    container["volumeMounts"] += mounts(added)
    container["env"] = [*container.get("env", ()), *from_fields(POD_UID="metadata.uid")]
    if not any(each["name"] == "NODE_NAME" for each in container["env"]):
        container["env"] += from_fields(NODE_NAME="spec.nodeName")
    if tree.startswith("fpga"):
        added = added | BITSTREAMS
        container["volumeMounts"] += mounts(BITSTREAMS)
        # Programming opens the management devices, which other containers cannot open.
        container["securityContext"]["privileged"] = True
        del container["securityContext"]["allowPrivilegeEscalation"]
    pod["volumes"] += host_paths(added)
    pod["automountServiceAccountToken"] = True
    pod["serviceAccountName"] = daemonset["spec"]["template"]["spec"]["serviceAccountName"]
    plain["spec"]["updateStrategy"]["rollingUpdate"] = {"maxSurge": 1, "maxUnavailable": 0}
    plain["metadata"]["namespace"] = daemonset["metadata"]["namespace"]
    assert in_order(daemonset) == in_order(plain)


def test_the_vfio_overlay_of_gpus_makes_sysfs_writable() -> None:
    objects = {name: render(DEPLOY / f"gpu_plugin/overlays/{name}") for name in ("dra", "dra-vfio")}
    templates = [
        next(each for each in found if each["kind"] == "DaemonSet")["spec"]["template"] for found in objects.values()
    ]
    assert templates[1]["metadata"].pop("annotations") == {f"{APPARMOR}intel-gpu-plugin": "unconfined"}
    plain, vfio = (template["spec"] for template in templates)
    added: Volumes = {
        "pcidir": ("/sys/bus/pci", "rw", ""),
        "sysdevices": ("/sys/devices", "rw", ""),
        "vfiodir": ("/dev/vfio", "ro", "DirectoryOrCreate"),
    }
    plain["volumes"] += host_paths(added)
    plain["containers"][0]["volumeMounts"] += mounts(added)
    plain["containers"][0]["securityContext"]["appArmorProfile"] = UNCONFINED
    assert in_order(vfio) == in_order(plain)


def test_every_family_has_a_tree() -> None:
    assert sorted(tree.partition("_")[0] for tree in PLUGINS) == sorted(NAMESPACES)


@pytest.mark.parametrize("tree", WITH_DRA)
def test_the_arguments_are_flags_of_the_agent_and_hand_all_devices_to_claims(tree: str) -> None:
    (daemonset,) = (each for each in render(DEPLOY / tree) if each["kind"] == "DaemonSet")
    (container,) = daemonset["spec"]["template"]["spec"]["containers"]
    words = [word for word in container["args"] if word.startswith("-dra")]
    values, others = parse(flags_of(Settings), words)
    assert others == []
    assert DeviceApis.of(str(values["dra-api"])) == DeviceApis(default="dra")


# The webhook of the operator


def test_the_overlay_with_the_webhook_adds_one_entry_that_admits_objects_while_it_is_not_reachable() -> None:
    with_webhook, without = (
        {(each["kind"], each["metadata"]["name"]): each for each in render(DEPLOY / f"operator/overlays/{name}")}
        for name in ("dra-webhook", "dra")
    )
    name = ("ValidatingWebhookConfiguration", "inteldeviceplugins-validating-webhook-configuration")
    *others, webhook = with_webhook[name]["webhooks"]
    assert with_webhook | {name: with_webhook[name] | {"webhooks": others}} == without
    assert webhook["clientConfig"]["service"] == others[0]["clientConfig"]["service"] | {"path": deviceconfig.PATH}
    assert (webhook["failurePolicy"], webhook["sideEffects"], webhook["timeoutSeconds"]) == ("Ignore", "None", 5)
    assert {resource for rule in webhook["rules"] for resource in rule["resources"]} == {
        "resourceclaims", "resourceclaimtemplates", "deviceclasses"
    }  # fmt: skip
    # The spec of claims and templates cannot change, but the scheduler and controllers update their metadata.
    assert [rule["resources"] for rule in webhook["rules"] if "UPDATE" in rule["operations"]] == [["deviceclasses"]]
    drivers = re.findall(r"'([a-z.]+\.com)'", webhook["matchConditions"][0]["expression"])
    assert drivers == sorted(configuration.KINDS)
