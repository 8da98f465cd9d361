"""An ordered upgrade of Onload on two real nodes with the modules of an emulated kernel.

The operator, the pods of KMM and the DaemonSet are as on kwok nodes, but kubelets run their containers: modules are
loaded and unloaded, files are installed, and the device plugin advertises `amd.com/onload`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

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
    NEW,
    OLD,
    PLUGIN_IMAGE,
    SELECTOR,
    Lab,
    application,
    install_definitions,
    onload,
    user_image,
    violations,
)
from .recording import recording
from .settings import BUSYBOX_IMAGE

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def real(cluster_is_possible: None) -> Iterator[Cluster]:
    spec = NodeSpec(nics=(NicSpec(),), onload=OnloadSpec(loaded=False))
    plans = [NodePlan(name=f"node-{number}", hardware=[emulated(spec)], labels=SELECTOR) for number in (1, 2)]
    with Cluster.running(plans) as running, ExitStack() as stack:
        stack.enter_context(running.namespace(NAMESPACE))
        install_definitions(running)
        account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "onload", "namespace": NAMESPACE}}
        running.apply(account)
        modules = [f"example.com/onload-module:{version}" for version in (OLD, NEW)]
        import_images(running, [*modules, user_image(OLD), user_image(NEW)], plugin=PLUGIN_IMAGE)
        yield running


@pytest.fixture(params=[1, 2], ids=["KMM 1.1", "KMM 2"])
def lab(real: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Lab]:
    with installed(real, request.param) as kmm:
        kmm.set_knobs(host_paths=[CONTROL_DIRECTORY])
        instance = Lab(real, kmm, tmp_path_factory.mktemp("onload-emulated"))
        with instance.operator():
            yield instance


def test_modules_and_files_are_replaced_node_by_node(lab: Lab, real: Cluster) -> None:
    resource = onload(OLD)
    lab.create(resource)
    lab.wait_complete(OLD, timeout=180)
    assert [loaded(real, node) for node in real.nodes] == [{"sfc", "onload"}] * 2
    app, *others = application(2, budget=1)
    container = app["spec"]["template"]["spec"]["containers"][0]
    container |= {"image": BUSYBOX_IMAGE, "imagePullPolicy": "IfNotPresent", "command": ["sleep", "1000000"]}
    app["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 0
    real.apply(app, *others)
    lab.wait(lambda: lab.available() == 2, "the application", 120)
    with recording(real) as events:
        lab.upgrade(NEW)
        lab.wait_complete(NEW, timeout=240)
        lab.wait(lambda: lab.available() == 2, "the application after the upgrade", 120)
        assert violations(events()) == []
    for name, node in real.nodes.items():
        assert loaded(real, name) == {"sfc", "onload"}
        installation = node.run("readlink", "/opt/onload/current").stdout
        assert installation.startswith(f"versions/{NEW}-")
    # Deletes the application first: its PodDisruptionBudget would not allow the eviction of both pods.
    lab.clear()
    wait_until(lambda: not any(loaded(real, node) for node in real.nodes), "modules: unloaded", 60)


def loaded(real: Cluster, node: str) -> set[str]:
    """The modules that the emulated kernel of a node has."""
    modules = real.nodes[node].path("/sys/module")
    return {name for name in ("sfc", "onload") if (modules / name).is_dir()}
