"""Names for FPGAs on a real API server: storage, columns, Events and required rights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from .installation import CRD, Installation, Object
from .machine import wait_until
from .objects import pod

pytestmark = pytest.mark.cluster

TEAM = "fpga-team"
GROUP = "/apis/fpga.intel.com"
INTERFACE = "69528db6eb31577a8c3668f9faa081f6"
AFU = "d8424dc4a4a3c413f89e433683f9040b"
REGION = f"fpga.intel.com/region-{INTERFACE}"
FUNCTIONS, REGIONS = "acceleratorfunctions", "fpgaregions"
BASES = [CRD / f"bases/fpga.intel.com_{plural}.yaml" for plural in (FUNCTIONS, REGIONS)]
MERGE = "application/merge-patch+json"


@pytest.fixture(scope="module")
def team(installation: Installation) -> Iterator[Installation]:
    """A namespace for names and the pods that request them."""
    with installation.cluster.namespace(TEAM):
        yield installation


def path(plural: str, name: str = "", version: str = "v2") -> str:
    return f"{GROUP}/{version}/namespaces/{TEAM}/{plural}/{name}".rstrip("/")


def mapping(kind: str, name: str, version: str = "v2", **spec: str) -> Object:
    metadata = {"name": name, "namespace": TEAM}
    return {"apiVersion": f"fpga.intel.com/{version}", "kind": kind, "metadata": metadata, "spec": spec}


def create(installation: Installation, thing: Object) -> None:
    plural, version = f"{thing['kind'].lower()}s", thing["apiVersion"].partition("/")[2]
    code, answer = installation.cluster.request("POST", path(plural, version=version), thing)
    assert code == 201, answer


def offer(installation: Installation, node: str, count: str) -> None:
    """Sets the number of regions that a kwok node advertises."""
    change = {"status": {field: {REGION: count} for field in ("capacity", "allocatable")}}
    code, answer = installation.cluster.request("PATCH", f"/api/v1/nodes/{node}/status", change, content=MERGE)
    assert code == 200, answer


def reasons(installation: Installation, plural: str, name: str) -> dict[str, str]:
    found: Any = installation.cluster.get(path(plural, name)) or {}
    return {each["type"]: each["reason"] for each in found.get("status", {}).get("conditions", ())}


def events_of(installation: Installation, kind: str, name: str) -> list[tuple[str, str]]:
    """Reason and message of each event about an object."""
    found: Any = installation.cluster.get(f"/api/v1/namespaces/{TEAM}/events") or {"items": []}
    about = [
        each
        for each in found["items"]
        if (each["involvedObject"]["kind"], each["involvedObject"]["name"]) == (kind, name)
    ]
    return [(each["reason"], each["message"]) for each in about if each["reportingComponent"].startswith("accelplane")]


def kubectl_row(installation: Installation, description: str) -> list[str]:
    """The kubectl columns of the only object of a kind, without the age."""
    head, row = installation.cluster.kubectl("get", description, f"--namespace={TEAM}", "--output=wide").splitlines()
    assert head.split()[-1] == "AGE"
    return row.split()[:-1]


def test_a_mapping_with_a_name_of_2020_is_stored_as_v2_with_columns_and_events(
    team: Installation,
) -> None:
    with team.operator("-devices=fpga"):
        create(team, mapping("AcceleratorFunction", "nlb0", "v1", afuId=AFU, interfaceId=INTERFACE, mode="region"))
        stored: Any = team.cluster.get(path(FUNCTIONS, "nlb0"))
        assert (stored["apiVersion"], stored["spec"]["mode"]) == ("fpga.intel.com/v2", "region")
        wait_until(lambda: reasons(team, FUNCTIONS, "nlb0").get("Ready") == "NoNode", "the status to be written", 60)
        assert kubectl_row(team, "af") == ["nlb0", REGION, "region", "0", "False", "NoNode"]

        for number in range(2):
            offer(team, f"kwok-{number}", "2")
        wait_until(
            lambda: kubectl_row(team, "af")[3:] == ["2", "True", "Offered"], "both nodes to be counted", 60, every=0.3
        )
        offer(team, "kwok-0", "0")
        wait_until(
            lambda: kubectl_row(team, "af")[3:] == ["1", "True", "Offered"],
            "a node no longer counted",
            60,
            every=0.3,
        )

        create(team, mapping("FpgaRegion", "nlb0", interfaceId=INTERFACE))
        for kind, plural in (("AcceleratorFunction", FUNCTIONS), ("FpgaRegion", REGIONS)):
            wait_until(lambda kind=kind: bool(events_of(team, kind, "nlb0")), f"an event about the {kind}", 60)
            ((reason, message),) = events_of(team, kind, "nlb0")
            assert reason == reasons(team, plural, "nlb0")["Accepted"] == "NameConflict"
            assert "there is an AcceleratorFunction and a FpgaRegion of the name 'nlb0'" in message
        assert kubectl_row(team, "fpga") == ["nlb0", "False", "NameConflict"]
        team.cluster.request("DELETE", path(REGIONS, "nlb0"))
        wait_until(lambda: reasons(team, FUNCTIONS, "nlb0")["Accepted"] == "Resolved", "the name to be free", 60)

        # No webhook is installed, as if none were reachable.
        team.cluster.apply(pod("waits", namespace=TEAM, resources={"fpga.intel.com/nlb0": 1}))
        wait_until(lambda: bool(events_of(team, "Pod", "waits")), "an event about the pod", 60)
        ((reason, message),) = events_of(team, "Pod", "waits")
        assert reason == "FpgaNameNotReplaced"
        assert "delete the pod and create it again" in message


@contextmanager
def webhook(installation: Installation, directory: Path, kubeconfig: str) -> Iterator[Path]:
    """The webhook as a process; yields its log."""
    host = installation.cluster.addresses.host
    pair = installation.cluster.server_certificate(host, host)
    (directory / "tls.crt").write_bytes(pair.certificate)
    (directory / "tls.key").write_bytes(pair.key)
    (directory / "kubeconfig").write_text(kubeconfig)
    log = directory / "log"
    flags = (f"-kubeconfig={directory / 'kubeconfig'}", f"-cert-dir={directory}", "-port=0")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "accelplane", "webhook", "fpga", *flags], stdout=output, stderr=output
        )
        try:
            yield log
            assert process.poll() is None, log.read_text()
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


def original(file: Path) -> Object:
    """A definition of the original: one version, and no status subresource."""
    definition = yaml.safe_load(file.read_text())
    version = next(each for each in definition["spec"]["versions"] if each["name"] == "v2")
    del version["subresources"], version["additionalPrinterColumns"]
    version["schema"]["openAPIV3Schema"]["properties"]["status"] = {"type": "object"}
    definition["spec"]["versions"] = [version]
    return definition


def test_missing_rights_of_an_older_installation_are_logged_once_and_do_not_block(
    team: Installation, tmp_path: Path
) -> None:
    rules = [{"apiGroups": ["fpga.intel.com"], "resources": [FUNCTIONS, REGIONS], "verbs": ["get", "list", "watch"]}]
    api = "rbac.authorization.k8s.io"
    subject = {"kind": "User", "name": "original", "apiGroup": api}
    reference = {"apiGroup": api, "kind": "ClusterRole", "name": "original"}
    team.cluster.apply(
        {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": "original"}, "rules": rules},
        {"apiVersion": f"{api}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "original"},
         "roleRef": reference, "subjects": [subject]},
    )  # fmt: skip
    create(team, mapping("AcceleratorFunction", "odd", afuId=AFU, interfaceId=INTERFACE, mode="afx"))
    with webhook(team, tmp_path, team.cluster.user("original")) as log:
        expected = (
            "nodes cannot be listed: ",
            "Pending pods cannot be listed: ",
            "status of AcceleratorFunction objects not written",
            f"no events are written in namespace {TEAM}",
            "all caches are synced",
            "webhooks at port",
        )
        wait_until(
            lambda: all(words in log.read_text() for words in expected), "all conditions and events", 60, hint=str(log)
        )
    text = log.read_text()
    assert [text.count(words) for words in expected] == [1] * len(expected)
    assert "Traceback" not in text
    assert "odd" in text


def test_a_definition_without_a_status_is_enough_for_pods(team: Installation, tmp_path: Path) -> None:
    create(team, mapping("AcceleratorFunction", "late", afuId=AFU, interfaceId=INTERFACE, mode="af"))
    team.cluster.kubectl("replace", "--filename=-", text=yaml.safe_dump_all(map(original, BASES)))
    try:
        status = f"{path(FUNCTIONS, 'late')}/status"
        wait_until(lambda: team.cluster.request("GET", status)[0] == 404, "the status to be removed", 60)
        with webhook(team, tmp_path, team.kubeconfig.read_text()) as log:
            words = "status of AcceleratorFunction objects not written: the account may not write it, or the"
            wait_until(lambda: words in log.read_text(), "the log entry about the missing status", 60, hint=str(log))
            assert "webhooks at port" in log.read_text()
        assert log.read_text().count(words) == 1
    finally:
        team.cluster.kubectl("apply", "--server-side", "--force-conflicts", "--kustomize", CRD)
