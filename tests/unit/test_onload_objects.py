"""The Modules, the DaemonSet and the versions of an Onload resource."""

from typing import Any

import msgspec
import pytest
from onloadresources import MAPPING, onload

from accelplane.onload.children import Existing, desired_objects
from accelplane.onload.daemonset import daemonset, revision_of
from accelplane.onload.models import Onload
from accelplane.onload.modules import KmmApi, kmm_api, module, sfc_module
from accelplane.onload.names import ADOPTED_ANNOTATION, HASH_ANNOTATION, Names, owner_of_label, too_long
from accelplane.onload.resources import DaemonSet, Definition

Object = dict[str, Any]
V1, V2 = KmmApi(), KmmApi(in_tree_list=True, tolerations=True)
VERSION = "8.1.2.26"
BUILD = {"buildArgs": [{"name": "B", "value": "2"}, {"name": "A", "value": "1"}], "dockerfileConfigMap": {"name": "c"}}


def pod_of(child: DaemonSet) -> Object:
    found: Object = msgspec.to_builtins(child.spec)
    return found["template"]["spec"]


def test_objects_of_a_resource_have_its_names() -> None:
    names = Names("ns", "x")
    assert (names.module, names.sfc_module, names.daemonset) == ("x-module", "x-sfcmod", "x-onload-device-plugin-ds")
    assert names.labels == (
        "kmm.node.kubernetes.io/version-module.ns.x-module",
        "kmm.node.kubernetes.io/version-module.ns.x-sfcmod",
        "onload.amd.com/ns.x",
    )
    assert all(owner_of_label(label) == names for label in names.labels)


@pytest.mark.parametrize(
    "label",
    [
        "onload.amd.com/version",
        "onload.amd.com/a.b.c",
        "onload.amd.com/.b",
        "kmm.node.kubernetes.io/version-module.ns.other",
        "kmm.node.kubernetes.io/version-module.ns.-module",
        "example.com/ns.x",
    ],
)
def test_labels_of_others_have_no_owner(label: str) -> None:
    assert owner_of_label(label) is None


@pytest.mark.parametrize(("length", "wrong"), [(30, False), (31, True)])
def test_names_together_have_at_most_32_characters(length: int, wrong: bool) -> None:
    assert bool(too_long(Names("ns", "x" * length))) == wrong


def test_the_onload_module_has_the_specified_fields() -> None:
    result = module(onload(onload__kernelMappings=[{**MAPPING, "build": BUILD}]), VERSION, V2)
    assert result.spec == {
        "selector": {"node-role.kubernetes.io/worker": ""},
        "moduleLoader": {
            "serviceAccountName": "onload-operator-sa",
            "container": {
                "modprobe": {"moduleName": "onload", "parameters": ["--first-time"]},
                "version": VERSION,
                "kernelMappings": [
                    {"regexp": MAPPING["regexp"], "containerImage": MAPPING["kernelModuleImage"], "build": BUILD}
                ],
            },
        },
    }
    assert result.metadata.labels == {
        "app.kubernetes.io/managed-by": "onload-operator",
        "app.kubernetes.io/part-of": "onload",
        "app.kubernetes.io/instance": "onload-default-onload",
        "app.kubernetes.io/component": "module",
    }


@pytest.mark.parametrize(
    ("kmm", "field", "value"), [(V1, "inTreeModuleToRemove", "sfc"), (V2, "inTreeModulesToRemove", ["sfc"])]
)
def test_the_module_of_sfc_has_only_mappings_with_sfc_and_no_build(kmm: KmmApi, field: str, value: object) -> None:
    mappings = [MAPPING, {**MAPPING, "regexp": "b", "sfc": {}, "build": BUILD}]
    container: Object = sfc_module(onload(onload__kernelMappings=mappings), VERSION, kmm).spec["moduleLoader"][
        "container"
    ]
    assert container["kernelMappings"] == [{"regexp": "b", "containerImage": MAPPING["kernelModuleImage"]}]
    assert container["modprobe"] == {"moduleName": "sfc", "parameters": ["--first-time"]}
    in_tree = {name: found for name, found in container.items() if name.startswith("inTree")}
    assert in_tree == {field: value}


def test_build_arguments_are_written_also_if_there_are_none() -> None:
    result = module(onload(onload__kernelMappings=[{**MAPPING, "build": {"dockerfileConfigMap": {}}}]), VERSION, V1)
    (mapping,) = result.spec["moduleLoader"]["container"]["kernelMappings"]
    assert mapping["build"] == {"buildArgs": [], "dockerfileConfigMap": {"name": ""}}


def test_optional_fields_of_modules() -> None:
    result = onload(
        imagePullSecret={"name": "pull"},
        tolerations=[{"operator": "Exists"}],
        onload__imagePullPolicy="Always",
        onload__moduleParameters={"onload": ["oof_use_all=1"]},
    )
    spec: Object = module(result, VERSION, V2).spec
    assert spec["imageRepoSecret"] == {"name": "pull"}
    assert spec["tolerations"] == [{"operator": "Exists"}]
    container = spec["moduleLoader"]["container"]
    assert container["imagePullPolicy"] == "Always"
    assert container["modprobe"]["parameters"] == ["--first-time", "oof_use_all=1"]
    assert "tolerations" not in module(result, VERSION, V1).spec


def test_kmm_is_detected_by_its_definition() -> None:
    container = {"properties": {"inTreeModulesToRemove": {}}}
    loader = {"properties": {"container": container}}
    spec = {"properties": {"moduleLoader": loader, "tolerations": {"type": "array"}}}
    schema = {"openAPIV3Schema": {"properties": {"spec": spec}}}
    new = {"metadata": {"name": "m"}, "spec": {"versions": [{"name": "v1beta1", "schema": schema}]}}
    assert kmm_api(msgspec.convert(new, Definition)) == V2
    assert kmm_api(msgspec.convert({"metadata": {"name": "m"}}, Definition)) == V1


def test_the_daemonset_has_the_specified_fields() -> None:
    result = daemonset(onload(), "plugin:1")
    labels = {
        "app.kubernetes.io/managed-by": "onload-operator",
        "app.kubernetes.io/part-of": "onload",
        "app.kubernetes.io/instance": "onload-default-onload",
        "app.kubernetes.io/component": "device-plugin",
    }
    assert result.metadata.labels == {**labels, "onload.amd.com/version": VERSION}
    spec: Object = result.spec
    selector = {**labels, "onload.amd.com/name": "onload-onload-device-plugin-ds"}
    assert spec["selector"] == {"matchLabels": selector}
    assert spec["template"]["metadata"]["labels"] == selector
    assert spec["updateStrategy"] == {"type": "OnDelete"}
    pod = pod_of(result)
    (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term == {"matchExpressions": [{"key": "onload.amd.com/default.onload", "operator": "Exists"}]}
    assert [pod[name] for name in ("hostNetwork", "hostPID", "hostIPC")] == [True] * 3
    assert pod["nodeSelector"] == {"node-role.kubernetes.io/worker": ""}
    assert not {"tolerations", "imagePullSecrets", "priorityClassName"} & pod.keys()
    assert [each["name"] for each in pod["volumes"]] == ["kubelet-socket", "host-onload", "worker-volume"]
    assert pod["volumes"][1]["hostPath"] == {"path": "/opt/onload/", "type": "DirectoryOrCreate"}
    containers = [*pod["initContainers"], *pod["containers"]]
    assert [each["name"] for each in containers] == ["init", "device-plugin", "onload-worker"]
    assert all(each["securityContext"] == {"privileged": True, "runAsUser": 0} for each in containers)
    assert not any("imagePullPolicy" in each or "lifecycle" in each for each in containers)


def test_arguments_of_the_device_plugin() -> None:
    assert pod_of(daemonset(onload(), "plugin:1"))["containers"][0]["args"] == [
        "-maxPods=100",
        "-setPreload=true",
        "-mountOnload=false",
        "-hostOnloadPath=/opt/onload/",
        "-baseMountPath=/opt/onload",
        "-binMountPath=/usr/bin",
        "-libMountPath=/usr/lib64",
    ]


@pytest.mark.parametrize(
    ("paths", "argument"),
    [
        ({"devicePlugin__preload": False}, "-setPreload=false"),
        ({"devicePlugin__setPreload": False}, "-setPreload=false"),
        ({"devicePlugin__libMountPath": "/lib"}, "-libMountPath=/lib"),
        ({"devicePlugin__libMounthPath": "/lib"}, "-libMountPath=/lib"),
        ({"devicePlugin__maxPodsPerNode": 0}, "-maxPods=0"),
    ],
)
def test_options_have_their_aliases(paths: Object, argument: str) -> None:
    assert argument in pod_of(daemonset(onload(**paths), "plugin:1"))["containers"][0]["args"]


def test_unset_options_are_not_passed() -> None:
    fields = ("maxPodsPerNode", "setPreload", "mountOnload", "hostOnloadPath", "baseMountPath", "binMountPath")
    unset: Object = {f"devicePlugin__{name}": None for name in (*fields, "libMounthPath")}
    pod = pod_of(daemonset(onload(**unset), "plugin:1"))
    assert pod["containers"][0]["args"] == []
    assert pod["volumes"][1]["hostPath"]["path"] == "/opt/onload"


@pytest.mark.parametrize(
    ("plane", "words"),
    [(None, "-K"), ({}, "-K"), ({"parameters": ["-K", "-l", "9"]}, "-K -l 9"), ({"parameters": []}, "")],
)
def test_parameters_of_the_control_plane(plane: Object | None, words: str) -> None:
    worker = pod_of(daemonset(onload(onload__controlPlane=plane), "plugin:1"))["containers"][1]
    assert worker["command"] == ["onload-worker"]
    names = ["POD_NAME", "POD_NAMESPACE", "CONTAINER_NAME", "ONLOAD_CP_SERVER_PATH", "ONLOAD_CP_SERVER_PARAMS"]
    assert [each["name"] for each in worker["env"]] == names
    assert worker["env"][4]["value"] == words


def test_no_value_of_the_resource_is_in_the_script() -> None:
    hostile = "$(touch /tmp/x); rm -rf /"
    result = onload(onload__version=hostile, onload__userImage=hostile, devicePlugin__hostOnloadPath=hostile)
    (init,) = pod_of(daemonset(result, "plugin:1"))["initContainers"]
    assert hostile not in init["command"][2]
    assert init["args"][1].startswith(hostile)


@pytest.mark.parametrize(
    ("paths", "same"),
    [
        ({"onload__imagePullPolicy": "Always"}, True),
        ({"devicePlugin__imagePullPolicy": "Always"}, True),
        ({"serviceAccountName": "other"}, True),
        ({"selector": {"a": "b"}}, True),
        ({"tolerations": [{"operator": "Exists"}]}, True),
        ({"onload__userImage": "other"}, False),
        ({"onload__controlPlane": {"parameters": []}}, False),
        ({"devicePlugin__maxPodsPerNode": 5}, False),
        ({"devicePlugin__hostOnloadPath": "/opt/other"}, False),
    ],
)
def test_pods_are_replaced_only_for_what_concerns_them(paths: Object, same: bool) -> None:
    before, after = daemonset(onload(), "plugin:1"), daemonset(onload(**paths), "plugin:1")
    assert (revision_of(before) == revision_of(after)) == same
    assert revision_of(daemonset(onload(), "plugin:2")) != revision_of(before)


def live(child: DaemonSet, **annotations: str) -> DaemonSet:
    metadata = msgspec.structs.replace(child.metadata, annotations=annotations)
    return msgspec.structs.replace(child, metadata=metadata)


def children(existing: DaemonSet | None, resource: Onload | None = None, *, keeps: bool = False) -> DaemonSet:
    found = Existing(None, None, existing)
    return desired_objects(resource or onload(), VERSION, "plugin:1", V1, found, keeps_selector=keeps).daemonset


def test_pods_of_the_go_operator_have_the_revision_of_the_adoption() -> None:
    result = children(live(daemonset(onload(), "go:1")))
    assert (result.metadata.annotations or {})[ADOPTED_ANNOTATION] == revision_of(result)
    changed = children(live(result, **{HASH_ANNOTATION: "1", ADOPTED_ANNOTATION: "first"}))
    assert (changed.metadata.annotations or {})[ADOPTED_ANNOTATION] == "first"
    assert not children(None).metadata.annotations


def test_the_selector_of_an_adopted_daemonset_stays() -> None:
    old = daemonset(onload(), "go:1")
    selector = {"matchLabels": {"onload.amd.com/name": "onload-onload-device-plugin-ds"}}
    old = msgspec.structs.replace(old, spec={**old.spec, "selector": selector})
    items: Object = children(old).spec
    assert items["selector"] == selector
    assert selector["matchLabels"].items() <= items["template"]["metadata"]["labels"].items()


def test_objects_keep_their_node_selector_until_former_nodes_are_released() -> None:
    before = children(None)
    moved = onload(selector={"zone": "b"})
    assert pod_of(children(before, moved, keeps=True))["nodeSelector"] == {"node-role.kubernetes.io/worker": ""}
    assert pod_of(children(before, moved))["nodeSelector"] == {"zone": "b"}
    old = module(onload(), VERSION, V1)
    kept = desired_objects(moved, VERSION, "plugin:1", V1, Existing(old, None, before), keeps_selector=True).module
    assert kept is not None
    assert kept.spec["selector"] == {"node-role.kubernetes.io/worker": ""}


@pytest.mark.parametrize(
    ("kmm", "account", "secret"), [(V1, "onload-operator-sa", None), (V2, "other", {"name": "pull"})], ids=["1", "2"]
)
def test_fields_whose_change_reloads_modules_stay_until_the_next_version(
    kmm: KmmApi, account: str, secret: object
) -> None:
    mappings = {"onload__kernelMappings": [{**MAPPING, "sfc": {}}]}
    before = onload(**mappings)
    old = Existing(module(before, VERSION, kmm), sfc_module(before, VERSION, kmm), None)
    changed = onload(
        **mappings, onload__imagePullPolicy="Always", serviceAccountName="other", imagePullSecret={"name": "pull"}
    )
    made = desired_objects(changed, VERSION, "plugin:1", kmm, old, keeps_selector=False)
    for each in (made.module, made.sfc):
        assert each is not None
        loader: Object = each.spec["moduleLoader"]
        assert "imagePullPolicy" not in loader["container"]
        assert loader["serviceAccountName"] == account
        assert each.spec.get("imageRepoSecret") == secret
    assert pod_of(made.daemonset)["initContainers"][0]["imagePullPolicy"] == "Always"
    following = desired_objects(changed, "2", "plugin:1", kmm, old, keeps_selector=False).module
    assert following == module(changed, "2", kmm)


def test_a_default_of_the_api_server_is_no_change_of_a_module() -> None:
    live = module(onload(onload__imagePullPolicy="IfNotPresent"), VERSION, V2)
    assert desired_objects(
        onload(), VERSION, "plugin:1", V2, Existing(live, None, None), keeps_selector=False
    ).module == (module(onload(), VERSION, V2))
