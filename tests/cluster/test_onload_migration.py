"""The operator takes over what releases 3.0.0 and 3.0.1 of the Go operator have installed, without interruption."""

from __future__ import annotations

import http
from collections.abc import Iterator

import pytest

from .kmm_decisions import DESIRED
from .onload_lab import MODULE, NAMES, NAMESPACE, NEW, OLD, SFC, Lab, application, onload, running_lab, violations
from .onload_originals import Release, node_labels, objects
from .recording import recording

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def shared(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    # The Go operator supports no other KMM.
    with running_lab(tmp_path_factory.mktemp("onload-migration"), 1) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    yield shared
    with shared.operator():
        shared.clear()


def install_originals(lab: Lab, release: Release) -> None:
    resource = lab.create(onload(OLD))
    for path, manifest in objects(resource, release):
        code, answer = lab.cluster.request("POST", f"{path}?fieldManager=manager", manifest)
        assert code == http.HTTPStatus.CREATED, answer
    for node in lab.nodes():
        lab.label(node, node_labels(OLD))
    lab.wait(lambda: not lab.problems(OLD), f"the installation of release {release}")
    lab.cluster.apply(*application(3))
    lab.wait(lambda: lab.available() == 3, "the application")


@pytest.mark.parametrize("release", ["3.0.0", "3.0.1"])
def test_the_installation_of_the_go_operator_is_adopted_without_restarts(lab: Lab, release: Release) -> None:
    install_originals(lab, release)
    plugins = {name: each["metadata"]["uid"] for name, each in lab.plugins().items()}
    loaders = {each["metadata"]["uid"] for key in (MODULE, SFC) for each in lab.kmm.pods(key)}
    apps = {each["metadata"]["uid"] for each in lab.app_pods()}
    with recording(lab.cluster) as events, lab.operator():
        lab.wait_complete(OLD)
        assert {name: each["metadata"]["uid"] for name, each in lab.plugins().items()} == plugins
        assert {each["metadata"]["uid"] for key in (MODULE, SFC) for each in lab.kmm.pods(key)} == loaders
        assert {each["metadata"]["uid"] for each in lab.app_pods()} == apps
        recorded = events()
        labels = [MODULE.label(DESIRED), SFC.label(DESIRED), NAMES.gate_label]
        nodes = [event.thing["metadata"]["labels"] for event in recorded if event.kind == "Node"]
        assert all(each.get(label) == OLD for each in nodes for label in labels)
        assert not [event.name for event in recorded if event.kind == "Pod" and event.deleted]
        # From here on it is an installation like any other.
        lab.upgrade(NEW)
        lab.wait_complete(NEW)
        lab.wait(lambda: lab.available() == 3, "the application after the upgrade")
        assert violations(events()) == []
    found = lab.cluster.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/{NAMES.daemonset}")
    assert found
    assert found["metadata"]["labels"]["onload.amd.com/version"] == NEW
    hooks = found["spec"]["template"]["spec"]["containers"][0].get("lifecycle")
    assert hooks is None


@pytest.mark.parametrize("release", ["3.0.0", "3.0.1"])
def test_an_upgrade_that_the_go_operator_began_is_completed(lab: Lab, release: Release) -> None:
    install_originals(lab, release)
    # It was stopped while the second node had no plugin and the first one had the new version without its pod.
    labels = node_labels(NEW)
    lab.label("node-1", {NAMES.gate_label: None})
    lab.wait(lambda: "node-1" not in lab.plugins(), "the plugin pod of node-1: gone")
    lab.label("node-0", {**dict.fromkeys(labels, None)})
    lab.wait(lambda: "node-0" not in lab.kmm.loaded(MODULE), "the modules of node-0: unloaded")
    with recording(lab.cluster) as events, lab.operator():
        lab.upgrade(NEW)
        lab.wait_complete(NEW)
        assert violations(events(), most=3) == []
