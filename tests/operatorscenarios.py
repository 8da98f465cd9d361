"""Scenarios of the operator's resources for tests with faults, and the comparison of final states.

A scenario has initial objects, which are reconciled, and then changes by users and others. `end` is the state that the
operator is responsible for, without values that differ between runs (uids, versions, times), so that the final state
of a run with faults can be compared with that of a run without.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any

from customresources import resource
from daemonsetplans import plan

from accelplane.kube.testing.documents import deep_copy
from accelplane.operator import models
from accelplane.operator.daemonsets import provisioning_hash, render
from accelplane.operator.images import upgrade
from accelplane.operator.overlap import Overlap, format_overlap, overlaps_of
from accelplane.operator.settings import ImagePolicy, Settings
from accelplane.operator.update import HASH_ANNOTATION

Object = dict[str, Any]

NAMESPACE = "operated"
# No pods on nodes: the images do not exist.
NOWHERE = {"example.com/nowhere": "true"}
OVERRIDES = {"INTEL_DSA_PLUGIN_SHA": f"registry.example.com/intel-dsa-plugin@sha256:{'ab' * 32}"}
SETTINGS = Settings(namespace=NAMESPACE, images=ImagePolicy(overrides=OVERRIDES))
VERSION = "0.31.1"
# The kinds, and by plural the compared fields.
FAMILIES = ("dsa", "gpu", "qat")
JUDGED = (
    *(f"{family}deviceplugins" for family in FAMILIES),
    "daemonsets",
    "serviceaccounts",
    "clusterrolebindings",
)
_TRANSIENT = ("uid", "resourceVersion", "creationTimestamp", "generation", "managedFields", "selfLink")
# The hash covers the complete spec, including the owner's UID.
_COUNTING = ("deprecated.daemonset.template.generation", HASH_ANNOTATION)


@dataclass(frozen=True)
class PutObject:
    """Creates or replaces an object."""

    plural: str
    thing: Object


@dataclass(frozen=True)
class Remove:
    plural: str
    name: str
    namespace: str = ""


@dataclass(frozen=True)
class Copy:
    """Creates a duplicate of an existing DaemonSet."""

    name: str
    new: str


@dataclass(frozen=True)
class Drift:
    """Changes an existing DaemonSet to an undesired state."""

    name: str
    args: Sequence[str]


Change = PutObject | Remove | Copy | Drift


@dataclass(frozen=True)
class Scenario:
    """`before` is reconciled before `changes` are performed in sequence."""

    changes: Sequence[Change]
    before: Sequence[PutObject] = ()

    @property
    def families(self) -> list[str]:
        """The families of its resources."""
        plurals = {change.plural for change in (*self.before, *self.changes) if isinstance(change, PutObject | Remove)}
        return [family for family in FAMILIES if f"{family}deviceplugins" in plurals]


def sample_resource(family: str, name: str = "mine", **spec: Any) -> PutObject:
    """A custom resource with its plugin's image, for nodes that do not exist."""
    own = {"image": f"intel/intel-{family}-plugin:{VERSION}", "nodeSelector": NOWHERE}
    return PutObject(f"{family}deviceplugins", resource(family, name, **own | spec))


def config(content: str) -> PutObject:
    about = {"name": "functions", "namespace": NAMESPACE}
    return PutObject(
        "configmaps", {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": {"qat.conf": content}}
    )


def node(name: str, **labels: str) -> PutObject:
    """An unschedulable node with labels."""
    about = {"name": name, "labels": {"kubernetes.io/arch": "amd64", **labels}}
    taint = {"key": "example.com/nobody", "effect": "NoSchedule"}
    return PutObject("nodes", {"apiVersion": "v1", "kind": "Node", "metadata": about, "spec": {"taints": [taint]}})


SHARING = sample_resource("gpu", resourceManager=True, sharedDevNum=3)
QAT_INIT = f"intel/intel-qat-initcontainer:{VERSION}"
PROVISIONED = sample_resource("qat", initImage=QAT_INIT, kernelVfDrivers=["4xxxvf"], provisioningConfig="functions")
SEVERAL = (config("one"), SHARING, PROVISIONED)

SCENARIOS: Mapping[str, Scenario] = {
    "created": Scenario(SEVERAL),
    "edited": Scenario(
        (
            sample_resource("gpu", image="intel/intel-gpu-plugin:0.32.0", sharedDevNum=2, logLevel=4),
            config("two"),
            sample_resource("qat", maxNumDevices=5, nodeSelector=NOWHERE | {"a": "b"}),
        ),
        before=SEVERAL,
    ),
    "gone": Scenario((Remove("gpudeviceplugins", "mine"), Remove("qatdeviceplugins", "mine")), before=SEVERAL),
    "gone and made anew": Scenario(
        (Remove("gpudeviceplugins", "mine"), sample_resource("gpu", sharedDevNum=5, logLevel=2)), before=(SHARING,)
    ),
    "upgraded": Scenario(
        (
            sample_resource(
                "gpu", image="intel/intel-gpu-plugin:0.30.0", initImage="intel/intel-gpu-initcontainer:0.30.0"
            ),
            sample_resource("dsa"),
        ),
        before=(sample_resource("gpu"),),
    ),
    "nodes labeled": Scenario(
        (node("one", a="yes"), node("two", b="yes"), node("three", a="yes", b="yes")),
        before=(
            sample_resource("gpu", "a", nodeSelector={"a": "yes"}),
            sample_resource("gpu", "b", nodeSelector={"b": "yes"}),
            node("one", a="yes", b="yes"),
            node("two", a="yes"),
        ),
    ),
    "drifted and too many": Scenario(
        (
            Copy("intel-gpu-plugin-mine", "intel-gpu-plugin-x"),
            Drift("intel-gpu-plugin-mine", ["-bad"]),
            Copy("intel-gpu-plugin-mine", "intel-gpu-plugin-y"),
        ),
        before=(sample_resource("gpu"),),
    ),
}


def duplicate(daemonset: Object, new: str) -> Object:
    """A second, younger DaemonSet of the same owner."""
    result = copy.deepcopy(daemonset)
    result.pop("status", None)
    for field in _TRANSIENT:
        result["metadata"].pop(field, None)
    result["metadata"]["name"] = new
    return result


def end(objects: Mapping[str, Iterable[Object]]) -> Object:
    """The objects by plural and name."""
    named = {
        each["metadata"]["uid"]: f"{plural}/{each['metadata']['name']}"
        for plural, things in objects.items()
        for each in things
    }
    return {
        f"{plural}/{each['metadata']['name']}": normalized(plural, each, named)
        for plural in JUDGED
        for each in objects.get(plural, ())
    }


def differences_to_desired(objects: Mapping[str, Sequence[Object]]) -> str:
    """The differences to the desired state of all objects by plural.

    Each has one DaemonSet, which needs no write, and a status that reports it. There are no other DaemonSets.
    The objects that GPU plugins share exist if they are needed.
    """
    resources = [each for family in FAMILIES for each in objects.get(f"{family}deviceplugins", ())]
    plugins = {each["metadata"]["uid"]: models.decode(each) for each in resources}
    nodes = {each["metadata"]["name"]: each["metadata"].get("labels") or {} for each in objects.get("nodes", ())}
    hashes = {each["metadata"]["name"]: provisioning_hash(each["data"], None) for each in objects.get("configmaps", ())}
    for uid, plugin in plugins.items():
        about = f"{plugin.kind} {plugin.name}"
        existing = [
            {"apiVersion": "apps/v1", "kind": "DaemonSet", **each}
            for each in objects["daemonsets"]
            if [owner["uid"] for owner in each["metadata"]["ownerReferences"]] == [uid]
        ]
        if upgrade(plugin, SETTINGS.images)[1]:
            return f"{about}: has images of old"
        desired = render(plugin, SETTINGS, provisioning=hashes.get(models.provisioning_config(plugin.spec), ""))
        planned = plan(desired, existing)
        if planned.current is None or planned.apply is not None or planned.surplus:
            return f"{about}: {len(existing)} DaemonSets, {planned.differences}, {planned.surplus}"
        others = [each for each in plugins.values() if each.family == plugin.family]
        if problem := _missing_conditions(plugin, existing[0]["metadata"]["uid"], overlaps_of(plugin, others, nodes)):
            return f"{about}: {problem}"
    if len(objects["daemonsets"]) != len(resources):
        return "there are other DaemonSets"
    shared = any(each["spec"].get("resourceManager") for each in objects.get("gpudeviceplugins", ()))
    if not len(objects["serviceaccounts"]) == len(objects["clusterrolebindings"]) == shared:
        return "what GPU plugins share is there, or is not"
    return ""


def _missing_conditions(plugin: models.DevicePlugin, daemonset: str, overlaps: Sequence[Overlap]) -> str:
    if plugin.status is None or plugin.status.observed_generation != plugin.metadata.generation:
        return "the status is not of this generation"
    reference = plugin.status.controlled_daemon_set
    if reference is None or reference.uid != daemonset:
        return "the status tells of another DaemonSet"
    conditions = {each.type: (each.status, each.message) for each in plugin.status.conditions}
    found = {kind: conditions[kind][0] for kind in ("Available", "Progressing", "Degraded", "ImageOverridden")}
    if found != {"Available": "True", "Progressing": "False", "Degraded": "False", "ImageOverridden": "False"}:
        return f"{found}"
    message = "; ".join(format_overlap(each, plugin.name) for each in overlaps)
    if conditions["NodeOverlap"][0] != str(bool(overlaps)) or (overlaps and conditions["NodeOverlap"][1] != message):
        return f"{conditions['NodeOverlap']}, expected {message!a}"
    return ""


def difference(found: Object, expected: Object) -> str:
    """The lines that differ; empty if the objects are equal, which is compared first because it is much faster."""
    if found == expected:
        return ""
    lines = [json.dumps(each, indent=1, sort_keys=True).splitlines() for each in (expected, found)]
    return "\n".join(unified_diff(*lines, "expected", "found", lineterm="", n=4))


def normalized(plural: str, thing: Object, named: Mapping[str, str]) -> Object:
    generation = thing["metadata"].get("generation")
    compared = {name: value for name, value in thing["metadata"].items() if name not in _TRANSIENT}
    result = deep_copy({**thing, "metadata": compared})
    metadata = result["metadata"]
    for owner in metadata.get("ownerReferences", ()):
        owner["uid"] = named.get(owner["uid"], "somebody who is gone")
    if plural == "daemonsets":
        result.pop("status", None)
        # The default account is named in a DaemonSet that was adopted, and not in one that was created.
        pod = result["spec"]["template"]["spec"]
        for field in ("serviceAccount", "serviceAccountName"):
            if pod.get(field) == "default":
                del pod[field]
        for annotation in _COUNTING:
            metadata.get("annotations", {}).pop(annotation, None)
    status = result.get("status", {})
    if reference := status.get("controlledDaemonSet"):
        reference.pop("resourceVersion", None)
        reference["uid"] = named.get(reference["uid"], "one that is gone")
    if "observedGeneration" in status:
        status["observedGeneration"] = status["observedGeneration"] == generation
    for condition in status.get("conditions", ()):
        condition.pop("lastTransitionTime", None)
        condition["observedGeneration"] = condition.get("observedGeneration") == generation
    if conditions := status.get("conditions"):
        status["conditions"] = {each["type"]: each for each in conditions}
    return result
