"""The image of the Onload operator as its Deployment, with the account, rights and limits of the manifests.

It installs Onload on a node with an emulated kernel, and releases the node when the resource is deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import yaml
from manifests import own_image

from accelplane.simulate import NodeSpec
from accelplane.simulate.offload import NicSpec, OnloadSpec

from .cluster import Cluster
from .emulated import emulated
from .kmm import installed
from .machine import wait_until
from .node import NodePlan
from .onload_images import CONTROL_DIRECTORY, import_images
from .onload_lab import (
    NAMESPACE,
    OLD,
    OPERATOR_NAMESPACE,
    PLUGIN_IMAGE,
    SELECTOR,
    TREE,
    Lab,
    install_definitions,
    onload,
    user_image,
)
from .product_image import product_image

pytestmark = pytest.mark.cluster

LABEL = "control-plane%3Dcontroller-manager"


@pytest.fixture
def real(cluster_is_possible: None) -> Iterator[Cluster]:
    spec = NodeSpec(nics=(NicSpec(),), onload=OnloadSpec(loaded=False))
    plan = NodePlan(name="node-1", hardware=[emulated(spec)], labels=SELECTOR)
    with Cluster.running([plan]) as running, running.namespace(NAMESPACE):
        install_definitions(running)
        metadata = {"name": "onload", "namespace": NAMESPACE}
        running.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
        running.import_image(product_image())
        # The device plugin sees the emulated kernel in the mount namespace of the node only.
        import_images(running, [f"example.com/onload-module:{OLD}", user_image(OLD)], plugin=PLUGIN_IMAGE)
        yield running


def deployment(cluster: Cluster) -> dict[str, Any]:
    """The Deployment of the tree with another image of the device plugin."""
    documents = yaml.safe_load_all(cluster.kubectl("kustomize", TREE / "config" / "default"))
    (found,) = (each for each in documents if each["kind"] == "Deployment")
    (container,) = found["spec"]["template"]["spec"]["containers"]
    (variable,) = (each for each in container["env"] if each["name"] == "DEVICE_PLUGIN_IMG")
    variable["value"] = PLUGIN_IMAGE
    return found


def replicas(cluster: Cluster, path: str) -> int:
    """The number of available replicas of a Deployment."""
    found: Any = cluster.get(path)
    return found["status"].get("availableReplicas", 0)


def test_the_image_of_the_operator_installs_and_releases_onload(
    real: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    result = deployment(real)
    path = f"/apis/apps/v1/namespaces/{OPERATOR_NAMESPACE}/deployments/{result['metadata']['name']}"
    with ExitStack() as stack:
        kmm = stack.enter_context(installed(real, 2))
        kmm.set_knobs(host_paths=[CONTROL_DIRECTORY])
        lab = Lab(real, kmm, tmp_path_factory.mktemp("onload-image"))
        real.apply(result)
        wait_until(lambda: replicas(real, path) == 1, "the operator: available", 180)
        lab.create(onload(OLD))
        lab.wait_complete(OLD, timeout=180)
        (pod,) = lab.items(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/pods?labelSelector={LABEL}")
        assert pod["spec"]["containers"][0]["image"] == own_image("onload-operator")
        (status,) = pod["status"]["containerStatuses"]
        lab.clear()
        log = real.kubectl("logs", f"--namespace={OPERATOR_NAMESPACE}", pod["metadata"]["name"])
        assert status["restartCount"] == 0, log
        assert "forbidden" not in log, log
        assert "Traceback" not in log, log
