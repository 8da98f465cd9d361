"""The screens of nodes and devices of the fleet page: filters, facts, holders and hidden names."""

from collections.abc import Callable

import pytest
from fleetscreens import FLEET, I915, Parsed, blocks, cluster, holder, html, names_of, node, page, text, unit

from accelplane.fleet.arithmetic import overview
from accelplane.fleet.model import Agent, Node, NodeReadings, NodeResource, Quota, Waiting
from accelplane.fleet.web.html import element, render
from accelplane.fleet.web.query import Query, ScreenName, query_of
from accelplane.fleet.web.screens import SCREENS
from accelplane.report.inventory import Change, Holder, SkippedHardware
from accelplane.report.readings import DeviceReadings, Value


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (Query(), ["a", "e", "b", "c", "d"]),
        (Query(sort="name"), ["a", "b", "c", "d", "e"]),
        (Query(sort="-free"), ["b", "d", "a", "e", "c"]),
        (Query(family="dsa"), ["c"]),
        (Query(state="unhealthy"), ["a"]),
        (Query(state="unknown"), ["c"]),
        (Query(state="held"), ["b"]),
        (Query(state="unheld", family="gpu"), ["a", "b"]),
        (Query(state="idle"), ["b"]),
        (Query(state="no-agent"), ["d"]),
        (Query(state="unanswered"), ["e"]),
        (Query(state="cordoned"), ["c"]),
        (Query(state="not-ready"), ["e"]),
        (Query(model="Max 1550"), ["a"]),
        (Query(labels="zone=b"), ["b"]),
        (Query(holder="TEAM/tr"), ["b"]),
        (Query(text="0000:03"), ["a", "b", "c"]),
        (Query(text="wq0"), ["c"]),
        (Query(text="nothing"), [""]),
        (Query(sort="name", start=3), ["d", "e"]),
    ],
)
def test_filters_and_orders_of_nodes(query: Query, expected: list[str]) -> None:
    assert names_of(page("nodes", FLEET, query)) == expected


def test_cells_have_state_and_allocated_share() -> None:
    found = cluster(
        node("a", unit("card0", holders=(holder(),)), unit("card1", phase="suspect"), unit("card2", known=False))
    )
    cells = [
        attributes for tag, attributes in Parsed(html("nodes", found)).tags if "cell" in str(attributes.get("class"))
    ]
    assert [(each["class"], each["aria-label"]) for each in cells if "href" in each] == [
        ("cell healthy f2", "gpu card0: healthy, about 50 % held"),
        ("cell suspect f0", "gpu card1: suspect, free"),
        ("cell unknown f0", "gpu card2: unknown, free"),
    ]


def test_the_inventory_of_an_agent_is_current_or_has_its_time() -> None:
    """A connected agent of a quiet node has sent its last change days ago."""
    agents = (
        Agent("accelplane/a", "n", "1", "connected", answered=1764000000),
        Agent("accelplane/b", "n", "1", "stale", "x", answered=1764000000),
    )
    rows = blocks(element("div", *page("node", cluster(node(agents=agents)), Query(node="n1")).content))["agents"]
    assert "current" in render(rows["accelplane/a"])
    assert "<time" not in render(rows["accelplane/a"])
    assert "<time" in render(rows["accelplane/b"])


def test_a_node_shows_resources_devices_skipped_hardware_and_agents() -> None:
    found = cluster(
        node(
            "a",
            unit("card0", holders=(holder(),)),
            skipped=(SkippedHardware("gpu", "card9", "no driver"),),
            cordoned=True,
        )
    )
    output = text("node", found, Query(node="a"))
    for expected in ("team/p", "card9", "no driver", "accelplane/a", "podresources", "cordoned", "1 of 2", I915):
        assert expected in output


def test_a_node_without_agent_shows_holders_of_the_api_server_or_why_they_are_missing() -> None:
    query = Query(node="d")
    output = text("node", FLEET, query, holders=(holder("ns", "pod1"),))
    assert "ns/pod1" in output
    assert "No agent with pages runs on this node" in output
    assert "Not known: forbidden" in text("node", FLEET, query, holders_problem="forbidden")


def test_a_device_shows_state_history_values_and_next_steps() -> None:
    history = (Change(1764000000, "suspect", "bus", "AER"), Change(1764000060, "unhealthy", "bus", "link down"))
    found = cluster(
        node("a", unit(phase="unhealthy", reason="bus", text="link down", holders=(holder(),), history=history))
    )
    values = (
        Value("accelplane_device_temperature_celsius", {"sensor": "vram", "plugin": "gpu"}, 71.5),
        Value("accelplane_device_temperature_limit_celsius", {"sensor": "vram", "limit": "critical"}, 100.0),
        Value("accelplane_gpu_frequency_hertz", {"kind": "actual"}, 1.55e9),
    )
    readings = NodeReadings(5, (DeviceReadings("gpu", "card0", values=values, outcomes={"ok": 3, "denied": 2}),))
    query = Query(node="a", plugin="gpu", unit="card0")
    output = text("device", found, query, readings=readings, grafana_url="https://g.example.com/?v={device}&n={node}")
    for expected in (
        "71.5 °C",
        "critical 100 °C",
        "1.55 GHz",
        "2 denied",
        "link down",
        "kubectl -n team describe pod p",
    ):
        assert expected in output
    assert "https://g.example.com/?v=card0&amp;n=a" in html(
        "device", found, query, grafana_url="https://g.example.com/?v={device}&n={node}"
    )
    assert names_of(page("device", found, query), "history") == ["1 1764000060", "0 1764000000"]


@pytest.mark.parametrize(
    ("readings", "expected"),
    [
        (None, "No reading: they were not requested."),
        (NodeReadings(5, problem="no answer"), "No reading: no answer."),
        (NodeReadings(5), "No reading: the agent has none of this device."),
        (NodeReadings(5, (DeviceReadings("gpu", "card0", awake=False),)), "No reading: the device is asleep."),
        (NodeReadings(5, (DeviceReadings("gpu", "card0", stuck=True),)), "No reading: the device does not answer."),
        (NodeReadings(5, (DeviceReadings("gpu", "card0"),)), "No reading: the driver provides none."),
    ],
)
def test_missing_values_have_a_cause(readings: NodeReadings | None, expected: str) -> None:
    query = Query(node="a", plugin="gpu", unit="card0")
    assert expected in text("device", cluster(node("a", unit())), query, readings=readings)


def test_pending_pods_are_explained_in_numbers() -> None:
    found = cluster(
        node("a", unit(holders=(holder(number=1),))),
        node("b", unit(holders=(holder(number=1),))),
        waiting=(Waiting("team", "big", 100, {I915: 2}, "0/2 nodes are available", ("gate",)),),
        quotas=(Quota("team", "q", I915, 4, 1),),
    )
    output = text("waiting", found)
    for expected in (
        "team/big", "0/2 nodes are available", "Scheduling gates: gate", "Requests 2 of gpu.intel.com/i915.",
        "2 free in the cluster, at most 1 on one node", "The quota of the namespace leaves 3 for other pods.",
    ):  # fmt: skip
        assert expected in output
    assert names_of(page("waiting", found, Query(text="big"))) == ["team/big"]
    assert names_of(page("waiting", found, Query(text="other"))) == [""]


def test_namespaces_are_listed_by_their_allocations() -> None:
    found = cluster(
        node("a", unit("card0", holders=(holder("small"),)), unit("card1", holders=(holder("large", number=2),))),
        held_seconds={("small", I915): 7200.0},
    )
    assert names_of(page("namespaces", found)) == [f"large {I915}", f"small {I915}"]
    output = text("namespaces", found)
    assert "50.0%" in output
    assert "2.0" in output


@pytest.mark.parametrize("name", list(SCREENS))
def test_hidden_names_are_nowhere_on_a_page(name: ScreenName) -> None:
    space = "secretspace"
    holder_ = Holder(space, "secretpod", "secretmain", I915, 1, 5)
    found = cluster(
        node("a", unit(holders=(holder_, holder("open", "openpod")))),
        Node("bare", resources=(NodeResource(I915, capacity=1, allocatable=1),)),
        waiting=(
            Waiting(space, "secretpod", 5, {I915: 1}, 'secret "secretpod" not found', ("secretgate",)),
            Waiting("open", "openpod", 5, {I915: 1}, "Insufficient"),
        ),
        held_seconds={(space, I915): 5.0},
    )
    for fields in ({"node": "a", "plugin": "gpu", "unit": "card0"}, {"node": "bare"}, {"text": "zzz", "holder": "zzz"}):
        query = query_of(fields)
        output = html(name, found, query, visible=lambda each: each == "open", holders=(holder_,))
        assert "secret" not in output
    if name != "overview":
        assert "hidden" in html(
            name, found, query_of({"node": "a", "plugin": "gpu", "unit": "card0"}),
            visible=lambda _space: False, holders=(holder_,),
        ) or name == "nodes"  # fmt: skip


@pytest.mark.parametrize(
    ("text_", "expected"),
    [
        ("ci/", ["a", "b"]), ("CI/train", ["a", "b"]), ("ci/train-1", ["a", "b"]), ("ci/train-1/", ["a"]),
        ("ci/train-1/main", ["a"]), ("train-1", ["a", "b", "c"]), ("team-ci", ["c"]), ("i/train-1/", [""]), ("/", [""]),
    ],
)  # fmt: skip
def test_the_complete_name_of_a_holder_does_not_match_longer_names(text_: str, expected: list[str]) -> None:
    pods = {"a": ("ci", "train-1"), "b": ("ci", "train-10"), "c": ("team-ci", "train-1")}
    found = cluster(*(node(name, unit(holders=(holder(*pod),))) for name, pod in pods.items()))
    assert names_of(page("nodes", found, Query(holder=text_, sort="name"))) == expected


def test_the_numbers_of_a_resource_lead_to_its_nodes_and_not_to_others_of_the_family() -> None:
    xe = "gpu.intel.com/xe"
    other = node(
        "b",
        unit(ids={xe: 1}, phase="unhealthy"),
        resources=(NodeResource(xe, capacity=1, allocatable=1, ids=1, healthy=0, allocated=0, stage="registered"),),
    )
    bare = Node("c", resources=(NodeResource(xe, capacity=1, allocatable=1),))
    found = cluster(node("a", unit(phase="unhealthy")), other, bare)
    assert 'href="devices?family=gpu.intel.com/xe&amp;state=unhealthy"' in html("overview", found)
    assert names_of(page("devices", found, Query(family=xe, state="unhealthy"))) == ["b gpu card0"]
    assert names_of(page("nodes", found, Query(family=xe, sort="name"))) == ["b", "c"]
    assert names_of(page("nodes", found, Query(family=xe, state="unhealthy"))) == ["b"]
    assert names_of(page("nodes", found, Query(family="gpu", sort="name"))) == ["a", "b", "c"]


def test_the_numbers_of_the_overview_count_what_their_links_select() -> None:
    nodes = (
        node("a", unit(phase="recovering", known=False)), node("b", unit(phase="unhealthy")),
        node("c", unit(known=False)), node("d", unit()),
    )  # fmt: skip
    found = cluster(*nodes)
    (row,) = overview(found)
    assert (row.unhealthy, row.unknown) == (2, 1)
    assert names_of(page("nodes", found, Query(state="unhealthy", sort="name"))) == ["a", "b"]
    assert names_of(page("nodes", found, Query(state="recovering"))) == ["a"]
    assert names_of(page("nodes", found, Query(state="unknown"))) == ["c"]


def test_links_to_a_pod_and_a_namespace_lead_to_their_devices() -> None:
    found = cluster(node("a", unit(holders=(holder("ci", "train-1"),))))
    assert 'href="devices?holder=ci/train-1/"' in html("node", found, Query(node="a"))
    assert 'href="devices?holder=ci/"' in html("namespaces", found)


def test_filters_do_not_reveal_hidden_holders() -> None:
    found = cluster(node("a", unit(holders=(holder("secret", "pod"),))))
    hidden: Callable[[str], bool] = lambda _space: False  # noqa: E731
    assert names_of(page("nodes", found, Query(holder="secret"), hidden)) == [""]
    assert names_of(page("namespaces", found, Query(text="secret"), hidden)) == [""]
