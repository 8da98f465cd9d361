"""The SGX webhook's rules as admission policies of the API server, compared with the webhook on the same pods.

Pods that the webhook has mutated are created before the policies exist, and the same pods, unchanged, after that: 2,000
of them with `ACCELPLANE_THOROUGH`, otherwise half of them. The classes of pods that differ are tests of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from manifests import overlay
from thoroughness import examples

from accelplane.admission.sgx import Pod, SgxOptions, mutate
from accelplane.kube.admission import Decision
from accelplane.kube.testing import apply_json_patch

from .build import kubernetes_minor
from .cluster import Cluster
from .machine import wait_until
from .sgx_pods import EPC, RUNTIME_CLASS, Object, sgx_pods

pytestmark = pytest.mark.cluster

PODS = "/api/v1/namespaces/default/pods?dryRun=All"
OPTIONS = (
    SgxOptions(),
    SgxOptions(aesmd_name="quoted", socket_directory="/run/q", sidecar_without_epc=True, whole_pages=True),
    SgxOptions(socket_directory="/run/r", socket_volume="emptyDir"),
    SgxOptions(aesmd_name="a", socket_directory="/run/s", socket_volume="hostPath", whole_pages=True),
)
COUNTS = tuple(map(examples, (1700, 100, 100, 100)))
_GENERATED = ("name", "uid", "creationTimestamp", "managedFields")


@pytest.fixture(scope="module")
def api(cluster_is_possible: None) -> Iterator[Cluster]:
    """A control plane without nodes."""
    if kubernetes_minor() < 36:
        pytest.skip("MutatingAdmissionPolicy v1 needs Kubernetes 1.36: ACCELPLANE_KUBERNETES=1.37")
    with Cluster.running([]) as running:
        runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": RUNTIME_CLASS}}
        running.apply({**runtime, "handler": "kata"})
        yield running


def create(cluster: Cluster, pods: Sequence[Object]) -> list[tuple[int, Any]]:
    """The answers to the creation of pods, without storing them."""

    def create_some(some: Sequence[Object]) -> list[tuple[int, Any]]:
        with cluster.connection(60) as request:
            return [request("POST", PODS, pod) for pod in some]

    with ThreadPoolExecutor(4) as threads:
        parts = threads.map(create_some, [pods[start : start + 50] for start in range(0, len(pods), 50)])
        return [answer for part in parts for answer in part]


def decide(pod: Object, options: SgxOptions = OPTIONS[0]) -> Decision:
    return mutate(msgspec.json.decode(json.dumps(pod), type=Pod), options)


def by_webhook(pod: Object, options: SgxOptions) -> Object | None:
    """The pod as the webhook mutates it, None if it denies it."""
    decision = decide(pod, options)
    if decision.denial is not None:
        return None
    return apply_json_patch(pod, json.loads(msgspec.json.encode(decision.patch)))


def without_generated(pod: Object) -> Object:
    return pod | {"metadata": {key: value for key, value in pod["metadata"].items() if key not in _GENERATED}}


def policies(options: SgxOptions) -> list[Object]:
    """The objects of the overlay with these options, as the documentation sets them."""
    values = (
        options.aesmd_name, options.socket_directory, options.socket_volume, options.sidecar_without_epc,
        options.whole_pages,
    )  # fmt: skip
    operations = [
        {"op": "replace", "path": f"/spec/variables/{index}/expression", "value": json.dumps(value)}
        for index, value in enumerate(values)
    ]
    target = {"kind": "(Mutating|Validating)AdmissionPolicy"}
    with tempfile.TemporaryDirectory() as directory:
        return overlay(
            Path(directory),
            resources=["deploy/sgx_admissionwebhook/overlays/admission-policies"],
            patches=[{"target": target, "patch": json.dumps(operations)}],
        )


def apply_policies(cluster: Cluster, options: SgxOptions) -> None:
    """Applies the policies, and waits until the API server uses them."""
    cluster.apply(*policies(options))
    container = {"name": "x", "image": "x", "resources": {"limits": {EPC: "1Mi"}}}
    annotations = {"sgx.intel.com/quote-provider": options.aesmd_name}
    probe = {"metadata": {"generateName": "p-", "annotations": annotations}, "spec": {"containers": [container]}}

    def is_used() -> bool:
        status, answer = cluster.request("POST", PODS, probe)
        if status != 201:
            return False
        (one,) = answer["spec"]["containers"]
        return any(mount["mountPath"] == options.socket_directory for mount in one["volumeMounts"])

    wait_until(is_used, "the policies in use", 30)


def test_pods_are_mutated_and_rejected_as_by_the_webhook(api: Cluster) -> None:
    pods = [*sgx_pods(sum(COUNTS))]
    options = [each for each, count in zip(OPTIONS, COUNTS, strict=True) for _ in range(count)]
    mutated = [by_webhook(pod, each) for pod, each in zip(pods, options, strict=True)]
    expected = iter(create(api, [pod for pod in mutated if pod is not None]))
    outcomes: Counter[str] = Counter()
    start = 0
    for each, count in zip(OPTIONS, COUNTS, strict=True):
        apply_policies(api, each)
        part = slice(start, start + count)
        start += count
        for pod, desired, (status, answer) in zip(pods[part], mutated[part], create(api, pods[part]), strict=True):
            desired_status, desired_answer = (403, None) if desired is None else next(expected)
            if desired_status != 201:
                assert status in (403, 422), (each, pod, answer)
                outcomes["rejected"] += 1
                continue
            assert status == 201, (each, pod, answer)
            assert without_generated(answer) == without_generated(desired_answer), (each, pod)
            outcomes["changed" if desired != pod else "unchanged"] += 1
    assert outcomes["changed"] > sum(COUNTS) / 2, outcomes
    assert min(outcomes["rejected"], outcomes["unchanged"]) > sum(COUNTS) / 40, outcomes


def pod(*containers: Object, provider: str = "", **spec: Any) -> Object:
    annotations = {"sgx.intel.com/quote-provider": provider} if provider else {}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "p-", "annotations": annotations},
        "spec": {"containers": list(containers), **spec},
    }


def container(name: str, epc: str | None = None, **more: str) -> Object:
    resources = {f"sgx.intel.com/{key}": value for key, value in more.items()}
    amounts = resources if epc is None else resources | {EPC: epc}
    return {"name": name, "image": "x", "resources": {"limits": amounts, "requests": amounts}}


@pytest.fixture
def policed(api: Cluster) -> Cluster:
    """The control plane with the policies."""
    apply_policies(api, OPTIONS[0])
    return api


WARNINGS = [
    (pod(container("a", "1Mi"), provider="zzz"), '"zzz" names no container'),
    (pod(container("a", "1Mi"), container("b"), provider="b"), '"b" names no container'),
    (pod(container("a"), provider="aesmd"), "no effect"),
    (pod(container("a", "1Mi"), container("aesmd"), provider="aesmd"), '"aesmd" no sidecar'),
    (pod(container("a", "1025"), runtimeClassName=RUNTIME_CLASS), "1025 bytes; Kata"),
    (pod(container("a", enclave="1")), "containers a: internal use"),
    (pod(container("a", "1Mi", provision="1")), "containers a: internal use"),
    (pod(container("a", "0"), container("b", "1Mi")), "containers a: sgx.intel.com/epc is 0"),
]


def warnings(cluster: Cluster, one: Object) -> list[str]:
    result = subprocess.run(
        [cluster.assets.program("kubectl"), "create", "--dry-run=server", "--filename=-"],
        input=json.dumps(one),
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"KUBECONFIG": str(cluster.kubeconfig)},
    )
    return [line for line in result.stderr.splitlines() if line.startswith("Warning: ")]


def test_probable_mistakes_cause_one_warning_each(policed: Cluster) -> None:
    for one, words in WARNINGS:
        (found,) = warnings(policed, one)
        assert all(word in found for word in words.split()), found
    for one in (pod(container("a", "1Mi"), provider="a"), pod(container("a"))):
        assert warnings(policed, one) == []


# Differences, as listed in docs/sgx-webhook.md


def test_a_value_of_the_user_for_enclave_or_provision_is_replaced_without_a_warning(policed: Cluster) -> None:
    one = pod(container("a", "1Mi", enclave="2", provision="2"), provider="a")
    assert len(decide(one).warnings) == 2
    assert warnings(policed, one) == []


def test_direct_requests_of_devices_are_never_rejected(policed: Cluster) -> None:
    one = pod(container("a", enclave="1"))
    assert decide(one, SgxOptions(epc_required=True)).denial is not None
    ((status, answer),) = create(policed, [one])
    assert status == 201, answer


def test_a_warning_names_all_containers_with_the_same_mistake(policed: Cluster) -> None:
    one = pod(container("a", enclave="1"), container("b", provision="1"))
    (found,) = warnings(policed, one)
    assert "containers a, b: " in found
    assert "ValidatingAdmissionPolicy 'accelplane-sgx'" in found


def test_invalid_amounts_are_rejected_with_the_message_of_the_api_server(policed: Cluster) -> None:
    different = pod(container("a", "1Mi"))
    different["spec"]["containers"][0]["resources"]["requests"] = {EPC: "2Mi"}
    cases = [(different, "must be equal to sgx.intel.com/epc"), (pod(container("a", "1.5")), "must be an integer")]
    for one, words in cases:
        denial = decide(one).denial
        assert denial is not None
        ((status, answer),) = create(policed, [one])
        assert (status, denial.code) == (422, 403), answer
        assert words in answer["message"]


@pytest.mark.parametrize("amounts", [["1Pi"], ["900000Ti"] * 10])
def test_pods_whose_epc_is_too_large_for_the_policies_are_rejected(policed: Cluster, amounts: Sequence[str]) -> None:
    one = pod(*(container(f"c{number}", amount) for number, amount in enumerate(amounts)))
    assert decide(one).patch
    ((status, answer),) = create(policed, [one])
    assert status == 403, answer
    assert "policy 'accelplane-sgx' with binding 'accelplane-sgx' denied request" in answer["message"]


def test_a_pod_that_exceeds_the_cost_limit_of_expressions_is_rejected(policed: Cluster) -> None:
    many = [container(f"c{number}", "1Mi") for number in range(1000)]
    sidecars = [each | {"restartPolicy": "Always"} for each in many[:500]]
    ((status, answer),) = create(policed, [pod(*many)])
    assert status == 201, answer
    assert answer["metadata"]["annotations"][EPC] == "1000Mi"
    ((status, answer),) = create(policed, [pod(container("a"), initContainers=sidecars + many[500:])])
    assert status == 403, answer
    assert "cost limit exceeded" in answer["message"]
