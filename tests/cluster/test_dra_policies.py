"""Accounts of nodes with DRA write the slices, the device status and the events of their own node, and nothing else.

Tokens are bound to pods on two nodes, as the kubelets' tokens are, with the roles and policies of the manifests. No
kubelet runs.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from drapools import offer, offers
from manifests import DEPLOY, overlay, render

from accelplane.apiserver import ApiServer
from accelplane.dra import catalog
from accelplane.dra.events import EventWriter
from accelplane.dra.model import ClaimRef
from accelplane.dra.publisher import SlicePublisher
from accelplane.operator.daemonsets.dra import account_of

from .bound_accounts import SPACE, Account, api_of, bound_token, create
from .build import kubernetes_minor
from .cluster import Cluster
from .machine import wait_until

pytestmark = pytest.mark.cluster

Object = dict[str, Any]
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
ACCOUNT = "accelplane-node"
NODES = ("node-1", "node-2")
EVENTS = "/apis/events.k8s.io/v1/namespaces/{}/events"
EVENT_POLICY = "ValidatingAdmissionPolicy 'accelplane-dra-events-node'"
SLICE_POLICY = "ValidatingAdmissionPolicy 'accelplane-dra-slices-node'"
CLAIM_POLICY = "ValidatingAdmissionPolicy 'accelplane-dra-claims-node'"


@pytest.fixture(scope="module")
def cluster(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane with two Nodes, and the objects of the agent with DRA and device status without its DaemonSet."""
    if kubernetes_minor() < 34:
        pytest.skip("resource.k8s.io/v1 needs Kubernetes 1.34")
    with Cluster.running([]) as running:
        for name in NODES:
            create(running, "/api/v1/nodes", {"metadata": {"name": name}})
        objects = overlay(
            tmp_path_factory.mktemp("tree"),
            resources=["deploy/accelplane_node/overlays/dra"],
            components=["deploy/dra/components/device-status"],
        )
        running.apply(*(each for each in objects if each["kind"] != "DaemonSet"))
        wait_until(
            lambda: running.get(f"/api/v1/namespaces/{SPACE}/serviceaccounts/{ACCOUNT}") is not None, "the account"
        )
        yield running


@pytest.fixture(scope="module")
def accounts(cluster: Cluster) -> Mapping[str, Account]:
    """The account with the token of a pod on each node."""
    found = {node: Account(cluster, bound_token(cluster, ACCOUNT, f"agent-{node}", node)) for node in NODES}
    foreign = slice_of("probe", node="node-2")
    wait_until(lambda: SLICE_POLICY in str(found["node-1"].request("POST", SLICES, foreign)[1]), "the policy")
    return found


def slice_of(name: str, *, node: str = "node-1", driver: str = "gpu.intel.com", pool: str = "", **spec: Any) -> Object:
    place = {"nodeName": node} if node else {}
    pools = {"name": pool or node or "all", "generation": 1, "resourceSliceCount": 1}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": {"driver": driver, "pool": pools, "devices": [], **place, **spec},
    }


FOREIGN = {
    "another node": (slice_of("a", node="node-2"), "expected the node of the token, node-1"),
    "all nodes": (slice_of("a", node="", allNodes=True), "spec.nodeName is not set"),
    "a selector of nodes": (
        slice_of(
            "a",
            node="",
            nodeSelector={
                "nodeSelectorTerms": [
                    {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-2"]}]}
                ]
            },
        ),
        "spec.nodeName is not set",
    ),
    "another driver": (
        slice_of("a", driver="gpu.example.com"),
        "spec.driver is gpu.example.com, expected a driver of the account",
    ),
    "the pool of another node": (slice_of("a", pool="node-2"), "spec.pool.name is node-2"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_slices_of_others_cannot_be_created(accounts: Mapping[str, Account], case: str) -> None:
    document, problem = FOREIGN[case]
    status, answer = accounts["node-1"].request("POST", SLICES, document)
    assert status in (403, 422), answer
    assert SLICE_POLICY in answer["message"]
    assert problem in answer["message"]


def test_a_node_writes_its_own_slices_and_another_node_does_not(
    cluster: Cluster, accounts: Mapping[str, Account]
) -> None:
    own, other = (accounts[node] for node in NODES)
    status, created = own.request("POST", SLICES, slice_of("own"))
    assert status == 201, created
    path = f"{SLICES}/own"
    # The policy compares the new object, and the API server allows no other node.
    taken = {**created["spec"], "nodeName": "node-2", "pool": {**created["spec"]["pool"], "name": "node-2"}}
    status, answer = other.request("PUT", path, created | {"spec": taken})
    assert status == 422, answer
    assert "spec.nodeName: Invalid value" in answer["message"]
    changed = {"spec": {"pool": {"name": "node-1", "generation": 2, "resourceSliceCount": 1}}}
    for account, expected in ((other, {403, 422}), (own, {200})):
        status, answer = account.request("PUT", path, created | {"spec": created["spec"] | changed["spec"]})
        assert status in expected, answer
        status, answer = account.request("DELETE", path)
        assert status in expected, answer
        assert status == 200 or SLICE_POLICY in answer["message"]
    assert cluster.get(path) is None


def test_an_account_may_publish_the_drivers_that_its_role_names(
    cluster: Cluster, accounts: Mapping[str, Account]
) -> None:
    """As an administrator adds a plugin of a third party, or the domain of generic devices."""
    driver, path = "devices.example.com", f"/apis/{RBAC}/v1/clusterroles/accelplane-dra-node"
    document = slice_of("of-a-plugin", driver=driver)
    assert accounts["node-1"].request("POST", SLICES, document)[0] in (403, 422)
    role = cluster.get(path)
    assert role is not None
    role["rules"][0]["resourceNames"].append(driver)
    status, answer = cluster.request("PUT", path, role)
    assert status == 200, answer
    wait_until(lambda: accounts["node-1"].request("POST", SLICES, document)[0] == 201, "the right", 30)
    status, answer = accounts["node-1"].request("POST", SLICES, slice_of("b", node="node-2", driver=driver))
    assert SLICE_POLICY in answer["message"]
    assert accounts["node-1"].request("DELETE", f"{SLICES}/of-a-plugin")[0] == 200


def test_a_token_without_a_pod_writes_no_slice(cluster: Cluster, accounts: Mapping[str, Account]) -> None:
    token = cluster.kubectl("create", "token", ACCOUNT, f"--namespace={SPACE}").strip()
    status, answer = Account(cluster, token).request("POST", SLICES, slice_of("a"))
    assert status in (403, 422), answer
    assert "use the token of a pod" in answer["message"]


def test_a_plugin_stays_limited_after_the_tree_of_another_is_deleted(
    cluster: Cluster, accounts: Mapping[str, Account], tmp_path: Path
) -> None:
    for family in ("gpu", "qat"):
        (tmp_path / family).mkdir()
        tree = f"deploy/{family}_plugin/overlays/dra/account"
        cluster.apply(*overlay(tmp_path / family, namespace=SPACE, resources=[tree]))
    account = Account(cluster, bound_token(cluster, "accelplane-dra-qat", "qat", "node-1"))
    policy, path = "ValidatingAdmissionPolicy 'accelplane-dra-slices-qat'", f"{SLICES}?dryRun=All"

    def problem_with(document: Object) -> str:
        status, answer = account.request("POST", path, document)
        return "" if status == 201 else answer["message"]

    foreign = slice_of("a", node="node-2", driver="qat.intel.com")
    wait_until(lambda: policy in problem_with(foreign), "the policies of the plugin")
    cluster.kubectl("delete", "--wait=false", "-k", str(tmp_path / "gpu"))
    for document, problem in (
        (foreign, "expected the node of the token, node-1"),
        (slice_of("a"), "spec.driver is gpu.intel.com, expected a driver of the account"),
    ):
        assert policy in problem_with(document)
        assert problem in problem_with(document)
    assert problem_with(slice_of("a", driver="qat.intel.com")) == ""


def test_the_kubelet_deletes_all_slices_of_its_node(cluster: Cluster, accounts: Mapping[str, Account]) -> None:
    for node in NODES:
        status, answer = accounts[node].request("POST", SLICES, slice_of(f"of-{node}", node=node))
        assert status == 201, answer
    # As the kubelet at its start; it authenticates as this user.
    cluster.kubectl(
        "delete", "resourceslices", "--field-selector=spec.nodeName=node-1", "--as=system:node:node-1",
        "--as-group=system:nodes",
    )  # fmt: skip
    assert cluster.get(f"{SLICES}/of-node-1") is None
    assert cluster.get(f"{SLICES}/of-node-2") is not None


FORBIDDEN: Mapping[str, tuple[str, str, Object | None]] = {
    "delete all slices": ("DELETE", SLICES, None),
    "list claims": ("GET", CLAIMS, None),
    "change a slice by a patch": ("PATCH", f"{SLICES}/own", {"metadata": {"labels": {"a": "b"}}}),
    "change a claim": ("PATCH", f"{CLAIMS}/claim-node-1", {"metadata": {"labels": {"a": "b"}}}),
    "delete a claim": ("DELETE", f"{CLAIMS}/claim-node-1", None),
    "create a claim": ("POST", CLAIMS, {"metadata": {"name": "mine"}, "spec": {}}),
    "list nodes": ("GET", "/api/v1/nodes", None),
    "change its node": ("PATCH", "/api/v1/nodes/node-1", {"metadata": {"labels": {"a": "b"}}}),
    "change a class": ("DELETE", "/apis/resource.k8s.io/v1/deviceclasses/gpu.intel.com", None),
    "change an event": ("PATCH", f"{EVENTS.format('default')}/a", {"metadata": {"labels": {"a": "b"}}}),
    "list events": ("GET", EVENTS.format("default"), None),
    "read pods": ("GET", f"/api/v1/namespaces/{SPACE}/pods", None),
}


@pytest.mark.parametrize("case", FORBIDDEN)
def test_the_role_grants_nothing_else(accounts: Mapping[str, Account], claims: None, case: str) -> None:
    method, path, body = FORBIDDEN[case]
    status, answer = accounts["node-1"].request(method, path, body, "application/merge-patch+json")
    assert status == 403, answer
    assert "cannot" in answer["message"]


async def test_the_driver_publishes_with_the_rights_of_its_account(
    cluster: Cluster, accounts: Mapping[str, Account], tmp_path: Path
) -> None:
    api = api_of(cluster, bound_token(cluster, ACCOUNT, "publisher", "node-1"), tmp_path)
    driver, events = "gpu.intel.com", list[str]()
    publisher = SlicePublisher(api, "node-1", driver, on_event=lambda reason, text: events.append(f"{reason}: {text}"))
    addresses = ["0000:03:00.0", "0000:04:00.0"]

    def published() -> list[str]:
        found = cluster.get(f"{SLICES}?fieldSelector=spec.nodeName%3Dnode-1,spec.driver%3D{driver}") or {"items": []}
        return sorted(each["name"] for item in found["items"] for each in item["spec"].get("devices") or ())

    def publish(*wanted: str) -> None:
        given = offers(*map(offer, wanted))
        publisher.set_pool(lambda features: catalog.pool(driver, "node-1", given, features, held=(), evict="gone"))

    task = asyncio.create_task(publisher.run())
    try:
        publisher.registered(True)
        for wanted in (addresses[:1], addresses, []):
            publish(*wanted)
            expected = [f"{each.replace(':', '-').replace('.', '-')}-0x56c0" for each in wanted]
            await asyncio.to_thread(wait_until, lambda expected=expected: published() == expected, "slices", 30)
        assert publisher.problems == []
        assert events == []
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        api.close()


# Events


async def recorded(api: ApiServer, node: str, claim: ClaimRef | None) -> None:
    """Writes an event as the agent on `node` does."""
    writer = EventWriter(api, node)
    writer.record("gpu.intel.com", "PrepareFailed", f"text of {node}", claim)
    await writer.close()


async def test_events_are_shown_with_the_node_and_the_claim(
    cluster: Cluster, accounts: Mapping[str, Account], claims: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    claim = cluster.get(f"{CLAIMS}/claim-node-1")
    assert claim is not None
    api = api_of(cluster, bound_token(cluster, ACCOUNT, "events", "node-1"), tmp_path)
    for reference in (None, ClaimRef("default", claim["metadata"]["uid"], "claim-node-1")):
        await recorded(api, "node-1", reference)
    for arguments in (("node", "node-1"), ("resourceclaim", "claim-node-1")):
        described = await asyncio.to_thread(cluster.kubectl, "describe", *arguments)
        assert re.search(r"Warning +PrepareFailed +.* gpu.intel.com +text of node-1", described), described
    # As the agent of another node.
    await recorded(api, "node-2", None)
    assert "reportingInstance is node-2, expected the node of the token, node-1" in caplog.text
    api.close()


FOREIGN_EVENTS: Mapping[str, tuple[Object, str]] = {
    "another node": ({"regarding": {"kind": "Node", "name": "node-2"}}, "the node of the token"),
    "a pod": ({"regarding": {"kind": "Pod", "name": "user", "namespace": "default"}}, "neither a ResourceClaim nor"),
    "nothing": ({"regarding": None}, "neither a ResourceClaim nor"),
    "another program": (
        {"reportingController": "kubelet"},
        "reportingController is kubelet, expected a driver of the account",
    ),
}


@pytest.mark.parametrize("case", FOREIGN_EVENTS)
def test_events_of_others_cannot_be_created(accounts: Mapping[str, Account], case: str) -> None:
    fields, problem = FOREIGN_EVENTS[case]
    event: Object = {
        "metadata": {"name": "foreign"}, "eventTime": "2026-01-01T00:00:00.000000Z", "type": "Warning",
        "reason": "PrepareFailed", "action": "Prepare", "note": "text", "reportingController": "gpu.intel.com",
        "reportingInstance": "node-1", "regarding": {"kind": "Node", "name": "node-1"},
    }  # fmt: skip
    status, answer = accounts["node-1"].request("POST", EVENTS.format("default"), event | fields)
    assert status in (403, 422), answer
    assert EVENT_POLICY in answer["message"]
    assert problem in answer["message"]


# The status of claims


def allocated(node: str, *drivers: str) -> Object:
    results = [{"request": "a", "driver": driver, "pool": node, "device": "d"} for driver in drivers]
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {
        "devices": {"results": results},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }


@pytest.fixture(scope="module")
def claims(cluster: Cluster) -> None:
    """Claims `claim-NODE`, allocated on each node with a device of ours and one of another driver."""
    # The control plane deallocates claims that no pod uses.
    wait_until(lambda: cluster.get("/api/v1/namespaces/default/serviceaccounts/default") is not None, "the account")
    spec = {"nodeName": NODES[0], "containers": [{"name": "a", "image": "a"}]}
    user = create(cluster, "/api/v1/namespaces/default/pods", {"metadata": {"name": "user"}, "spec": spec})
    for node in NODES:
        request = {"name": "a", "exactly": {"deviceClassName": "gpu.intel.com", "allocationMode": "All"}}
        name = f"claim-{node}"
        created = create(cluster, CLAIMS, {"metadata": {"name": name}, "spec": {"devices": {"requests": [request]}}})
        created["status"] = {
            "allocation": allocated(node, "gpu.intel.com", "net.example.com"),
            "reservedFor": [{"resource": "pods", "name": "user", "uid": user["metadata"]["uid"]}],
        }
        status, answer = cluster.request("PUT", f"{CLAIMS}/{name}/status", created)
        assert status == 200, answer


def device(node: str, driver: str = "gpu.intel.com") -> Object:
    return {"driver": driver, "pool": node, "device": "d", "data": {"state": "prepared"}}


Change = Callable[[Object], None]


def without_allocation(claim: Object) -> None:
    claim["status"] = {}


STATUS_CHANGES: Mapping[str, tuple[str, Change]] = {
    "another node's claim": ("claim-node-2", lambda claim: claim["status"].update(devices=[device("node-2")])),
    "another driver's device": (
        "claim-node-1",
        lambda claim: claim["status"].update(devices=[device("node-1", "net.example.com")]),
    ),
    "devices of two drivers": (
        "claim-node-1",
        lambda claim: claim["status"].update(devices=[device("node-1"), device("node-1", "net.example.com")]),
    ),
    "the allocation": ("claim-node-1", without_allocation),
    "the reservation": ("claim-node-1", lambda claim: claim["status"].update(reservedFor=[])),
}


@pytest.mark.parametrize("case", STATUS_CHANGES)
def test_the_status_of_other_nodes_drivers_and_fields_cannot_change(
    cluster: Cluster, accounts: Mapping[str, Account], claims: None, case: str
) -> None:
    name, change = STATUS_CHANGES[case]
    claim = cluster.get(f"{CLAIMS}/{name}")
    assert claim is not None
    before = json.loads(json.dumps(claim["status"]))
    change(claim)
    status, answer = accounts["node-1"].request("PUT", f"{CLAIMS}/{name}/status", claim)
    assert status in (403, 422), answer
    after = cluster.get(f"{CLAIMS}/{name}")
    assert after is not None
    assert after["status"] == before
    if kubernetes_minor() < 36:
        assert CLAIM_POLICY in answer["message"]


def test_a_node_writes_the_status_of_its_devices_beside_other_drivers(
    cluster: Cluster, accounts: Mapping[str, Account], claims: None
) -> None:
    path = f"{CLAIMS}/claim-node-1/status"
    status, answer = cluster.request(
        "PATCH", path, {"status": {"devices": [device("node-1", "net.example.com")]}},
        content="application/merge-patch+json",
    )  # fmt: skip
    assert status == 200, answer
    of_other = device("node-1", "net.example.com")
    # It cannot remove the device of the other driver.
    for devices, expected in (
        ([of_other, device("node-1")], {200}),
        ([device("node-1")], {403, 422}),
        ([of_other], {200}),
    ):
        claim = cluster.get(f"{CLAIMS}/claim-node-1")
        assert claim is not None
        claim["status"]["devices"] = devices
        status, answer = accounts["node-1"].request("PUT", path, claim)
        assert status in expected, answer


# Device classes


@pytest.mark.parametrize("tree", ["dra", "dra/extended-resources"])
def test_the_api_server_compiles_all_selectors(cluster: Cluster, tree: str, tmp_path: Path) -> None:
    for each in render(DEPLOY / tree):
        status, answer = cluster.request("POST", "/apis/resource.k8s.io/v1/deviceclasses?dryRun=All", each)
        assert status == 201, answer
        # On 1.34 and 1.35 the gate DRAExtendedResource is off, and the API server drops the name.
        if kubernetes_minor() >= 36:
            assert answer["spec"] == each["spec"]
        else:
            assert answer["spec"]["selectors"] == each["spec"]["selectors"]


# The operator

OPERATOR_SPACE, PREFIX = "inteldeviceplugins-system", "inteldeviceplugins-"
RBAC = "rbac.authorization.k8s.io"
GROUP = "resource.k8s.io"
BINDINGS, ROLES = (f"/apis/{RBAC}/v1/{kind}" for kind in ("clusterrolebindings", "clusterroles"))


def binding(name: str, role: str) -> Object:
    subject = {"kind": "ServiceAccount", "name": name, "namespace": OPERATOR_SPACE}
    reference = {"apiGroup": RBAC, "kind": "ClusterRole", "name": role}
    return {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}


def test_the_operator_of_the_overlay_may_bind_the_roles_of_plugins_and_no_others(cluster: Cluster) -> None:
    kinds = ("Namespace", "ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    objects = render(DEPLOY / "operator/overlays/dra")
    cluster.apply(*(each for kind in kinds for each in objects if each["kind"] == kind))
    account = f"{PREFIX}controller-manager"
    operator = Account(cluster, cluster.kubectl("create", "token", account, f"--namespace={OPERATOR_SPACE}").strip())
    accounts = f"/api/v1/namespaces/{OPERATOR_SPACE}/serviceaccounts"
    for name, role in (
        (account_of("gpu", status=False), f"{PREFIX}dra-role"),
        (account_of("qat", status=True), f"{PREFIX}dra-status-role"),
    ):
        status, answer = operator.request("POST", accounts, {"metadata": {"name": name}})
        assert status == 201, answer
        status, answer = operator.request("POST", BINDINGS, binding(name, role))
        assert status == 201, answer
        for path in (f"{BINDINGS}/{name}", f"{accounts}/{name}"):
            assert operator.request("GET", path)[0] == 200
            assert operator.request("DELETE", path)[0] == 200
    role = f"{account_of('generic', status=True)}-drivers"
    rules = [
        {"apiGroups": [GROUP], "resources": [resource], "resourceNames": ["devices.example.com"], "verbs": [verb]}
        for resource, verb in (
            ("resourceslices/driver", "publish"),
            ("resourceclaims/driver", "associated-node:update"),
        )
    ]
    status, answer = operator.request("POST", ROLES, {"metadata": {"name": role}, "rules": rules})
    assert status == 201, answer
    status, answer = operator.request("PUT", f"{ROLES}/{role}", answer | {"rules": rules[:1]})
    assert status == 200, answer
    status, answer = operator.request("POST", BINDINGS, binding(role, role))
    assert status == 201, answer
    more = {"apiGroups": [GROUP], "resources": ["resourceslices"], "verbs": ["create"]}
    status, answer = operator.request("POST", ROLES, {"metadata": {"name": "more"}, "rules": [more]})
    assert status == 403, answer
    assert operator.request("DELETE", f"{ROLES}/{role}")[0] == 200
    status, answer = operator.request("POST", BINDINGS, binding("accelplane-dra-gpu", "cluster-admin"))
    assert status == 403, answer
    assert operator.request("GET", f"{BINDINGS}/cluster-admin")[0] == 403
    assert operator.request("DELETE", f"{BINDINGS}/cluster-admin")[0] == 403
