"""The double of Kernel Module Management on a real node: its pods load and unload modules of an emulated kernel."""

from __future__ import annotations

import errno
import http
from collections.abc import Iterator

import pytest

from accelplane.simulate import NodeSpec
from accelplane.simulate.offload import NicSpec, OnloadSpec

from .cluster import Cluster
from .emulated import EmulatedKernel, emulated, kernel_of
from .kmm import Kmm, installed, module
from .kmm_decisions import DESIRED, ModuleKey
from .kmm_definitions import GROUP, VERSION
from .machine import wait_until
from .node import NodePlan
from .onload_images import CONTROL_DIRECTORY, import_images

pytestmark = pytest.mark.cluster

SFC, ONLOAD = ModuleKey("default", "onload-sfcmod"), ModuleKey("default", "onload-module")
IMAGE = "example.com/onload-module:{}"
OLD, NEW = "8.1", "8.2"
PATH = f"/apis/{GROUP}/{VERSION}/namespaces/default/modules"
NODE = "node-1"


@pytest.fixture(scope="module")
def real(cluster_is_possible: None) -> Iterator[Cluster]:
    spec = NodeSpec(nics=(NicSpec(),), onload=OnloadSpec(loaded=False))
    with Cluster.running([NodePlan(hardware=[emulated(spec)])]) as running:
        import_images(running, [IMAGE.format(OLD), IMAGE.format(NEW)])
        yield running


@pytest.fixture(scope="module", params=[1, 2], ids=["KMM 1.1", "KMM 2"])
def kmm(real: Cluster, request: pytest.FixtureRequest) -> Iterator[Kmm]:
    with installed(real, request.param) as instance:
        instance.set_knobs(host_paths=[CONTROL_DIRECTORY])
        yield instance
        set_versions(instance, None, None)
        wait_until(lambda: not loaded(real, "sfc"), "the module sfc: unloaded")


def create(kmm: Kmm, key: ModuleKey, name: str, version: str, **container: str) -> None:
    manifest = module(
        key.name,
        version=version,
        modprobe={"moduleName": name, "parameters": ["--first-time"]},
        mappings=[{"regexp": ".*", "containerImage": IMAGE.format(version)}],
        **container,
    )
    code, answer = kmm.cluster.request("POST", PATH, manifest)
    assert code == http.HTTPStatus.CREATED, answer


def set_versions(kmm: Kmm, sfc: str | None, onload: str | None) -> None:
    change = {"metadata": {"labels": {SFC.label(DESIRED): sfc, ONLOAD.label(DESIRED): onload}}}
    path = f"/api/v1/nodes/{NODE}"
    code, answer = kmm.cluster.request("PATCH", path, change, content="application/merge-patch+json")
    assert code == http.HTTPStatus.OK, answer


def loaded(real: Cluster, name: str) -> bool:
    return real.nodes[NODE].path(f"/sys/module/{name}").is_dir()


def wait_loaded(kmm: Kmm, *names: str) -> None:
    keys = {"sfc": SFC, "onload": ONLOAD}

    def is_reached() -> bool:
        return all(
            (loaded(kmm.cluster, name), NODE in kmm.loaded(key)) == (name in names, name in names)
            for name, key in keys.items()
        )

    wait_until(is_reached, f"modules and labels: {names}", 60)


def test_modules_are_loaded_unloaded_and_loaded_again_after_a_reboot(kmm: Kmm, real: Cluster) -> None:
    kernel: EmulatedKernel = kernel_of(real.nodes[NODE])
    # The kernel has loaded its own driver.
    create(kmm, SFC, "sfc", OLD, inTreeModuleToRemove="sfc")
    create(kmm, ONLOAD, "onload", OLD)
    set_versions(kmm, OLD, None)
    wait_loaded(kmm, "sfc")
    real.nodes[NODE].reboot()
    wait_until(lambda: is_loaded_since_boot(kmm, SFC), "sfc: loaded after the reboot", 60)
    # A module that cannot be loaded at first.
    kernel.do("load", module="onload", errno=errno.errorcode[errno.EIO], times=1)
    set_versions(kmm, OLD, OLD)
    wait_loaded(kmm, "sfc", "onload")
    set_versions(kmm, OLD, None)
    wait_loaded(kmm, "sfc")
    set_versions(kmm, None, None)
    wait_loaded(kmm)


def is_loaded_since_boot(kmm: Kmm, key: ModuleKey) -> bool:
    """Whether the container of the loader pod was started again, or the status has the new boot ID."""
    if kmm.generation == 1:
        statuses = [each for pod in kmm.pods(key) for each in pod["status"].get("containerStatuses", ())]
        return any(each["restartCount"] and each["ready"] for each in statuses)
    node, config = kmm.cluster.get(f"/api/v1/nodes/{NODE}"), kmm.node_config(NODE)
    assert node
    assert config
    boots = [each["bootId"] for each in config["status"]["modules"] if each["name"] == key.name]
    return boots == [node["status"]["nodeInfo"]["bootID"]]


def test_a_module_in_use_stays_loaded(kmm: Kmm, real: Cluster) -> None:
    kernel = kernel_of(real.nodes[NODE])
    set_versions(kmm, OLD, OLD)
    wait_loaded(kmm, "sfc", "onload")
    kernel.hold("onload")
    set_versions(kmm, OLD, None)
    if kmm.generation == 1:
        # A failing hook does not prevent the end of the pod.
        wait_until(lambda: not kmm.pods(ONLOAD), "the loader pod: deleted", 60)
    else:
        wait_until(lambda: any(phase(each) == "Failed" for each in kmm.pods(ONLOAD)), "a worker pod: failed", 60)
        assert NODE in kmm.loaded(ONLOAD)
    assert loaded(real, "onload")
    kernel.release("onload")
    if kmm.generation == 1:
        kernel.do("unload", module="onload")
    wait_loaded(kmm, "sfc")


def phase(pod: dict[str, dict[str, str]]) -> str:
    return pod["status"]["phase"]
