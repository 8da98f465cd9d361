"""The operator's definitions on a real API server without webhooks: accepted and rejected objects, kubectl explain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from customresources import ACCEPTED_BY_THE_ORIGINAL, BROKEN_RULES, plugin, resource

from accelplane.kube.rules import broken
from accelplane.operator import models, rules

from .cluster import Cluster
from .machine import REPOSITORY, wait_until

pytestmark = pytest.mark.cluster

OPERATOR = REPOSITORY / "deploy" / "operator"
DRY_RUN = ("--dry-run=server", "--validate=strict")


@pytest.fixture(scope="module")
def definitions(cluster: Cluster) -> Iterator[None]:
    """The operator's definitions in the cluster, for the tests of this file."""
    cluster.kubectl("apply", "--server-side", "--kustomize", OPERATOR / "crd")
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", OPERATOR / "crd/bases")
    yield
    cluster.kubectl("delete", "--kustomize", OPERATOR / "crd")


def create_error(cluster: Cluster, family: str, spec: dict[str, Any]) -> str:
    """The error of the API server for a resource; empty if it accepts the resource."""
    kind = models.KINDS[family].__name__.lower()
    status, answer = cluster.request(
        "POST", f"/apis/deviceplugin.intel.com/v1/{kind}s?dryRun=All", resource(family, **spec)
    )
    return "" if status == 201 else answer["message"]


def test_all_definitions_are_established_and_structural(cluster: Cluster, definitions: None) -> None:
    listed = json.loads(cluster.kubectl("get", "--filename", OPERATOR / "crd/bases", "--output=json"))["items"]
    assert len(listed) == len(models.KINDS) + 2  # those of FPGA functions and regions
    for definition in listed:
        conditions = {each["type"]: each for each in definition["status"]["conditions"]}
        assert conditions["Established"]["status"] == "True"
        assert "NonStructuralSchema" not in conditions, conditions["NonStructuralSchema"]["message"]


def test_the_samples_apply(cluster: Cluster, definitions: None) -> None:
    samples = cluster.kubectl("apply", "--kustomize", OPERATOR / "samples", *DRY_RUN)
    assert samples.count("deviceplugin-sample created (server dry run)") == len(models.KINDS)
    assert samples.count("fpga.intel.com/") == 21


@pytest.mark.parametrize(
    ("family", "spec", "message"),
    [
        ("gpu", {"sharedDevNum": 0}, "greater than or equal to 1"),
        ("gpu", {"preferredAllocationPolicy": "most"}, "supported values"),
        ("gpu", {"xpumdEndpoint": "/run/" + "x" * 103}, "Too long: may not be "),
        ("npu", {"resources": {"limits": {"cpu": "much"}}}, "should match"),
        ("npu", {"imagePullSecrets": [{"name": str(number)} for number in range(65)]}, "must have at most 64 items"),
        ("npu", {"priorityClassName": "x" * 254}, "Too long: may not be "),
    ],
)
def test_a_value_outside_the_limits_is_rejected(
    cluster: Cluster, definitions: None, family: str, spec: dict[str, Any], message: str
) -> None:
    assert message in create_error(cluster, family, spec)


@pytest.mark.parametrize(("family", "spec"), BROKEN_RULES)
def test_a_violated_rule_is_rejected_with_the_message_of_admission(
    cluster: Cluster, definitions: None, family: str, spec: dict[str, Any]
) -> None:
    found = plugin(family, **spec).spec
    of_gpu = rules.GPU_HEALTH if isinstance(found, models.GpuSpec) else ()
    for message in (*broken(found, rules.UPDATE_STRATEGY), *broken(found, of_gpu)):
        assert message in create_error(cluster, family, spec)


@pytest.mark.parametrize(("family", "spec"), ACCEPTED_BY_THE_ORIGINAL)
def test_objects_that_the_original_accepts_without_webhooks_are_accepted(
    cluster: Cluster, definitions: None, family: str, spec: dict[str, Any]
) -> None:
    assert create_error(cluster, family, spec) == ""


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("gpu", {"healthManagement": True, "xpumdEndpoint": ""}),
        ("gpu", {"xpumdEndpoint": "/run/xpumd/intelxpuinfo.sock"}),
        ("npu", {"updateStrategy": {"rollingUpdate": {"maxSurge": "0%", "maxUnavailable": "100%"}}}),
        ("npu", {"updateStrategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 3}}}),
        ("npu", {"updateStrategy": {"type": "OnDelete"}}),
        (
            "npu",
            {
                "resources": {"limits": {"cpu": 1, "memory": "0.5Gi"}, "requests": {"cpu": "100m"}},
                "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "10%"}},
                "imagePullSecrets": [{"name": "registry"}],
                "imagePullPolicy": "Always",
                "priorityClassName": "system-node-critical",
                "podAnnotations": {"example.com/a": "b"},
                "tolerations": [{"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}],
            },
        ),
    ],
)
def test_valid_fields_of_ours_are_accepted(
    cluster: Cluster, definitions: None, family: str, spec: dict[str, Any]
) -> None:
    assert create_error(cluster, family, spec) == ""


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("spec.tolerations.tolerationSeconds", "Seconds until a pod is evicted"),
        ("spec.updateStrategy.rollingUpdate.maxSurge", "Must be 0"),
        ("status.controlledDaemonSet.uid", "UID of the object."),
    ],
)
def test_kubectl_explains_nested_fields(cluster: Cluster, definitions: None, field: str, words: str) -> None:
    def explained() -> bool:
        return words in " ".join(cluster.kubectl("explain", f"gpudeviceplugins.{field}", check=False).split())

    # The API server publishes the schemas of new definitions with a delay.
    wait_until(explained, f"an explanation of {field}", 60)


def test_a_status_requires_both_numbers_and_accepts_conditions(cluster: Cluster, definitions: None) -> None:
    cluster.kubectl("apply", "--filename", OPERATOR / "samples" / "deviceplugin_v1_dsadeviceplugin.yaml")
    words = ("patch", "dsadeviceplugin", "dsadeviceplugin-sample", "--subresource=status", "--type=merge", "--patch")
    path = "/apis/deviceplugin.intel.com/v1/dsadeviceplugins/dsadeviceplugin-sample"
    result = cluster.get(path)
    assert result is not None
    assert result["spec"]["driver"] == "idxd"
    status, answer = cluster.request("PUT", f"{path}/status", result | {"status": {"nodeNames": ["a"]}})
    assert (status, answer["message"].count("Required value")) == (422, 2)
    condition = {
        "type": "Available",
        "status": "True",
        "reason": "PodsReady",
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
        "observedGeneration": 1,
    }
    status = {"desiredNumberScheduled": 2, "numberReady": 0, "conditions": [condition]}
    cluster.kubectl(*words, json.dumps({"status": status}))
    columns = cluster.kubectl("get", "dsadeviceplugins").splitlines()
    assert columns[0].split() == ["NAME", "DESIRED", "READY", "NODE", "SELECTOR", "AGE", "AVAILABLE", "DEGRADED"]
    assert columns[1].split()[1:3] == ["2", "0"]
    assert columns[1].split()[-1] == "True"
