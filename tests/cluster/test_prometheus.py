"""A real Prometheus scrapes agents on two real nodes with the shipped scrape configuration, rules and dashboards."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Self

import pytest
from manifests import DEPLOY
from monitoring import dashboards, metrics, panels, queries, records
from prometheus import promtool

from . import conftest
from .families import NAMESPACE, QAT0
from .machine import wait_until
from .objects import Object, pod
from .observed import AGENTS, CY, ENCLAVE, HARDWARE, I915, IDLE, UP, Setup, observed_cluster
from .test_cli_cluster import run

pytestmark = pytest.mark.cluster

FETCH = "import sys, urllib.request as r; sys.stdout.buffer.write(r.urlopen(sys.argv[1], timeout=10).read())"
MONITORING_KINDS = ("PodMonitor", "ServiceMonitor", "PrometheusRule")


@pytest.fixture(scope="module")
def setup(cluster_is_possible: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with observed_cluster(tmp_path_factory.mktemp("observed")) as instance:
        conftest._running.append(instance.cluster)
        yield instance
        conftest._running.remove(instance.cluster)


def test_agents_are_targets_whose_labels_name_the_node_and_no_pod(setup: Setup) -> None:
    query = setup.prometheus.query
    targets = query(UP)
    assert {(labels["node"], labels["agent"], value) for labels, value in targets} == {(*each, 1) for each in AGENTS}
    for labels, _ in targets:
        assert labels["instance"] == labels["node"]
        assert {*labels} == {"__name__", "job", "instance", "node", "agent"}
    names = json.loads(setup.prometheus.get("/api/v1/labels"))["data"]
    assert [name for name in names if name.startswith("exported_")] == []
    hardware = setup.prometheus.series(HARDWARE)
    assert len(hardware) > 50
    assert not {name for each in hardware for name, _ in each} & {"pod", "namespace", "container", "endpoint"}


def test_holders_are_the_pods_of_users(setup: Setup) -> None:
    def held_ids() -> set[tuple[str, str, str]]:
        found = setup.prometheus.query("accelplane_container_devices")
        return {(labels["node"], labels["pod"], labels["resource"]) for labels, _ in found}

    expected = {("node-1", "worker", CY), ("node-2", "trainer", I915)}
    wait_until(lambda: held_ids() == expected, "both pods hold a device")
    (labels,) = (labels for labels, _ in setup.prometheus.query('accelplane_container_devices{plugin="gpu"}'))
    assert (labels["namespace"], labels["device"], labels["unit"]) == (NAMESPACE, labels["unit"], labels["device"])
    query = f'accelplane:namespace_devices:sum{{resource="{I915}"}}'
    labels = {"__name__": "accelplane:namespace_devices:sum", "namespace": NAMESPACE, "resource": I915}
    # Rules are evaluated after the scrapes.
    wait_until(lambda: setup.prometheus.query(query) == [(labels, 1.0)], "the record has the device")


def test_prometheus_rejects_no_sample_and_promtool_accepts_the_pages(setup: Setup) -> None:
    own = setup.prometheus.get("/metrics")
    for cause in ("duplicate_timestamp", "out_of_order", "out_of_bounds"):
        assert f"prometheus_target_scrapes_sample_{cause}_total 0" in own
    assert re.search(r"^prometheus_target_scrapes_exceeded_sample_limit_total 0$", own, re.MULTILINE)
    for each in setup.agent_pods():
        url = f"http://{each['status']['podIP']}:9400/metrics"
        page = setup.cluster.control.run(sys.executable, "-c", FETCH, url).stdout
        assert promtool("check", "metrics", text=page) == ""


def test_alerts_fire_while_an_allocated_device_is_unhealthy_and_resolve_afterwards(setup: Setup) -> None:
    firing = setup.prometheus.firing
    names = "AccelplaneDeviceUnhealthy", "AccelplaneDeviceUnhealthyAndHeld"
    assert not any(firing(name) for name in names)
    setup.kernel.do("qat", bdf=QAT0, healthy=False)
    wait_until(lambda: all(firing(name) for name in names), f"firing: {names}", 90)
    for name in names:
        (alert,) = firing(name)
        labels = alert["labels"]
        assert (labels["node"], labels["plugin"], labels["phase"]) == ("node-1", "qat", "unhealthy")
        assert labels["unit"] in alert["annotations"]["description"]
    assert f"Held by {NAMESPACE}/worker/main." in firing(names[1])[0]["annotations"]["description"]
    setup.kernel.do("qat", bdf=QAT0, healthy=True)
    wait_until(lambda: not any(firing(name) for name in names), f"resolved: {names}", 90)


def test_every_query_of_the_dashboards_returns_the_existing_series(setup: Setup) -> None:
    """A query returns data if all its metrics exist, unless the panel says what its emptiness means."""
    present = {*json.loads(setup.prometheus.get("/api/v1/label/__name__/values"))["data"]} | {"up"}
    assert present > {*records()}
    expected: list[tuple[str, str]] = []
    executed = 0
    for dashboard in dashboards().values():
        for panel in panels(dashboard):
            for text in queries(panel):
                # A subquery has values at full minutes only, and the devices have existed for less.
                expr = text.replace(":1m]", ":1s]")
                setup.prometheus.query(expr)
                executed += 1
                if metrics(expr) <= present and "noValue" not in panel["fieldConfig"]["defaults"]:
                    expected.append((panel["title"], expr))
    assert executed > 90
    assert len(expected) > 45, len(expected)

    def empty() -> list[tuple[str, str]]:
        return [each for each in expected if not setup.prometheus.query(each[1])]

    try:
        wait_until(lambda: not empty(), "data of all panels", 30)
    finally:
        assert empty() == []


def test_a_pod_with_two_gpus_and_a_qat_function_has_a_series_for_each_device(setup: Setup) -> None:
    """Only the first node has both families."""
    setup.cluster.apply(pod("mixed", *IDLE, namespace=NAMESPACE, resources={I915: "2", CY: "1"}))
    setup.cluster.wait_pod("mixed", namespace=NAMESPACE)

    def series() -> list[dict[str, str]]:
        found = setup.prometheus.query('accelplane_container_devices{pod="mixed"} == 1')
        return sorted((labels for labels, _ in found), key=lambda labels: (labels["plugin"], labels["unit"]))

    wait_until(lambda: len(series()) == 3, "a series for each device", hint=str(series()))
    first, second, function = series()
    environment = setup.cluster.kubectl(
        "exec", "mixed", f"--namespace={NAMESPACE}", "--", "sh", "-c", "ls /dev/dri; env"
    )
    cards = [word for word in environment.split() if re.fullmatch(r"card\d+", word)]
    assert [first["unit"], second["unit"]] == [first["device"], second["device"]] == sorted(cards)
    assert first["bdf"] != second["bdf"]
    # The unit of a virtual function is the physical one.
    assert function["bdf"] == QAT0
    assert re.search(rf"^QAT0={QAT0[:-2]}", environment, re.MULTILINE), environment
    assert {(labels["node"], labels["namespace"], labels["container"]) for labels in series()} == {
        ("node-1", NAMESPACE, "main")
    }
    setup.delete_pods("mixed")
    wait_until(lambda: not series(), "no series after the end of the pod", 60)


def test_restartable_init_containers_are_reported_and_ordinary_ones_are_not(setup: Setup) -> None:
    described = pod("staged", *IDLE, namespace=NAMESPACE)
    (main,) = described["spec"]["containers"]
    described["spec"]["initContainers"] = [
        main | {"name": "ordinary", "command": ["true"], "resources": {"limits": {ENCLAVE: "3"}}},
        main | {"name": "sidecar", "restartPolicy": "Always", "resources": {"limits": {ENCLAVE: "2"}}},
    ]
    setup.cluster.apply(described)
    setup.cluster.wait_pod("staged", namespace=NAMESPACE)

    def held_ids() -> Mapping[str, float]:
        return {container: value for (name, container, _), value in setup.allocations().items() if name == "staged"}

    wait_until(lambda: held_ids() == {"sidecar": 2}, "the sidecar holds two IDs")
    setup.delete_pods("staged")
    wait_until(lambda: not held_ids(), "no series after the end of the pod", 60)


def test_the_command_line_the_fleet_page_and_prometheus_have_the_same_numbers_at_rest(setup: Setup) -> None:
    """By resource: the IDs, and those that containers hold."""
    query = setup.prometheus.query

    def command_line() -> tuple[Mapping[str, float], Mapping[str, float]]:
        answer = run(setup.cluster, "accelplane", "inspect", "--cluster", "-A", "-o", "json")
        assert answer.returncode == 0, answer.stderr
        ids, allocations = Counter[str](), Counter[str]()
        for item in json.loads(answer.stdout)["nodes"]:
            ids[item["resource"]] += item["allocatable"]
            allocations[item["resource"]] += item["allocated"]
        return dict(+ids), dict(+allocations)

    def fleet() -> tuple[Mapping[str, float], Mapping[str, float]]:
        ids, allocations = Counter[str](), Counter[str]()
        for device in setup.fleet.devices().devices:
            ids.update(device.ids)
            for holder in device.holders:
                allocations[holder.resource] += holder.count
        return dict(+ids), dict(+allocations)

    def prometheus(ids: str, held_ids: str) -> tuple[Mapping[str, float], Mapping[str, float]]:
        found = (query(f"sum by (resource) ({each}) > 0") for each in (ids, held_ids))
        first, second = ({labels["resource"]: value for labels, value in each} for each in found)
        return first, second

    def every() -> list[tuple[Mapping[str, float], Mapping[str, float]]]:
        return [
            command_line(),
            fleet(),
            prometheus("accelplane_devices", "accelplane_container_devices"),
            prometheus("accelplane_resource_allocatable", "accelplane_resource_allocated"),
        ]

    def equal() -> bool:
        first, *others = every()
        return first[1] == {CY: 1, I915: 1} and all(each == first for each in others)

    try:
        wait_until(equal, "equal numbers", 60)
    finally:
        found = every()
        assert all(each == found[0] for each in found), found
    assert found[0][0].keys() >= {CY, I915, ENCLAVE}
    assert found[0][0][I915] == 4


class InventoryReader:
    """Reads the inventory of an agent's pod as the fleet does, from the machine of the control plane."""

    _CODE = """
import sys, urllib.error, urllib.request
request = urllib.request.Request(sys.argv[1], headers={"If-None-Match": sys.argv[2]})
try:
    response = urllib.request.urlopen(request, timeout=60)
except urllib.error.HTTPError as error:
    response = error
print(response.status, response.headers["ETag"], response.read().decode())
"""

    def __init__(self, setup: Setup, node: str) -> None:
        self._setup = setup
        (each,) = (
            each
            for each in setup.agent_pods()
            if each["spec"]["nodeName"] == node and "accelplane-node" in each["metadata"]["name"]
        )
        self._address = f"http://{each['status']['podIP']}:9400"

    def read(self, known: str = "", wait: int = 0) -> tuple[int, str, str]:
        """Status, entity tag and body."""
        url = f"{self._address}/api/v1/inventory?wait={wait}"
        answer = self._setup.cluster.control.run(sys.executable, "-c", self._CODE, url, known).stdout
        status, tag, body = answer.split(" ", 2)
        return int(status), tag, body.strip()

    def responses(self, code: int) -> float:
        """The number of responses with the inventory and this status, by the agent's metrics."""
        page = self._setup.cluster.control.run(sys.executable, "-c", FETCH, f"{self._address}/metrics").stdout
        sample = f'accelplane_page_requests_total{{page="inventory",code="{code}"}} '
        return sum(float(line.removeprefix(sample)) for line in page.splitlines() if line.startswith(sample))


def test_the_entity_tag_changes_with_health_and_holders_and_not_with_readings(setup: Setup) -> None:
    reader = InventoryReader(setup, "node-2")
    status, tag, body = reader.read()
    assert (status, json.loads(body)["node"]) == (200, "node-2")
    assert reader.read(tag) == (304, tag, "")
    assert reader.read('"other"')[:2] == (200, tag)
    temperature = 'accelplane_device_temperature_celsius{node="node-2",sensor="package"} == 61'
    assert setup.prometheus.query(temperature) == []
    (sensor, *_) = sorted(setup.cluster.nodes["node-2"].path("/sys/devices").rglob("hwmon0/temp1_input"))
    earlier, full = sensor.read_text(), reader.responses(200)
    sensor.write_text("61000")
    wait_until(lambda: setup.prometheus.query(temperature), "the scrapes have the temperature")
    assert reader.read(tag) == (304, tag, "")
    assert reader.read(tag, wait=2) == (304, tag, "")
    assert reader.responses(200) == full, "the fleet has had no new inventory"
    sensor.write_text(earlier)
    described = pod("tagged", *IDLE, namespace=NAMESPACE, resources={I915: "1"})
    described["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node-2"}
    setup.create(described)
    status, held, body = reader.read(tag, wait=50)
    assert (status, held != tag, "tagged" in body) == (200, True, True)

    def holders() -> set[str]:
        return {holder.pod for device in setup.fleet.devices().devices for holder in device.holders}

    wait_until(lambda: "tagged" in holders(), "the fleet has the new holder", 30)
    setup.cluster.kubectl("delete", "pod", "tagged", f"--namespace={NAMESPACE}", "--force", "--grace-period=0")
    status, free, body = reader.read(held, wait=50)
    assert (status, free in (tag, held), "tagged" in body) == (200, False, False)


class FleetPageReader:
    """Reads the device list of the fleet page continuously, and records the nodes of each response."""

    def __init__(self, setup: Setup) -> None:
        self.seen: list[frozenset[str]] = []
        self._fleet = setup.fleet
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            self.seen.append(frozenset(device.node for device in self._fleet.devices().devices))


def test_restarted_agents_continue_their_series_and_no_node_leaves_the_fleet_page(setup: Setup) -> None:
    started = "max by (node, agent) (process_start_time_seconds)"
    before, times = setup.prometheus.series(HARDWARE), setup.prometheus.query(started)
    with FleetPageReader(setup) as watching:
        for _ in range(5):
            for each in setup.agent_pods():
                path = f"/api/v1/namespaces/{NAMESPACE}/pods/{each['metadata']['name']}"
                setup.cluster.request("DELETE", path, {"gracePeriodSeconds": 1})

            def changed_series(times: list[tuple[dict[str, str], float]] = times) -> bool:
                now = {(labels["node"], labels["agent"]): value for labels, value in setup.prometheus.query(started)}
                earlier = {(labels["node"], labels["agent"]): value for labels, value in times}
                return {*now} == AGENTS and all(now[each] > earlier[each] for each in AGENTS) and setup.up() == AGENTS

            wait_until(changed_series, "all agents again", 90)
            times = setup.prometheus.query(started)
    assert setup.prometheus.series(HARDWARE) == before
    assert len(watching.seen) > 10
    assert {*watching.seen} == {frozenset(setup.cluster.nodes)}


# From here on pods wait for a volume that does not exist. They come last: for about two minutes after their end, the
# kubelet starts new containers late.


def test_forty_pods_with_enclaves_have_forty_series_whose_sum_is_what_is_allocated(setup: Setup) -> None:
    """The pods wait for a volume, so the kubelet has admitted them and starts no container."""
    counts = {f"enclave-{number}": 1 + number % 3 for number in range(40)}
    for name, count in counts.items():
        setup.create(waiting_pod(name, "enclaves", count))
    allocated = f'accelplane_resource_allocated{{resource="{ENCLAVE}"}}'

    def held_ids() -> Mapping[str, float]:
        return {name: value for (name, _, _), value in setup.allocations(ENCLAVE).items()}

    wait_until(lambda: held_ids() == counts, "a series for each pod", 60)
    assert len(setup.allocations(ENCLAVE)) == 40
    assert [value for _, value in setup.prometheus.query(allocated)] == [sum(counts.values())]
    listed = f'accelplane_devices{{resource="{ENCLAVE}",health="Healthy"}}'
    assert [value for _, value in setup.prometheus.query(listed)] == [110]
    setup.delete_pods("enclaves")
    wait_until(lambda: not held_ids(), "no series after the end of the pods", 60)


def test_two_hundred_pods_that_come_and_go_make_no_series_of_hardware(setup: Setup) -> None:
    """The pods wait for a volume, so the kubelet has admitted them and starts no container."""
    before, pods = setup.prometheus.series(HARDWARE), set[str]()
    for group in ("first", "second"):
        for number in range(100):
            setup.create(waiting_pod(f"{group}-{number}", group, 1))
        wait_until(lambda: len(setup.allocations(ENCLAVE)) == 100, f"{group}: all pods hold an ID", 90)
        pods |= {name for name, _, _ in setup.allocations(ENCLAVE)}
        setup.delete_pods(group)
        wait_until(lambda: not setup.allocations(ENCLAVE), f"{group}: no pod holds an ID", 90)
    assert len(pods) == 200
    assert setup.prometheus.series(HARDWARE) == before


def waiting_pod(name: str, label: str, count: int) -> Object:
    """A pod with enclaves that has no container, because its volume does not exist."""
    described = pod(name, namespace=NAMESPACE, resources={ENCLAVE: str(count)}, labels={"app": label})
    described["spec"]["volumes"] = [{"name": "missing", "configMap": {"name": "missing"}}]
    return described


def definition(kind: str) -> Object:
    """A definition that accepts everything."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    group = "monitoring.coreos.com"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {"group": group, "names": names, "scope": "Namespaced", "versions": [version]},
    }


def test_the_trees_are_applied_with_and_without_the_definitions_of_the_prometheus_operator(setup: Setup) -> None:
    cluster = setup.cluster
    with cluster.namespace("monitoring"):
        words = ("apply", "--namespace=monitoring", "--kustomize")
        plain = cluster.kubectl(*words, DEPLOY / "monitoring/overlays/plain")
        assert plain.count("created") == plain.count("configmap/") == 6
        cluster.apply(*map(definition, MONITORING_KINDS))
        established = "--for=condition=Established"
        names = [definition(kind)["metadata"]["name"] for kind in MONITORING_KINDS]
        cluster.kubectl("wait", established, "--timeout=60s", "crd", *names)
        every = cluster.kubectl(*words, DEPLOY / "monitoring")
        found = sorted(re.findall(r"^(\w+)\.monitoring\.coreos\.com/\S+ created$", every, re.MULTILINE))
        assert found == ["podmonitor", "prometheusrule", "servicemonitor", "servicemonitor", "servicemonitor"]
