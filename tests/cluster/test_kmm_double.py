"""The test double of Kernel Module Management (KMM) on a real API server, with Modules that the test writes."""

from __future__ import annotations

import http
from collections.abc import Iterator
from typing import Any

import pytest

from .cluster import Cluster
from .kmm import Kmm, installed, module
from .kmm_decisions import DESIRED, LOADER, ModuleKey
from .kmm_definitions import GROUP, VERSION
from .machine import wait_until
from .objects import Object

pytestmark = pytest.mark.cluster

KEY = ModuleKey("default", "onload-module")
SELECTOR = {"onload": "true"}
PATH = f"/apis/{GROUP}/{VERSION}/namespaces/default/modules"
OLD, NEW = "8.1", "8.2"
OTHER_IMAGE = [{"regexp": ".*", "containerImage": "example.com/onload:other"}]


@pytest.fixture(scope="module")
def kwok(cluster_is_possible: None) -> Iterator[Cluster]:
    with Cluster.running([]) as running:
        running.add_kwok_nodes(2, labels=SELECTOR)
        yield running


@pytest.fixture(scope="module", params=[1, 2])
def kmm(kwok: Cluster, request: pytest.FixtureRequest) -> Iterator[Kmm]:
    with installed(kwok, request.param) as instance:
        yield instance


@pytest.fixture(autouse=True)
def clean(kmm: Kmm) -> Iterator[None]:
    yield
    kmm.set_knobs()
    kmm.remove_webhooks()
    set_version(kmm, None)
    for each in kmm.modules():
        kmm.cluster.request("DELETE", f"{PATH}/{each['metadata']['name']}")
    wait_until(lambda: not kmm.modules(), "Modules: deleted")
    wait_until(lambda: not kmm.pods(KEY), "pods: deleted")
    wait_until(lambda: not kmm.loaded(KEY), "modules: unloaded")


def set_version(kmm: Kmm, version: str | None, node: str = "") -> None:
    """Sets or removes the label of the desired version of one node or all."""
    change = {"metadata": {"labels": {KEY.label(DESIRED): version}}}
    for name in [node] if node else ["kwok-0", "kwok-1"]:
        code, answer = kmm.cluster.request(
            "PATCH", f"/api/v1/nodes/{name}", change, content="application/merge-patch+json"
        )
        assert code == http.HTTPStatus.OK, answer


def create(kmm: Kmm, **changes: Any) -> Object:
    code, answer = kmm.cluster.request("POST", PATH, module(KEY.name, **{"selector": SELECTOR, **changes}))
    assert code == http.HTTPStatus.CREATED, answer
    return answer


def edit(kmm: Kmm, **container: Any) -> tuple[int, Any]:
    change = {"spec": {"moduleLoader": {"container": container}}}
    return kmm.cluster.request("PATCH", f"{PATH}/{KEY.name}", change, content="application/merge-patch+json")


def counts(kmm: Kmm) -> tuple[int, int, int]:
    found: Any = kmm.cluster.get(f"{PATH}/{KEY.name}")
    loader = found.get("status", {}).get("moduleLoader", {})
    names = ("nodesMatchingSelectorNumber", "desiredNumber", "availableNumber")
    return tuple(loader.get(name, 0) for name in names)


def wait_loaded(kmm: Kmm, *nodes: str) -> None:
    wait_until(lambda: kmm.loaded(KEY) == set(nodes), f"module: loaded on {nodes}")


def test_a_module_is_loaded_on_labelled_nodes_and_unloaded_without_the_label(kmm: Kmm) -> None:
    create(kmm, version=OLD)
    set_version(kmm, OLD, "kwok-0")
    wait_loaded(kmm, "kwok-0")
    wait_until(lambda: counts(kmm) == (2, 2, 1), "counts in the status")
    assert kmm.labels("kwok-0")[KEY.label(LOADER[kmm.generation])] == OLD
    if kmm.generation == 1:
        assert [each["spec"]["nodeName"] for each in kmm.pods(KEY)] == ["kwok-0"]
        assert kmm.labels("kwok-0")[KEY.old_ready] == ""
    else:
        wait_until(lambda: not kmm.pods(KEY), "worker pods: deleted")
        assert kmm.labels("kwok-0")[KEY.version_ready] == OLD
    set_version(kmm, None)
    wait_loaded(kmm)
    wait_until(lambda: not kmm.pods(KEY), "pods: deleted")
    assert not [label for label in kmm.labels("kwok-0") if KEY.name in label]


def test_a_module_without_version_is_loaded_without_labels(kmm: Kmm) -> None:
    create(kmm, version="")
    wait_loaded(kmm, "kwok-0", "kwok-1")


def test_a_new_version_is_loaded_when_the_label_was_removed_and_set(kmm: Kmm) -> None:
    create(kmm, version=OLD)
    set_version(kmm, OLD)
    wait_loaded(kmm, "kwok-0", "kwok-1")
    assert edit(kmm, version=NEW, kernelMappings=OTHER_IMAGE)[0] == http.HTTPStatus.OK
    kmm.set_knobs(unload_delay=0.3)
    set_version(kmm, None, "kwok-0")
    wait_loaded(kmm, "kwok-1")
    set_version(kmm, NEW, "kwok-0")
    wait_loaded(kmm, "kwok-0", "kwok-1")
    assert kmm.labels("kwok-0")[KEY.label(LOADER[kmm.generation])] == NEW
    assert kmm.labels("kwok-1")[KEY.label(LOADER[kmm.generation])] == OLD
    if kmm.generation == 1:
        images = {each["spec"]["nodeName"]: each["spec"]["containers"][0]["image"] for each in kmm.pods(KEY)}
        assert images["kwok-0"] == "example.com/onload:other"
        assert images["kwok-1"] != images["kwok-0"]
    else:
        found: Any = [kmm.node_config(node) for node in ("kwok-0", "kwok-1")]
        assert [each["status"]["modules"][0]["version"] for each in found] == [NEW, OLD]


def test_a_module_that_fails_to_load_is_not_ready_until_it_succeeds(kmm: Kmm) -> None:
    kmm.set_knobs(fail_load=f"kwok-0 .* {NEW}")
    create(kmm, version=NEW)
    set_version(kmm, NEW)
    wait_loaded(kmm, "kwok-1")
    wait_until(lambda: any(each["spec"]["nodeName"] == "kwok-0" for each in kmm.pods(KEY)), "a pod on kwok-0")
    assert kmm.loaded(KEY) == {"kwok-1"}
    kmm.set_knobs()
    wait_loaded(kmm, "kwok-0", "kwok-1")


def test_a_module_that_cannot_be_unloaded_blocks_the_next_version(kmm: Kmm) -> None:
    create(kmm, version=OLD)
    set_version(kmm, OLD, "kwok-0")
    wait_loaded(kmm, "kwok-0")
    kmm.set_knobs(stuck_unload="kwok-0")
    edit(kmm, version=NEW)
    set_version(kmm, NEW, "kwok-0")
    loader = KEY.label(LOADER[kmm.generation])
    wait_until(lambda: loader not in kmm.labels("kwok-0"), "the loader label: removed")
    wait_until(lambda: kmm.pods(KEY), "a pod that unloads")
    kmm.set_knobs()
    wait_until(lambda: kmm.labels("kwok-0").get(loader) == NEW, "the loader label: new")
    wait_loaded(kmm, "kwok-0")


def test_deletion_of_a_module_unloads_it(kmm: Kmm) -> None:
    create(kmm, version=OLD)
    set_version(kmm, OLD)
    wait_loaded(kmm, "kwok-0", "kwok-1")
    kmm.cluster.request("DELETE", f"{PATH}/{KEY.name}")
    wait_until(lambda: not kmm.modules(), "the Module: deleted")
    wait_loaded(kmm)


def test_a_build_delays_loading(kmm: Kmm) -> None:
    kmm.set_knobs(build_delay=1)
    build = {"dockerfileConfigMap": {"name": "dockerfile"}}
    create(kmm, version=OLD, mappings=[{"regexp": ".*", "containerImage": "example.com/built:1", "build": build}])
    set_version(kmm, OLD)
    wait_loaded(kmm, "kwok-0", "kwok-1")


def test_the_definition_rejects_invalid_modules(kmm: Kmm) -> None:
    wrong = [
        module("wrong", mappings=[]),
        {**module("wrong"), "spec": {"moduleLoader": module("wrong")["spec"]["moduleLoader"]}},
    ]
    if kmm.generation == 1:
        wrong.append(module("wrong", modprobe={}))
    for each in wrong:
        code, answer = kmm.cluster.request("POST", PATH, each)
        assert code == http.HTTPStatus.UNPROCESSABLE_ENTITY, answer


def test_the_webhook_rejects_invalid_modules(kmm: Kmm) -> None:
    kmm.enable_webhook()
    image = {"containerImage": "example.com/onload:1"}
    wrong = [
        module("neither", mappings=[image]),
        module("both", mappings=[{**image, "regexp": "a", "literal": "b"}]),
        module("regexp", mappings=[{**image, "regexp": "("}]),
        module("image", mappings=[{"regexp": "a", "containerImage": ""}]),
        module("raw", modprobe={"moduleName": "onload", "rawArgs": {"load": ["onload"]}}),
    ]
    create(kmm, version=OLD)
    if kmm.generation == 2:
        wrong.append(module("a" * 34))
        wrong.append(module("tag", mappings=[{"regexp": "a", "containerImage": "example.com:5000/onload"}]))
        assert edit(kmm, version="")[0] == http.HTTPStatus.UNPROCESSABLE_ENTITY
    for each in wrong:
        code, answer = kmm.cluster.request("POST", PATH, each)
        assert code == http.HTTPStatus.UNPROCESSABLE_ENTITY, (each["metadata"]["name"], answer)
    assert edit(kmm, version=NEW, kernelMappings=OTHER_IMAGE)[0] == http.HTTPStatus.OK


def test_all_requests_are_rejected_with_the_option(kmm: Kmm) -> None:
    create(kmm, version=OLD)
    kmm.reject_all()
    assert edit(kmm, version=NEW)[0] == http.HTTPStatus.UNPROCESSABLE_ENTITY
