"""The server of the fleet page and `inspect --cluster` read the same objects of an API server."""

from typing import Any

from kubeapi import KubeApi
from runningfleets import fleet_of
from waiting import until

from accelplane.apiserver import ApiServer
from accelplane.cli.clusterlisting import Scope, list_cluster
from accelplane.fleet.options import FleetOptions

I915, QAT = "gpu.intel.com/i915", "qat.intel.com/generic"


def container(name: str, count: int, **fields: Any) -> dict[str, Any]:
    return {"name": name, "resources": {"requests": {I915: str(count)}, "limits": {I915: str(count)}}} | fields


def put_node(api: KubeApi, name: str, *, capacity: int = 2, allocatable: int = 2, **spec: Any) -> None:
    conditions = [{"type": "Ready", "status": "True", "message": "kubelet is ready"}]
    status = {
        "capacity": {"cpu": "8", I915: str(capacity), QAT: "0"},
        "allocatable": {"cpu": "8", I915: str(allocatable), QAT: "0"},
        "conditions": conditions,
    }
    api.put("nodes", {"metadata": {"name": name, "labels": {"zone": "a"}}, "spec": spec, "status": status})


def put_pod(api: KubeApi, name: str, *containers: dict[str, Any], node: str = "", **spec: Any) -> None:
    condition = {"type": "PodScheduled", "status": "True" if node else "False", "message": "no card " * 500}
    assigned = {"nodeName": node} if node else {}
    status: dict[str, Any] = {"phase": "Running" if node else "Pending", "conditions": [condition]}
    if node:
        status["startTime"] = "2026-01-02T03:04:06Z"
    metadata = {"name": name, "namespace": "research", "creationTimestamp": "2026-01-02T03:04:05Z"}
    api.put("pods", {"metadata": metadata, "spec": {"containers": containers, **assigned, **spec}, "status": status})


async def test_the_page_and_the_command_line_have_equal_facts_of_the_same_objects(api: KubeApi) -> None:
    put_node(api, "one")
    put_node(api, "two", allocatable=1, unschedulable=True)
    put_pod(api, "init", container("main", 1), node="one", initContainers=[container("load", 2)])
    sidecar = container("log", 1, restartPolicy="Always")
    put_pod(api, "side", container("main", 1), node="two", initContainers=[sidecar, container("load", 1)])
    put_pod(api, "waits", container("main", 3), overhead={I915: "1"})
    gates = [{"name": f"example.com/{number}"} for number in range(20)]
    put_pod(api, "gated", container("main", 1), schedulingGates=gates)
    quota = {"hard": {f"requests.{I915}": "6"}, "used": {f"requests.{I915}": "5"}}
    api.put("resourcequotas", {"metadata": {"name": "q", "namespace": "research"}, "status": quota})
    client = ApiServer(api.config)
    try:
        command = (await list_cluster(client, Scope(quotas=True))).cluster
    finally:
        client.close()
    async with fleet_of(api, FleetOptions(pods="all")) as fleet:

        def is_complete() -> bool:
            found = fleet.cluster()
            held = all(found.nodes[name].holders for name in ("one", "two") if name in found.nodes)
            return len(found.nodes) == 2 and held and len(found.waiting) == 2 and bool(found.quotas)

        await until(is_complete)
        page = fleet.cluster()
    assert command.nodes == page.nodes
    assert sorted(command.waiting, key=lambda pod: pod.name) == sorted(page.waiting, key=lambda pod: pod.name)
    assert command.quotas == page.quotas
    assert [holder.count for holder in page.nodes["one"].holders] == [2], "as many as the scheduler reserves"
