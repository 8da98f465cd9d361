"""The screens of the fleet page as functions of a snapshot and a query."""

import itertools
import re

import pytest
from fleetscreens import I915, Parsed, cluster, holder, html, names_of, node, page, text, unit

from accelplane.fleet.model import Agent, Cluster, DevicePlugin, Node, NodeReadings, NodeResource, Quota, Waiting
from accelplane.fleet.simulated import SimulatedFleet
from accelplane.fleet.web.query import Query, ScreenName, fields_of, query_of
from accelplane.fleet.web.screens import SCREENS
from accelplane.report.inventory import Change, Holder, SkippedHardware
from accelplane.report.readings import DeviceReadings, Value

# Screens


HOSTILE = ("<script>alert(1)</script>", '" onload="x', "'><img src=x>", "\u202ertl", "a\nb", "\ud800", "x" * 300)


@pytest.mark.parametrize("name", list(SCREENS))
@pytest.mark.parametrize("bad", HOSTILE)
def test_hostile_names_add_no_element_and_no_attribute(name: ScreenName, bad: str) -> None:
    def build(word: str) -> Cluster:
        holder_ = Holder(word, word, word, word, 1, 5)
        units = (
            unit(
                word, plugin=word, device=word, bdf=word, model=word, reason=word, text=word, phase="unhealthy",
                holders=(holder_,), history=(Change(5, "unhealthy", word, word),), ids={word: 1},
            ),
        )  # fmt: skip
        return cluster(
            Node(
                word, {word: word}, agents=(Agent(word, word, word, "invalid", word, holders_source=word),),
                resources=(NodeResource(word, "failed", word, 1, 1, 1, capacity=1, allocatable=1),), units=units,
                skipped=(SkippedHardware(word, word, word),),
            ),
            waiting=(Waiting(word, word, 5, {word: 1}, word, (word,)),),
            quotas=(Quota(word, word, word, 1, 1),), problem=word,
            device_plugins=(DevicePlugin(word, word, 1, 1, 1, word),),
        )  # fmt: skip

    def shape(word: str) -> list[tuple[str, set[str]]]:
        query: Query = query_of({"node": word, "plugin": word, "unit": word})
        readings = NodeReadings(5, (DeviceReadings(word, word, values=(Value(word, {word: word}, 1.0),)),))
        parsed = Parsed(html(name, build(word), query, readings=readings, grafana_url="https://g/{device}"))
        assert not parsed.open
        for tag, attributes in parsed.tags:
            for attribute, value in attributes.items():
                if attribute in ("href", "action", "src"):
                    allowed = ("https://g/", "data:,")
                    assert value is not None
                    assert ":" not in value.partition("?")[0] or value.startswith(allowed), (tag, value)
        return [(tag, set(attributes)) for tag, attributes in parsed.tags]

    assert shape(bad) == shape("plain")


@pytest.mark.parametrize("name", list(SCREENS))
def test_pages_have_headers_labels_and_landmarks(name: ScreenName) -> None:
    fleet = SimulatedFleet(60, now=1764000000).cluster()
    first = next(each for each in fleet.nodes.values() if each.units)
    query = query_of({"node": first.name, "plugin": first.units[0].plugin, "unit": first.units[0].unit})
    parsed = Parsed(html(name, fleet, query))
    tags = [tag for tag, _ in parsed.tags]
    assert not parsed.open
    assert (tags.count("h1"), tags.count("main"), tags.count("title")) == (1, 1, 1)
    assert tags.count("table") == tags.count("caption")
    assert all("scope" in attributes for tag, attributes in parsed.tags if tag == "th")
    assert all(
        "style" not in attributes and not any(a.startswith("on") for a in attributes) for _, attributes in parsed.tags
    )
    links = [str(attributes["href"]) for tag, attributes in parsed.tags if tag == "a"]
    assert links, "a page links to the next one"
    assert not [each for each in links if each.startswith("/") or "//" in each]
    headings = [int(tag[1]) for tag in tags if tag in ("h1", "h2", "h3")]
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings))


@pytest.mark.parametrize("name", list(SCREENS))
def test_an_empty_cluster_is_shown(name: ScreenName) -> None:
    found = page(name, cluster())
    assert found.found is (name not in ("node", "device"))


def test_numbers_of_the_cluster_have_nouns_in_singular_or_plural() -> None:
    waiting = (Waiting("team", "p", 5, {I915: 1}),)
    one = text("overview", cluster(node("a", unit()), waiting=waiting))
    assert "1 node1 device0 held0 unhealthy0 agents not answering1 waiting pod" in one
    assert "2 nodes2 devices" in text("overview", cluster(node("a", unit()), node("b", unit())))


def test_the_overview_lists_held_unhealthy_devices_first() -> None:
    found = cluster(
        node("a", unit("card0", phase="unhealthy", reason="bus")),
        node("b", unit("card1", phase="unhealthy", reason="wedged", holders=(holder(),))),
        node("c", unit("card2")),
    )
    first, second = names_of(page("overview", found), "problems")
    assert (first.split()[:3], second.split()[:3]) == (["b", "gpu", "card1"], ["a", "gpu", "card0"])
    output = text("overview", found)
    assert "gpu card1 is unhealthy (wedged), held by 1 container" in output
    assert "2 unhealthy" in output


@pytest.mark.parametrize(("without_agent", "shown"), [(0, False), (2, True), (3, False)])
def test_nodes_without_agent_are_a_problem_if_others_have_one(without_agent: int, *, shown: bool) -> None:
    found = cluster(
        *(node(name, agents=()) for name in "abc"[:without_agent]), *(node(name) for name in "abc"[without_agent:])
    )
    texts = text("overview", found)
    assert ("2 nodes: no agent with pages" in texts) is shown
    assert ("No problem is known." in texts) is not shown
    assert ('<a href="nodes?state=no-agent">' in html("overview", found)) is shown


@pytest.mark.parametrize(
    ("name", "labels", "cells"),
    [
        ("pci_link_transfers_per_second", {}, ["PCI link speed", "-", "16 GT/s"]),
        ("pci_link_max_transfers_per_second", {}, ["PCI link max speed", "-", "16 GT/s"]),
        ("pci_link_lanes", {}, ["PCI link width", "-", "16,000,000,000 lanes"]),
        ("gpu_frequency_hertz", {"gt": "gt0", "kind": "actual"}, ["GPU frequency", "gt0, actual", "16 GHz"]),
        ("device_energy_joules_total", {"sensor": "card"}, ["Energy", "card", "16 GJ"]),
        ("qat_up", {}, ["QAT up", "-", "16,000,000,000"]),
    ],
)
def test_values_have_names_in_words_and_units(name: str, labels: dict[str, str], cells: list[str]) -> None:
    values = (Value(f"accelplane_{name}", labels, 16e9),)
    readings = NodeReadings(5, (DeviceReadings("gpu", "card0", values=values),))
    query = Query(node="a", plugin="gpu", unit="card0")
    output = html("device", cluster(node("a", unit())), query, readings=readings)
    row = output.partition('aria-label="Current values"')[2].partition("<tbody")[2].partition("</tbody>")[0]
    assert re.findall(r">([^<>]+)</", row) == [*cells, "-"]


def test_a_warning_of_a_healthy_device_is_a_minor_problem() -> None:
    warned = unit("card0", reason="driver", text="gpu_health warning")
    found = cluster(node("a", warned), node("b", unit("card1", text="no answer", known=False)))
    assert names_of(page("overview", found), "problems") == ["a gpu card0 6 "]
    output = text("overview", found)
    assert "gpu card0 has a warning (driver)" in output
    assert "0 unhealthy" in output
    output = text("device", found, Query(node="a", plugin="gpu", unit="card0"))
    assert "driver: gpu_health warning" in output
    assert "Warning" not in text("device", found, Query(node="b", plugin="gpu", unit="card1"))


def test_a_holder_by_a_claim_is_marked() -> None:
    found = cluster(node("a", unit("card0", holders=(Holder("team", "p", "main", "gpu.intel.com", 1, 5, "dra"),))))
    output = text("device", found, Query(node="a", plugin="gpu", unit="card0"))
    assert "gpu.intel.com (DRA)" in output


def test_the_overview_shows_device_plugins_of_the_operator_with_their_problems() -> None:
    plugins = (
        DevicePlugin("SgxDevicePlugin", "sgx", 3, 2, 3, "1 of 3 pods is not ready"),
        DevicePlugin("GpuDevicePlugin", "gpu", 4, 4, 4),
    )
    found = cluster(node(), device_plugins=plugins, more_device_plugins=7)
    assert names_of(page("overview", found), "plugins") == ["SgxDevicePlugin sgx", "GpuDevicePlugin gpu"]
    shown = text("overview", found)
    assert "SgxDevicePluginsgx1 of 3 pods is not ready323" in shown
    assert "GpuDevicePlugingpuno problem444" in shown
    assert "7 more device plugins are not shown." in shown


@pytest.mark.parametrize("plugins", [(), (DevicePlugin("GpuDevicePlugin", "gpu"),)])
def test_the_section_of_device_plugins_is_hidden_without_any(plugins: tuple[DevicePlugin, ...]) -> None:
    parsed = Parsed(html("overview", cluster(node(), device_plugins=plugins)))
    (section,) = [attributes for tag, attributes in parsed.tags if "data-optional" in attributes]
    assert ("hidden" in section) is (not plugins)
    assert names_of(page("overview", cluster(device_plugins=plugins)), "plugins") == [
        f"{each.kind} {each.name}" for each in plugins
    ]


def test_the_overview_shows_silent_agents_and_failed_registrations() -> None:
    stale = Agent("accelplane/x", "accelplane node", "1", "stale", "no answer in 5 s", 40)
    failed = NodeResource(
        I915, capacity=2, allocatable=2, ids=2, healthy=2, allocated=0, stage="failed", problem="version not supported"
    )
    found = cluster(
        node("a", unit(), agents=(stale,)), node("b", unit(), resources=(failed,)), node("c", ready=False), problem="x"
    )
    output = text("overview", found)
    assert "agent accelplane/x is not answering: no answer in 5 s" in output
    assert f"{I915} is not registered at the kubelet (failed): version not supported" in output
    assert "the node is not ready" in output
    assert "The data may be old or incomplete: x" in output


def test_a_page_has_at_most_2500_elements_and_links_to_the_rest() -> None:
    many = cluster(*(node(f"n{index:04}", *(unit(f"card{card}") for card in range(70))) for index in range(60)))
    query, names = Query(sort="name"), list[str]()
    while True:
        text_ = html("nodes", many, query)
        assert len(Parsed(text_).tags) <= 2500
        rows = names_of(page("nodes", many, query))
        names += rows
        following = next((a["href"] for tag, a in Parsed(text_).tags if a.get("rel") == "next"), None)
        if following is None:
            break
        query = query_of(fields_of(str(following).partition("?")[2]))
    assert names == sorted(many.nodes)


def crowded_cluster() -> Cluster:
    """A cluster with more of everything than a page can show, as an agent that works wrongly can report it."""
    holders = tuple(holder(pod=f"p{number}") for number in range(300))
    change = Change(5, "unhealthy", "a", "b")
    units = (
        unit("first", holders=holders, history=(change,) * 32, ids={f"r{number}": 1 for number in range(300)}),
        *(unit(f"card{number}", model=f"m{number}", holders=holders[:6]) for number in range(500)),
        unit("last", phase="unhealthy", reason="x"),
    )
    resources = tuple(
        NodeResource(
            f"{number}.example.com/x",
            capacity=1,
            allocatable=1,
            ids=1,
            healthy=1,
            allocated=1,
            stage="registered" if number < 399 else "failed",
            problem="p",
        )
        for number in range(400)
    )
    agents = tuple(Agent(f"a{number}", "n", "1", "stale", "x") for number in range(60))
    skipped = tuple(SkippedHardware("gpu", f"s{number}", "why") for number in range(500))
    requests = {f"r{number}": 1 for number in range(900)}
    return cluster(
        node("a", *units, resources=resources, agents=agents, skipped=skipped),
        Node("bare", resources=resources),
        *(node(f"n{number}", *(unit(f"card{card}") for card in range(70))) for number in range(60)),
        device_plugins=tuple(DevicePlugin("GpuDevicePlugin", f"g{number}", problem="x") for number in range(90)),
        waiting=tuple(Waiting("team", f"w{number}", 5, requests, "m") for number in range(120)),
    )


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("overview", {}), ("nodes", {}), ("node", {"node": "a"}), ("node", {"node": "bare"}),
        ("device", {"node": "a", "plugin": "gpu", "unit": "first"}), ("waiting", {}), ("namespaces", {}),
        ("devices", {}), ("pods", {}), ("groups", {}), ("search", {"text": "a"}),
    ],
)  # fmt: skip
def test_every_screen_of_a_crowded_cluster_has_at_most_2500_elements(name: ScreenName, place: dict[str, str]) -> None:
    values = tuple(Value(f"accelplane_v{number}", {}, 1.0) for number in range(500))
    readings = NodeReadings(5, (DeviceReadings("gpu", "first", values=values),))
    holders = tuple(holder(pod=f"p{number}") for number in range(300))
    output = html(name, crowded_cluster(), query_of(place), readings=readings, holders=holders)
    tags = [tag for tag, _ in Parsed(output).tags]
    assert len(tags) <= 2500


def test_a_crowded_node_shows_problems_first_and_how_much_is_missing() -> None:
    found = crowded_cluster()
    shown = page("node", found, Query(node="a"))
    assert names_of(shown, "devices")[0] == "a gpu last"
    assert names_of(shown, "resources")[0] == "399.example.com/x"
    for block, total, noun in (("devices", 502, "devices"), ("resources", 400, "resources"), ("agents", 60, "agents")):
        rest = total - len(names_of(shown, block))
        assert f"{rest} more {noun} are not shown." in text("node", found, Query(node="a"))


@pytest.mark.parametrize(
    ("name", "query", "expected"),
    [
        ("waiting", Query(), "No pod waits for a device."),
        ("waiting", Query(text="x"), "No pod matches the filters."),
        ("namespaces", Query(), "No namespace holds a device."),
        ("namespaces", Query(text="x"), "No namespace matches the filters."),
        ("nodes", Query(sort="name"), "No node has a resource of the plugins or an agent."),
        ("nodes", Query(state="idle"), "No node matches the filters."),
    ],
)
def test_an_empty_list_says_whether_filters_are_the_cause(name: ScreenName, query: Query, expected: str) -> None:
    assert expected in text(name, cluster(), query)


@pytest.mark.parametrize("name", ["overview", "nodes"])
def test_without_lists_of_the_api_server_no_statement_about_the_cluster_is_made(name: ScreenName) -> None:
    shown = text(name, cluster(problem="nodes and pods have not been listed yet"))
    assert "No node is known." in shown
    assert "No node has a resource" not in shown


def test_a_part_behind_the_end_of_a_list_is_not_called_without_a_match() -> None:
    shown = text("nodes", cluster(node()), Query(start=100))
    assert "No node on this part of the list." in shown
    assert "Found 1 node; none after 100." in shown


def test_an_unknown_device_of_a_known_node_leads_to_the_node() -> None:
    query = Query(node="n1", plugin="gpu", unit="card9")
    found = page("device", cluster(node()), query)
    assert not found.found
    shown = text("device", cluster(node()), query)
    assert "The device 'card9' of the plugin 'gpu' is not known: no agent of the node reports it." in shown
    assert 'href="node?node=n1"' in html("device", cluster(node()), query)
    assert "The node 'n2' is not known" in text("device", cluster(node()), Query(node="n2", unit="card9"))
