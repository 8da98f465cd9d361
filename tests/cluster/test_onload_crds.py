"""The definition of Onload on a real API server without webhooks: what it accepts, rejects, defaults and shows."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from onloadresources import DEFAULTS, MAPPING, SPEC, onload, resource

from accelplane.kube.rules import broken
from accelplane.onload import rules

from .cluster import Cluster
from .machine import REPOSITORY

pytestmark = pytest.mark.cluster

CONFIG = REPOSITORY / "deploy" / "onload" / "config"
PATH = "/apis/onload.amd.com/v1alpha1/namespaces/default/onloads?dryRun=All"
Object = dict[str, Any]


@pytest.fixture(scope="module")
def definition(cluster: Cluster) -> Iterator[None]:
    """The definition in the cluster, for the tests of this file."""
    cluster.kubectl("apply", "--kustomize", CONFIG / "crd")
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", CONFIG / "crd/bases")
    yield
    cluster.kubectl("delete", "--kustomize", CONFIG / "crd")


def post(cluster: Cluster, **paths: Any) -> tuple[Object, str]:
    """The object as the API server would store it, and its error."""
    document = resource(**paths)
    document["spec"]["devicePlugin"] = {
        name: value for name, value in document["spec"]["devicePlugin"].items() if DEFAULTS.get(name) != value
    }
    status, answer = cluster.request("POST", PATH, document)
    return (answer, "") if status == 201 else ({}, answer["message"])


def test_the_definition_is_established_and_structural(cluster: Cluster, definition: None) -> None:
    found = json.loads(cluster.kubectl("get", "--filename", CONFIG / "crd/bases", "--output=json"))
    conditions = {each["type"] for each in found["status"]["conditions"] if each["status"] == "True"}
    assert "Established" in conditions
    assert "NonStructuralSchema" not in conditions


def test_defaults_are_those_of_the_original(cluster: Cluster, definition: None) -> None:
    found, error = post(cluster, onload__controlPlane={})
    assert error == ""
    assert found["spec"]["devicePlugin"] == DEFAULTS
    assert found["spec"]["onload"]["controlPlane"] == {"parameters": ["-K"]}
    assert found["spec"]["onload"]["moduleManagement"] == "KMM"
    assert found["spec"]["upgrade"] == SPEC["upgrade"]


@pytest.mark.parametrize(
    "paths",
    [
        {"onload__kernelMappings": []},
        {"onload__moduleManagement": "External"},
        {"devicePlugin__mountOnload": True},
        {"upgrade": {"maxUnavailable": 0}},
        {"upgrade": {"maxUnavailable": "0%"}},
    ],
)
def test_a_violated_rule_is_rejected_with_the_message_of_admission(
    cluster: Cluster, definition: None, paths: Object
) -> None:
    spec = onload(**paths).spec
    (message,) = [*broken(spec, rules.SPEC), *broken(spec.device_plugin, rules.DEVICE_PLUGIN)]
    assert message in post(cluster, **paths)[1]


@pytest.mark.parametrize(
    "paths",
    [
        {"devicePlugin__mountOnload": True, "devicePlugin__setPreload": False},
        {"devicePlugin__mountOnload": True, "devicePlugin__preload": False},
        {"onload__moduleManagement": "External", "onload__kernelMappings": []},
        {"selector": {}},
        {"upgrade": {"maxUnavailable": "25%", "nodeTimeout": "90s"}},
        {"upgrade": {"maxUnavailable": 3, "verify": {"strict": True, "probe": {"image": "x"}}}},
        # What only the webhook rejects.
        {"devicePlugin__maxPodsPerNode": -1, "devicePlugin__hostOnloadPath": "relative"},
        {"onload__version": "any text", "onload__imagePullPolicy": "x", "serviceAccountName": ""},
        {"onload__kernelMappings": [MAPPING | {"regexp": "(", "sfc": {}, "build": {"dockerfileConfigMap": {}}}]},
    ],
)
def test_all_other_specs_are_accepted(cluster: Cluster, definition: None, paths: Object) -> None:
    assert post(cluster, **paths)[1] == ""


@pytest.mark.parametrize("name", ["pre-built", "external-modules"])
def test_samples_apply(cluster: Cluster, definition: None, name: str) -> None:
    overlay = CONFIG / "samples/onload/overlays" / name
    result = cluster.kubectl("apply", "--kustomize", overlay, "--dry-run=server", "--validate=strict")
    assert "onload.onload.amd.com/onload created (server dry run)" in result


def test_columns_show_version_and_readiness(cluster: Cluster, definition: None) -> None:
    document = {**resource(), "spec": copy.deepcopy(SPEC)}
    status, _ = cluster.request("POST", PATH.partition("?")[0], document)
    assert status == 201
    try:
        header, row = cluster.kubectl("get", "onload", "onload").splitlines()
        assert header.split() == ["NAME", "VERSION", "READY", "NODES", "AGE"]
        assert row.split()[:2] == ["onload", "8.1.2.26"]
    finally:
        cluster.kubectl("delete", "onload", "onload")
