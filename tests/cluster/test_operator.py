"""The operator as a process with a real API server: samples applied, edited, drifted, deleted."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from customresources import sample
from daemonsetplans import plan
from waiting import until

from accelplane.operator import models
from accelplane.operator.daemonsets import render
from accelplane.operator.settings import Settings

from .cluster import Cluster
from .machine import REPOSITORY
from .pki import Authority

pytestmark = pytest.mark.cluster

CRD = REPOSITORY / "deploy" / "operator" / "crd"
NAMESPACE = "operated"
MANAGER = "accelplane-operator"
# No pods: the images do not exist.
NOWHERE = {"example.com/nowhere": "true"}


@pytest.fixture(scope="module")
def definitions(cluster: Cluster) -> Iterator[None]:
    """The operator's definitions and the plugins' namespace, for the tests of this file."""
    cluster.kubectl("apply", "--server-side", "--kustomize", CRD)
    cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", "--filename", CRD / "bases")
    with cluster.namespace(NAMESPACE):
        yield
    cluster.kubectl("delete", "--kustomize", CRD)


@pytest.fixture
async def operator(cluster: Cluster, definitions: None, tmp_path: Path) -> AsyncIterator[Path]:
    """Runs the operator during a test; yields the path of its log."""
    pair = Authority("tests").server("localhost", "localhost")
    (tmp_path / "tls.crt").write_bytes(pair.certificate)
    (tmp_path / "tls.key").write_bytes(pair.key)
    addresses = ("-metrics-bind-address=0", "-health-probe-bind-address=0", "-port=0")
    command = ("-m", "accelplane.cli.operator", f"-kubeconfig={cluster.kubeconfig}", f"-cert-dir={tmp_path}")
    environment = {**os.environ, "DEVICEPLUGIN_NAMESPACE": NAMESPACE}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command, *addresses, stdout=output, stderr=output, env=environment
        )
    try:
        yield log
        process.terminate()
        async with asyncio.timeout(20):
            assert await process.wait() == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def daemonsets(cluster: Cluster) -> list[dict[str, Any]]:
    found = (cluster.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets") or {})["items"]
    # Items of a list have no kind.
    return [{"apiVersion": "apps/v1", "kind": "DaemonSet", **each} for each in found]


def resource(cluster: Cluster, family: str, name: str) -> dict[str, Any]:
    found = cluster.get(f"/apis/deviceplugin.intel.com/v1/{family}deviceplugins/{name}")
    assert found is not None
    return found


def holds(found: dict[str, Any], kind: str) -> bool:
    """Whether a condition of the current generation is true."""
    generation = found["metadata"]["generation"]
    conditions = [each for each in found.get("status", {}).get("conditions", []) if each["type"] == kind]
    return any(each["status"] == "True" and each["observedGeneration"] == generation for each in conditions)


def is_as_rendered(cluster: Cluster, family: str, name: str) -> bool:
    """Whether exactly the DaemonSet of the resource exists, and the status reports it."""
    found = resource(cluster, family, name)
    expected = render(models.decode(found), Settings(namespace=NAMESPACE))
    existing = daemonsets(cluster)
    return len(existing) == 1 and plan(expected, existing).apply is None and holds(found, "Available")


@pytest.mark.parametrize("family", models.KINDS)
async def test_a_sample_is_reconciled_edited_repaired_and_deleted(
    cluster: Cluster, operator: Path, family: str
) -> None:
    expected = sample(family)
    expected["spec"]["nodeSelector"] = NOWHERE
    name, kind = expected["metadata"]["name"], f"{family}deviceplugin"
    cluster.kubectl("apply", "--filename=-", text=json.dumps(expected))
    await until(lambda: is_as_rendered(cluster, family, name), 30)
    (made,) = daemonsets(cluster)
    assert resource(cluster, family, name)["status"]["controlledDaemonSet"]["uid"] == made["metadata"]["uid"]

    change = {"spec": {"logLevel": 4, "tolerations": [{"operator": "Exists"}], "nodeSelector": NOWHERE | {"a": "b"}}}
    cluster.kubectl("patch", kind, name, "--type=merge", "--patch", json.dumps(change))
    await until(lambda: is_as_rendered(cluster, family, name), 30)
    (edited,) = daemonsets(cluster)
    assert edited["metadata"]["uid"] == made["metadata"]["uid"]
    assert edited["spec"]["template"]["spec"]["tolerations"] == [{"operator": "Exists"}]

    drift = {"spec": {"template": {"spec": {"nodeSelector": {"a": "c"}}}}}
    daemonset = edited["metadata"]["name"]
    cluster.kubectl(
        "patch", "daemonset", daemonset, f"--namespace={NAMESPACE}", "--type=merge", "--patch", json.dumps(drift)
    )
    await until(lambda: is_as_rendered(cluster, family, name), 30)

    cluster.kubectl("delete", kind, name)
    await until(lambda: not daemonsets(cluster), 30)
    assert "Traceback" not in operator.read_text()
