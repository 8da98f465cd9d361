"""The operator over time with a real API server: ConfigMaps, labels, leader failures, outages of the server."""

from __future__ import annotations

import base64
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from customresources import resource

from .installation import KEPT_IN, LEASE, NAMESPACE, SERVICE, Installation, Object, Operator
from .machine import Daemon, wait_until

pytestmark = pytest.mark.cluster

CONFIG_MAPS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
MISSING = "ProvisioningConfigMissing"
OVERLAP = "NodeOverlap"
NODE = "kwok-0"
# No node has the label: only the objects are tested.
NOWHERE = {"example.com/nowhere": "true"}


@pytest.fixture
def clean(installation: Installation) -> Iterator[None]:
    """Deletes all custom resources, DaemonSets and webhooks."""
    yield
    installation.delete_all()


def label(installation: Installation, **labels: str | None) -> None:
    """Sets or removes labels of a node."""
    change = {"metadata": {"labels": labels}}
    path = f"/api/v1/nodes/{NODE}"
    code, answer = installation.cluster.request("PATCH", path, change, content="application/merge-patch+json")
    assert code == 200, answer


def pods(installation: Installation) -> set[str]:
    """The running pods of plugins."""
    found = installation.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/pods") or {"items": []}
    existing = [each for each in found["items"] if "deletionTimestamp" not in each["metadata"]]
    return {each["metadata"]["name"] for each in existing if each["status"]["phase"] == "Running"}


def test_pods_follow_the_content_of_their_config_map_and_outlive_it(installation: Installation, clean: None) -> None:
    cluster, config = installation.cluster, {"metadata": {"name": "mine"}, "data": {"dsa.conf": "[]"}}
    images = {"image": "intel/intel-dsa-plugin:0.31.1", "initImage": "intel/intel-idxd-config-initcontainer:0.31.1"}

    def replaced(before: set[str]) -> bool:
        return len(pods(installation)) == 2 and not pods(installation) & before

    with installation.operator():
        installation.create(resource("dsa", "one", provisioningConfig="mine", **images))
        installation.wait_condition("dsa", "one", MISSING, holds=True, words="ConfigMap mine")
        installation.wait_condition("dsa", "one", "Available", holds=True, words="2 of 2")
        waiting = pods(installation)

        assert cluster.request("POST", CONFIG_MAPS, config)[0] == 201
        installation.wait_condition("dsa", "one", MISSING, holds=False)
        wait_until(lambda: replaced(waiting), "pods with the ConfigMap", 60)

        first = pods(installation)
        assert cluster.request("PUT", f"{CONFIG_MAPS}/mine", config | {"data": {"dsa.conf": "[{}]"}})[0] == 200
        wait_until(lambda: replaced(first), "pods with its new content", 60)
        installation.wait_condition("dsa", "one", "Progressing", holds=False)

        second, daemonset = pods(installation), installation.daemonset("dsa", "one")
        assert cluster.request("DELETE", f"{CONFIG_MAPS}/mine")[0] == 200
        installation.wait_condition("dsa", "one", MISSING, holds=True)
        assert pods(installation) == second
        assert installation.daemonset("dsa", "one")["spec"] == daemonset["spec"]


def test_an_overlap_is_reported_while_node_labels_cause_it(installation: Installation, clean: None) -> None:
    installation.configure_webhooks()
    with installation.operator() as operator:
        installation.configure_webhooks(operator)
        installation.wait_webhooks()
        for name, selector in (("one", {"a": "1"}), ("other", {"b": "1"})):
            installation.create(resource("npu", name, nodeSelector=selector))
            installation.wait_condition("npu", name, OVERLAP, holds=False)

        label(installation, a="1", b="1")
        installation.wait_condition("npu", "one", OVERLAP, holds=True, words="NpuDevicePlugin other also selects")
        installation.wait_condition("npu", "other", OVERLAP, holds=True, words="NpuDevicePlugin one also selects")
        assert f"NpuDevicePlugin other also selects node {NODE}" in warned(installation, "npu", "one")

        label(installation, b=None)
        installation.wait_condition("npu", "one", OVERLAP, holds=False)
        installation.wait_condition("npu", "other", OVERLAP, holds=False)
        assert "also selects" not in warned(installation, "npu", "one")

        label(installation, b="1")
        installation.wait_condition("npu", "one", OVERLAP, holds=True)
        installation.delete("npu", "other")
        installation.wait_condition("npu", "one", OVERLAP, holds=False)
        label(installation, a=None, b=None)


def warned(installation: Installation, family: str, name: str) -> str:
    """The warnings that kubectl prints for an edit of the log level."""
    words = ("patch", f"{family}deviceplugin", name, "--type=merge", '--patch={"spec":{"logLevel":1}}')
    result = subprocess.run(
        [installation.cluster.assets.program("kubectl"), *words, "--dry-run=server"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"KUBECONFIG": str(installation.kubeconfig)},
    )
    return result.stderr


def lease(installation: Installation) -> Object:
    return (installation.cluster.get(LEASE) or {}).get("spec", {})


def is_leader(installation: Installation, operator: Operator) -> bool:
    """Whether this process holds the Lease, by its identity."""
    holder = lease(installation).get("holderIdentity")
    return bool(holder) and f"{holder} leads" in operator.text()


def refuses(installation: Installation, operator: Operator) -> bool:
    """Whether this operator rejects an invalid resource, and serves a certificate of the trusted authority.

    The API server would reuse its connection to any operator.
    """
    secret = installation.cluster.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/{KEPT_IN}")
    assert secret
    context = ssl.create_default_context(cadata=base64.b64decode(secret["data"]["ca.crt"]).decode())
    wrong = resource("npu", "one", image="intel/intel-dsa-plugin:0.31.1")
    request = {"uid": "1", "operation": "CREATE", "kind": {"kind": wrong["kind"]}, "name": "one", "object": wrong}
    review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    existing = socket.create_connection((installation.cluster.addresses.host, operator.port), timeout=10)
    connection = http.client.HTTPConnection(SERVICE)
    connection.sock = context.wrap_socket(existing, server_hostname=f"{SERVICE}.{NAMESPACE}.svc")
    try:
        path = "/validate-deviceplugin-intel-com-v1-npudeviceplugin"
        connection.request("POST", path, json.dumps(review), {"Content-Type": "application/json"})
        response = json.loads(connection.getresponse().read())["response"]
    finally:
        connection.close()
    return not response["allowed"] and "incorrect image name" in response["status"]["message"]


def edited(installation: Installation, level: int) -> Object:
    """Edits the resource, and waits until the DaemonSet is updated."""

    def admitted() -> bool:
        # The API server may still use the endpoint of the killed operator.
        return installation.patch("npu", "one", {"logLevel": level})[0] == 200

    wait_until(admitted, "the edit: admitted", 60)
    daemonset = installation.wait_reconciled("npu", "one")
    assert daemonset["spec"]["template"]["spec"]["containers"][0]["args"][:2] == ["-v", str(level)]
    return daemonset


def test_a_second_operator_takes_over_when_the_first_is_killed_ends_or_is_suspended(
    installation: Installation, clean: None
) -> None:
    first = installation.process("-leader-elect", name="first", place=0)
    second = installation.process("-leader-elect", name="second", place=1)
    with first as one, second as two:
        installation.configure_webhooks(one, two)
        one.start()
        wait_until(lambda: is_leader(installation, one), "the first operator: leads", 60)
        two.start()
        # A standby serves admission, too.
        installation.wait_webhooks()
        assert refuses(installation, one)
        assert refuses(installation, two)
        installation.create(resource("npu", "one", nodeSelector=NOWHERE))
        edited(installation, 1)
        assert "DaemonSet operated/" not in two.text()

        installation.serve(two)
        one.kill()
        result = edited(installation, 2)
        assert is_leader(installation, two)

        one.start()
        installation.serve(one, two)
        installation.wait_webhooks()
        assert not is_leader(installation, one)
        installation.serve(one)
        two.stop()
        # It released the Lease: the standby does not wait until it has expired.
        assert not is_leader(installation, two)
        edited(installation, 3)
        assert is_leader(installation, one)

        two.start()
        # The API server would wait for a response on its open connection.
        installation.remove_webhooks()
        one.signal(signal.SIGSTOP)
        edited(installation, 4)
        last = edited(installation, 5)
        assert is_leader(installation, two)
        one.signal(signal.SIGCONT)
        assert one.ended() == 1
        assert "lost by" in one.text()
        now = installation.daemonset("npu", "one")
        assert (now["metadata"]["uid"], now["metadata"]["generation"]) == (
            result["metadata"]["uid"],
            last["metadata"]["generation"],
        )
        two.stop()
        assert "Traceback" not in one.text() + two.text()


@contextmanager
def down_for_a_minute(daemon: Daemon) -> Iterator[None]:
    """Kills the daemon and starts it again after a minute. The block runs meanwhile."""
    daemon.kill()
    since = time.monotonic()
    try:
        yield
        # The only wait is the minute itself.
        time.sleep(max(0.0, since + 60 - time.monotonic()))
    finally:
        daemon.start()


def test_after_a_minute_without_the_api_server_reconciliation_continues(
    installation: Installation, clean: None
) -> None:
    first = installation.process("-leader-elect", name="leader", place=2)
    second = installation.process("-leader-elect", name="follower", place=3)
    with first as leader, second as follower:
        installation.configure_webhooks(leader, follower)
        leader.start()
        wait_until(lambda: is_leader(installation, leader), "the leader: leads", 60)
        follower.start()
        installation.wait_webhooks()
        installation.create(resource("npu", "one", nodeSelector=NOWHERE))
        before = edited(installation, 1)
        line_count = len(leader.text().splitlines()) + len(follower.text().splitlines())

        with down_for_a_minute(installation.cluster.apiserver):
            # The leader cannot verify its lease and exits; a kubelet would restart it.
            assert leader.ended() == 1
            leader.begin()
        assert leader.running
        assert follower.running

        now = installation.daemonset("npu", "one")
        assert (now["metadata"]["uid"], now["metadata"]["generation"], now["spec"]) == (
            before["metadata"]["uid"],
            before["metadata"]["generation"],
            before["spec"],
        )
        # A program with the stored certificate is called immediately, and trusted as before.
        installation.serve(follower)
        edited(installation, 2)
        wait_until(leader.ready, "the former leader: ready", 60)
        installation.serve(leader)
        installation.wait_webhooks()
        leader.stop()
        follower.stop()
        lines = [*leader.text().splitlines(), *follower.text().splitlines()]
        assert "Traceback" not in "\n".join(lines)
        assert len(lines) - line_count < 400, "\n".join(lines)
