"""The chart `accelplane` on a real cluster with pods of its images, from the first device to the removal.

All tests share a cluster. Each compares all objects of the API before and after its release.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from charts import CHARTS
from customresources import resource

from .build import ClusterError
from .cluster import Cluster
from .kmm_definitions import definitions
from .machine import wait_until
from .node import Node
from .objects import Object
from .releases import Helm, all_objects, runner, succeed
from .trees import applied

pytestmark = pytest.mark.cluster

CHART = CHARTS / "accelplane"
I915 = "gpu.intel.com/i915"
PRIVILEGED = "pod-security.kubernetes.io/enforce=privileged"
ALL = ("agent", "operator", "labels", "nodeFeatureRules", "onload", "fleet", "monitoring")
WEBHOOKS = ("sgxWebhook", "fpgaWebhook")
REGISTRY = {"registryUrl": "registry.example.com", "registryUser": "user", "registrySecret": "password"}
# Kinds of other projects that the chart has objects of.
FOREIGN = {
    "nodefeaturerules.nfd.k8s-sigs.io": ("NodeFeatureRule", "v1alpha1", "Cluster"),
    "servicemonitors.monitoring.coreos.com": ("ServiceMonitor", "v1", "Namespaced"),
    "podmonitors.monitoring.coreos.com": ("PodMonitor", "v1", "Namespaced"),
    "prometheusrules.monitoring.coreos.com": ("PrometheusRule", "v1", "Namespaced"),
}


class Place(NamedTuple):
    """Where a test installs a release. `left` are the objects that the test expects to remain."""

    cluster: Cluster
    node: Node
    namespace: str
    run: Helm
    left: set[str]


@pytest.fixture
def place(image: None, cluster: Cluster, node: Node, namespace: str, tmp_path: Path) -> Iterator[Place]:
    """A namespace that admits the agent. Checks that only the expected objects remain."""
    before = all_objects(cluster, namespace)
    cluster.kubectl("label", "namespace", namespace, PRIVILEGED)
    place_ = Place(cluster, node, namespace, runner(cluster, namespace, tmp_path / "helm"), set())
    yield place_

    def remaining() -> set[str]:
        return all_objects(cluster, namespace) - before

    with suppress(ClusterError):
        wait_until(lambda: remaining() == place_.left, "only the expected objects", 60, every=1)
    found = remaining()
    for each in found:
        cluster.kubectl("delete", f"--namespace={namespace}", "--ignore-not-found", each)
    assert found == place_.left


def foreign_definition(name: str, kind: str, version: str, scope: str) -> Object:
    """A definition that admits any content."""
    plural, _, group = name.partition(".")
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    versions = [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": name},
        "spec": {"group": group, "names": names, "scope": scope, "versions": versions},
    }


@pytest.fixture
def foreign(cluster: Cluster) -> Iterator[None]:
    """The definitions of NFD, the Prometheus operator and Kernel Module Management."""
    objects = [foreign_definition(name, *fields) for name, fields in FOREIGN.items()]
    objects += [each for each in definitions(2) if each["kind"] == "CustomResourceDefinition"]
    with applied(cluster, objects):
        names = [each["metadata"]["name"] for each in objects]
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", *(f"crd/{name}" for name in names))
        yield


def wait_allocatable(node: Node, count: int) -> None:
    wait_until(lambda: (node.allocatable(I915) or 0) == count, f"{count} {I915}: allocatable", 60)


def values(directory: Path, **content: object) -> list[str | Path]:
    """The option for a file with these values."""
    file = directory / "values.yaml"
    file.write_text(json.dumps(content))
    return ["--values", file]


def newer_chart(directory: Path) -> Path:
    """The chart as a later release: another version with the same images."""
    chart = directory / "accelplane"
    shutil.copytree(CHART, chart)
    file = chart / "Chart.yaml"
    fields = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(fields | {"version": "1.0.1"}))
    return chart


def agent(cluster: Cluster, namespace: str) -> Any:
    """The DaemonSet's pod."""
    found: Any = cluster.get(f"/apis/apps/v1/namespaces/{namespace}/daemonsets/accelplane-node")
    return found["spec"]["template"]["spec"]


def check_suites(text: str, *names: str) -> None:
    """Checks that `helm test` has run these pods, and that all its hooks succeeded."""
    assert {*names} == {*re.findall(r"^TEST SUITE: +(\S+)$", text, re.MULTILINE)}
    assert {*re.findall(r"^Phase: +(\w+)$", text, re.MULTILINE)} == {"Succeeded"}


def test_a_release_with_defaults_is_upgraded_rolled_back_and_removed(place: Place, tmp_path: Path) -> None:
    cluster, node, namespace, run, _ = place
    succeed(run("install", "accelplane", CHART))
    wait_allocatable(node, 2)
    check_suites(succeed(run("test", "accelplane")), "accelplane-test-workloads")

    shared = {"enabled": ["gpu"], "plugins": {"gpu": {"shared-dev-num": 3}}}
    succeed(run("upgrade", "accelplane", CHART, *values(tmp_path, agent={"config": shared}), "--wait"))
    wait_allocatable(node, 6)
    succeed(run("rollback", "accelplane", "1", "--wait"))
    wait_allocatable(node, 2)

    # A kubelet whose directory has another name, and a newer chart.
    node.run("mkdir", "-p", "/srv")
    node.run("ln", "-sfn", "/var/lib/kubelet", "/srv/kubelet")
    elsewhere = values(tmp_path, agent={"kubeletDirectory": "/srv/kubelet", "args": ["-v=3"]})
    succeed(run("upgrade", "accelplane", newer_chart(tmp_path), *elsewhere, "--wait"))
    (listed,) = json.loads(succeed(run("list", "--output=json")))
    assert (listed["chart"], listed["revision"], listed["status"]) == ("accelplane-1.0.1", "4", "deployed")
    paths = [each["hostPath"]["path"] for each in agent(cluster, namespace)["volumes"] if "hostPath" in each]
    assert "/srv/kubelet/device-plugins" in paths
    assert "/var/lib/kubelet/device-plugins" not in paths
    wait_allocatable(node, 2)

    succeed(run("uninstall", "accelplane", "--wait"))
    wait_allocatable(node, 0)
    node.run("rm", "/srv/kubelet")


def pull_secrets(cluster: Cluster, namespace: str) -> dict[str, set[str]]:
    """The Secrets for images of each DaemonSet and Deployment."""
    found = json.loads(cluster.kubectl("get", "daemonsets,deployments", f"--namespace={namespace}", "--output=json"))
    return {
        each["metadata"]["name"]: {secret["name"] for secret in each["spec"]["template"]["spec"]["imagePullSecrets"]}
        for each in found["items"]
    }


def enabled(names: Sequence[str]) -> dict[str, bool]:
    return {"agent": False} | dict.fromkeys(names, True)


def test_all_components_work_in_one_release(foreign: None, place: Place, tmp_path: Path) -> None:
    cluster, node, namespace, run, left = place
    settings = values(
        tmp_path,
        components=enabled(ALL),
        imagePullSecrets=[{"name": "existing"}],
        operator={"privateRegistry": REGISTRY, "imagePullSecrets": [{"name": "existing"}]},
        agent={"args": ["--plugins=gpu"]},
        crds={"keep": False},
    )
    succeed(run("install", "all", CHART, *settings, "--timeout=4m"))
    check_suites(succeed(run("test", "all", "--timeout=4m")), "all-test-workloads", "all-test-webhook")
    wait_allocatable(node, 2)

    # The webhook completes the resource, and the operator creates the DaemonSet, with the Secret of the registry.
    manifest = resource("npu", "mine", nodeSelector={"example.com/nowhere": "true"})
    cluster.kubectl("apply", "--filename=-", text=json.dumps(manifest))
    daemonset = f"/apis/apps/v1/namespaces/{namespace}/daemonsets/intel-npu-plugin-mine"
    wait_until(lambda: cluster.get(daemonset), "the DaemonSet of the resource", 60)
    registry = "all-operator-private-registry"
    assert pull_secrets(cluster, namespace) == {
        "accelplane-node": {"existing"},
        "accelplane-labels": {"existing"},
        "accelplane-fleet": {"existing"},
        "onload-operator-controller-manager": {"existing"},
        "inteldeviceplugins-controller-manager": {"existing", registry},
        "intel-npu-plugin-mine": {registry},
    }
    cluster.kubectl("delete", "npudeviceplugin", "mine")
    wait_until(lambda: not cluster.get(daemonset), "the DaemonSet of the resource: deleted", 60)

    succeed(run("uninstall", "all", "--wait"))
    wait_allocatable(node, 0)
    definitions_of_operator = cluster.kubectl("get", "crd", "--output=name").split()
    left.update(
        each for each in definitions_of_operator if each.endswith((".deviceplugin.intel.com", ".fpga.intel.com"))
    )
    left.update(f"lease.coordination.k8s.io/{name}" for name in ("d1c7b6d5.intel.com", "daabde26.amd.com"))


def test_the_webhooks_for_pods_work_without_the_operator(place: Place, tmp_path: Path) -> None:
    run, left = place.run, place.left
    succeed(run("install", "webhooks", CHART, *values(tmp_path, components=enabled(WEBHOOKS))))
    check_suites(succeed(run("test", "webhooks")), "webhooks-test-workloads")
    succeed(run("uninstall", "webhooks", "--wait"))
    left.update(
        f"customresourcedefinition.apiextensions.k8s.io/{kind}.fpga.intel.com"
        for kind in ("acceleratorfunctions", "fpgaregions")
    )
