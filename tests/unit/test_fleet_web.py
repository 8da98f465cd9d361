"""The screens of the fleet page as functions of a snapshot and a query."""

import asyncio
import itertools
import re
from collections.abc import Callable, Coroutine, Iterator
from html.parser import HTMLParser
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.apiserver import ClientConfig
from accelplane.fleet.arithmetic import overview
from accelplane.fleet.model import (
    Agent,
    Change,
    Cluster,
    DevicePlugin,
    DeviceReadings,
    Holder,
    Node,
    NodeReadings,
    Quota,
    Resource,
    Skipped,
    Unit,
    Value,
    Waiting,
)
from accelplane.fleet.simulated import SimulatedFleet
from accelplane.fleet.web.access import Access
from accelplane.fleet.web.gate import OpenGate, SecureGate
from accelplane.fleet.web.html import Element, as_json, blocks, count, element, render
from accelplane.fleet.web.live import difference, digests
from accelplane.fleet.web.page import Assets, Context, Frame, Page, ScreenName, document
from accelplane.fleet.web.query import (
    ListQuery,
    NodesQuery,
    PlaceQuery,
    Query,
    SelectorError,
    Term,
    fields_of,
    link,
    list_query,
    nodes_query,
    place_query,
    selector_terms,
)
from accelplane.fleet.web.screens import SCREENS
from accelplane.fleet.web.sessions import Sessions
from accelplane.fleet.web.site import Screens, Site
from accelplane.fleet.web.summaries import Summaries, summarize
from accelplane.http.messages import Request, Response
from accelplane.kube.client import Client

T = TypeVar("T")
I915 = "gpu.intel.com/i915"
ALL: Callable[[str], bool] = lambda _namespace: True  # noqa: E731
ASSETS = Assets("assets/s.css", "assets/s.js")


class Parsed(HTMLParser):
    """The tags and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def unit(name: str = "card0", **changes: Any) -> Unit:
    return msgspec.structs.replace(
        Unit("gpu", name, name, "0000:03:00.0", "Flex 170", 0, ids={I915: 2}, since=1764000000), **changes
    )


def node(name: str = "n1", *units: Unit, **changes: Any) -> Node:
    ids = sum(each.ids.get(I915, 0) for each in units)
    allocated = sum(holder.count for each in units for holder in each.holders)
    resource = Resource(I915, ids, ids, ids, ids, allocated, "registered")
    agent = Agent("accelplane/a", "accelplane node", "1.0.0", "connected", holders_source="podresources")
    instance = Node(name, {"zone": "a"}, agents=(agent,), resources=(resource,), units=units)
    return msgspec.structs.replace(instance, **changes)


def holder(namespace: str = "team", pod: str = "p", number: int = 1) -> Holder:
    return Holder(namespace, pod, "main", I915, number, 1764000000)


def cluster(*nodes: Node, **changes: Any) -> Cluster:
    return msgspec.structs.replace(Cluster(7, 100.0, 50.0, {each.name: each for each in nodes}), **changes)


def page(
    name: ScreenName, found: Cluster, query: Query | None = None, visible: Callable[[str], bool] = ALL, **more: Any
) -> Page:
    context = Context(cluster=found, summaries=Summaries().of(found), visible=visible, now=160.0, **more)
    return SCREENS[name].make(context, query if query is not None else SCREENS[name].read({}))


def html(
    name: ScreenName, found: Cluster, query: Query | None = None, visible: Callable[[str], bool] = ALL, **more: Any
) -> str:
    context = Context(cluster=found, summaries=Summaries().of(found), visible=visible, now=160.0, **more)
    query = query if query is not None else SCREENS[name].read({})
    return document(SCREENS[name].make(context, query), Frame(assets=ASSETS, screen=name, query=query), context)


def text(name: ScreenName, found: Cluster, query: Query | None = None, **more: Any) -> str:
    return Parsed(html(name, found, query, **more)).text


def names_of(found: Page, block: str = "rows") -> list[str]:
    return list(blocks(element("div", *found.content))[block])


# HTML

DIRECTIONS = re.compile("[\u202a-\u202e\u2066-\u2069]")


@given(st.text(), st.text())
def test_texts_and_attributes_never_become_markup(content: str, value: str) -> None:
    parsed = Parsed(render(element("p", content, title=value)))
    printable = DIRECTIONS.sub("\ufffd", content).encode("utf-8", "replace").decode()
    assert [tag for tag, _ in parsed.tags] == ["p"]
    # The parser of HTML normalizes line ends and NUL.
    assert parsed.text.replace("\r", "") == printable.replace("\r", "") or "\0" in content
    assert set(parsed.tags[0][1]) == {"title"}


def test_a_text_does_not_change_the_direction_of_the_texts_after_it() -> None:
    tree = element("td", "\u202eylthlaehnu", " is ", "\u2067x", data_key="\u202ea")
    assert render(tree) == '<td data-key="\u202ea">\ufffdylthlaehnu is \ufffdx</td>'
    assert as_json(tree) == ["td", {"data-key": "\u202ea"}, "\ufffdylthlaehnu", " is ", "\ufffdx"]


def test_elements_are_sent_as_lists_and_counted() -> None:
    tree = element("ul", element("li", "a", class_="x", hidden=True), None, "b", id=None)
    assert as_json(tree) == ["ul", {}, ["li", {"class": "x", "hidden": ""}, "a"], "b"]
    assert count(tree) == 2
    assert render(tree) == '<ul><li class="x" hidden>a</li>b</ul>'


def test_changes_of_a_block_are_its_changed_rows_and_their_order() -> None:
    def rows(*names: str) -> dict[str, Element]:
        return {each[0]: element("tr", each) for each in names}

    def changed(old: dict[str, Element], new: dict[str, Element]) -> Any:
        return difference(digests({"b": old})["b"], digests({"b": new})["b"], new)

    assert changed(rows("a1", "b1"), rows("a1", "b2")) == {"set": {"b": ["tr", {}, "b2"]}}
    assert changed(rows("a1", "b1"), rows("b1")) == {"set": {}, "order": ["b"]}
    assert changed({}, rows("a1")) == {"set": {"a": ["tr", {}, "a1"]}, "order": ["a"]}


# Queries


@given(st.text(max_size=6000))
def test_any_query_and_its_link_are_parsed_equally(query: str) -> None:
    fields = fields_of(query)
    found = nodes_query(fields)
    again = nodes_query(fields_of(link("nodes", found).partition("?")[2]))
    assert again == found
    assert all(len(value) <= 253 for value in fields.values())
    assert place_query(fields).node == fields.get("node", "")


@pytest.mark.parametrize("start", ["-1", "x", "1e3", "٣", "9" * 20])
def test_an_invalid_page_start_is_the_first_page(start: str) -> None:
    assert list_query({"start": start}).start == 0
    assert list_query({"start": "100"}).start == 100


def test_links_have_only_what_differs_from_the_default() -> None:
    assert link("nodes", NodesQuery()) == "nodes"
    assert link("nodes", NodesQuery(state="idle", start=100)) == "nodes?state=idle&start=100"
    assert link("device", PlaceQuery(node="n", plugin="p", unit="a b&c")) == "device?node=n&plugin=p&unit=a%20b%26c"


@pytest.mark.parametrize(
    ("selector", "labels", "matches"),
    [
        ("", {}, True),
        ("zone=a", {"zone": "a"}, True),
        ("zone==a", {"zone": "b"}, False),
        ("zone!=a", {}, True),
        ("zone, !test", {"zone": "x"}, True),
        ("zone, !test", {"zone": "x", "test": ""}, False),
        ("example.com/a-b=c_d.e", {"example.com/a-b": "c_d.e"}, True),
    ],
)
def test_label_selectors_match_as_kubectl_does(selector: str, labels: dict[str, str], matches: bool) -> None:
    assert all(term.matches(labels) for term in selector_terms(selector)) is matches


@pytest.mark.parametrize("selector", ["zone in (a)", "=a", "a=b c", ",".join("abcdefghijklmnopq")])
def test_other_selectors_are_reported(selector: str) -> None:
    with pytest.raises(SelectorError, match="labels: found"):
        selector_terms(selector)
    assert Parsed(html("nodes", cluster(node()), NodesQuery(labels=selector))).text.count("labels: found") == 1


def test_terms_are_values() -> None:
    assert selector_terms("a!=b") == (Term("a", "b", negated=True),)


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
                resources=(Resource(word, 1, 1, 1, 1, 1, "failed", word),), units=units,
                skipped=(Skipped(word, word, word),),
            ),
            waiting=(Waiting(word, word, 5, {word: 1}, word, (word,)),),
            quotas=(Quota(word, word, word, 1, 1),), problem=word,
            device_plugins=(DevicePlugin(word, word, 1, 1, 1, word),),
        )  # fmt: skip

    def shape(word: str) -> list[tuple[str, set[str]]]:
        query: Query = SCREENS[name].read({"node": word, "plugin": word, "unit": word})
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
    query = SCREENS[name].read({"node": first.name, "plugin": first.units[0].plugin, "unit": first.units[0].unit})
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
    assert names_of(page("overview", found), "problems") == (["without agent"] if shown else [""])
    assert ('<a href="nodes?state=no-agent">2 nodes</a>' in html("overview", found)) is shown


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
    query = PlaceQuery(node="a", plugin="gpu", unit="card0")
    output = html("device", cluster(node("a", unit())), query, readings=readings)
    row = output.partition('aria-label="Current values"')[2].partition("<tbody")[2].partition("</tbody>")[0]
    assert re.findall(r">([^<>]+)</", row) == cells


def test_a_warning_of_a_healthy_device_is_a_minor_problem() -> None:
    warned = unit("card0", reason="driver", text="gpu_health warning")
    found = cluster(node("a", warned), node("b", unit("card1", text="no answer", known=False)))
    assert names_of(page("overview", found), "problems") == ["a gpu card0 6 "]
    output = text("overview", found)
    assert "gpu card0 has a warning (driver)" in output
    assert "0 unhealthy" in output
    output = text("device", found, PlaceQuery(node="a", plugin="gpu", unit="card0"))
    assert "driver: gpu_health warning" in output
    assert "Warning" not in text("device", found, PlaceQuery(node="b", plugin="gpu", unit="card1"))


def test_a_holder_by_a_claim_is_marked() -> None:
    found = cluster(node("a", unit("card0", holders=(Holder("team", "p", "main", "gpu.intel.com", 1, 5, "dra"),))))
    output = text("device", found, PlaceQuery(node="a", plugin="gpu", unit="card0"))
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
    failed = Resource(I915, 2, 2, 2, 2, 0, "failed", "version not supported")
    found = cluster(
        node("a", unit(), agents=(stale,)), node("b", unit(), resources=(failed,)), node("c", ready=False), problem="x"
    )
    output = text("overview", found)
    assert "agent accelplane/x is not answering: no answer in 5 s" in output
    assert f"{I915} is not registered at the kubelet (failed): version not supported" in output
    assert "the node is not ready" in output
    assert "The data may be old or incomplete: x" in output


FLEET = cluster(
    node("a", unit("card0", phase="unhealthy", reason="bus", model="Max 1550")),
    node("b", unit("card0", holders=(holder("team", "train"),), idle_since=90), unit("card1"), labels={"zone": "b"}),
    node("c", unit("wq0.1", plugin="dsa", ids={"dsa.intel.com/wq": 1}, known=False), cordoned=True),
    Node("d", resources=(Resource(I915, 3, 3),)),
    Node("e", agents=(Agent("n/e", "accelplane node", "", "stale"),), resources=(Resource(I915, 1, 1),), ready=False),
)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (NodesQuery(), ["a", "e", "b", "c", "d"]),
        (NodesQuery(sort="name"), ["a", "b", "c", "d", "e"]),
        (NodesQuery(sort="free"), ["b", "d", "a", "c", "e"]),
        (NodesQuery(family="dsa"), ["c"]),
        (NodesQuery(state="unhealthy"), ["a"]),
        (NodesQuery(state="unknown"), ["c"]),
        (NodesQuery(state="held"), ["b"]),
        (NodesQuery(state="unheld", family="gpu"), ["a", "b"]),
        (NodesQuery(state="idle"), ["b"]),
        (NodesQuery(state="no-agent"), ["d"]),
        (NodesQuery(state="unanswered"), ["e"]),
        (NodesQuery(state="cordoned"), ["c"]),
        (NodesQuery(state="not-ready"), ["e"]),
        (NodesQuery(model="Max 1550"), ["a"]),
        (NodesQuery(labels="zone=b"), ["b"]),
        (NodesQuery(holder="TEAM/tr"), ["b"]),
        (NodesQuery(text="0000:03"), ["a", "b", "c"]),
        (NodesQuery(text="wq0"), ["c"]),
        (NodesQuery(text="nothing"), [""]),
        (NodesQuery(sort="name", start=3), ["d", "e"]),
    ],
)
def test_filters_and_orders_of_nodes(query: NodesQuery, expected: list[str]) -> None:
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


def test_a_page_has_at_most_2500_elements_and_links_to_the_rest() -> None:
    many = cluster(*(node(f"n{index:04}", *(unit(f"card{card}") for card in range(70))) for index in range(60)))
    query, names = NodesQuery(sort="name"), list[str]()
    while True:
        text_ = html("nodes", many, query)
        assert len(Parsed(text_).tags) <= 2500
        rows = names_of(page("nodes", many, query))
        names += rows
        following = next((a["href"] for tag, a in Parsed(text_).tags if a.get("rel") == "next"), None)
        if following is None:
            break
        query = nodes_query(fields_of(str(following).partition("?")[2]))
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
        Resource(f"{number}.example.com/x", 1, 1, 1, 1, 1, "registered" if number < 399 else "failed", "p")
        for number in range(400)
    )
    agents = tuple(Agent(f"a{number}", "n", "1", "stale", "x") for number in range(60))
    skipped = tuple(Skipped("gpu", f"s{number}", "why") for number in range(500))
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
    ],
)  # fmt: skip
def test_every_screen_of_a_crowded_cluster_has_at_most_2500_elements(name: ScreenName, place: dict[str, str]) -> None:
    values = tuple(Value(f"accelplane_v{number}", {}, 1.0) for number in range(500))
    readings = NodeReadings(5, (DeviceReadings("gpu", "first", values=values),))
    holders = tuple(holder(pod=f"p{number}") for number in range(300))
    output = html(name, crowded_cluster(), SCREENS[name].read(place), readings=readings, holders=holders)
    tags = [tag for tag, _ in Parsed(output).tags]
    # The script adds an element to each time.
    assert len(tags) + tags.count("time") <= 2500


def test_a_crowded_node_shows_problems_first_and_how_much_is_missing() -> None:
    found = crowded_cluster()
    shown = page("node", found, PlaceQuery(node="a"))
    assert names_of(shown, "devices")[0] == "gpu last"
    assert names_of(shown, "resources")[0] == "399.example.com/x"
    for block, total, noun in (("devices", 502, "devices"), ("resources", 400, "resources"), ("agents", 60, "agents")):
        rest = total - len(names_of(shown, block))
        assert f"{rest} more {noun} are not shown." in text("node", found, PlaceQuery(node="a"))


@pytest.mark.parametrize(
    ("name", "query", "expected"),
    [
        ("waiting", ListQuery(), "No pod waits for a device."),
        ("waiting", ListQuery(text="x"), "No pod matches the filters."),
        ("namespaces", ListQuery(), "No namespace holds a device."),
        ("namespaces", ListQuery(text="x"), "No namespace matches the filters."),
        ("nodes", NodesQuery(sort="name"), "No node has a resource of the plugins or an agent."),
        ("nodes", NodesQuery(state="idle"), "No node matches the filters."),
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
    shown = text("nodes", cluster(node()), NodesQuery(start=100))
    assert "No node on this part of the list." in shown
    assert "Found 1 node; none after 100." in shown


def test_an_unknown_device_of_a_known_node_leads_to_the_node() -> None:
    query = PlaceQuery(node="n1", plugin="gpu", unit="card9")
    found = page("device", cluster(node()), query)
    assert not found.found
    shown = text("device", cluster(node()), query)
    assert "The device 'card9' of the plugin 'gpu' is not known: no agent of the node reports it." in shown
    assert 'href="node?node=n1"' in html("device", cluster(node()), query)
    assert "The node 'n2' is not known" in text("device", cluster(node()), PlaceQuery(node="n2", unit="card9"))


def test_the_inventory_of_an_agent_is_current_or_has_its_time() -> None:
    """A connected agent of a quiet node has sent its last change days ago."""
    agents = (
        Agent("accelplane/a", "n", "1", "connected", answered=1764000000),
        Agent("accelplane/b", "n", "1", "stale", "x", answered=1764000000),
    )
    rows = blocks(element("div", *page("node", cluster(node(agents=agents)), PlaceQuery(node="n1")).content))["agents"]
    assert "current" in render(rows["accelplane/a"])
    assert "<time" not in render(rows["accelplane/a"])
    assert "<time" in render(rows["accelplane/b"])


def test_a_node_shows_resources_devices_skipped_hardware_and_agents() -> None:
    found = cluster(
        node("a", unit("card0", holders=(holder(),)), skipped=(Skipped("gpu", "card9", "no driver"),), cordoned=True)
    )
    output = text("node", found, PlaceQuery(node="a"))
    for expected in ("team/p", "card9", "no driver", "accelplane/a", "podresources", "cordoned", "1 of 2", I915):
        assert expected in output


def test_a_node_without_agent_shows_holders_of_the_api_server_or_why_they_are_missing() -> None:
    query = PlaceQuery(node="d")
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
    query = PlaceQuery(node="a", plugin="gpu", unit="card0")
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
    query = PlaceQuery(node="a", plugin="gpu", unit="card0")
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
    assert names_of(page("waiting", found, ListQuery(text="big"))) == ["team/big"]
    assert names_of(page("waiting", found, ListQuery(text="other"))) == [""]


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
        Node("bare", resources=(Resource(I915, 1, 1),)),
        waiting=(
            Waiting(space, "secretpod", 5, {I915: 1}, 'secret "secretpod" not found', ("secretgate",)),
            Waiting("open", "openpod", 5, {I915: 1}, "Insufficient"),
        ),
        held_seconds={(space, I915): 5.0},
    )
    for fields in ({"node": "a", "plugin": "gpu", "unit": "card0"}, {"node": "bare"}, {"text": "zzz", "holder": "zzz"}):
        query = SCREENS[name].read(fields)
        output = html(name, found, query, visible=lambda each: each == "open", holders=(holder_,))
        assert "secret" not in output
    if name != "overview":
        assert "hidden" in html(
            name, found, SCREENS[name].read({"node": "a", "plugin": "gpu", "unit": "card0"}),
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
    assert names_of(page("nodes", found, NodesQuery(holder=text_, sort="name"))) == expected


def test_the_numbers_of_a_resource_lead_to_its_nodes_and_not_to_others_of_the_family() -> None:
    xe = "gpu.intel.com/xe"
    other = node("b", unit(ids={xe: 1}, phase="unhealthy"), resources=(Resource(xe, 1, 1, 1, 0, 0, "registered"),))
    bare = Node("c", resources=(Resource(xe, 1, 1),))
    found = cluster(node("a", unit(phase="unhealthy")), other, bare)
    assert 'href="nodes?family=gpu.intel.com/xe&amp;state=unhealthy"' in html("overview", found)
    assert names_of(page("nodes", found, NodesQuery(family=xe, sort="name"))) == ["b", "c"]
    assert names_of(page("nodes", found, NodesQuery(family=xe, state="unhealthy"))) == ["b"]
    assert names_of(page("nodes", found, NodesQuery(family="gpu", sort="name"))) == ["a", "b", "c"]


def test_the_numbers_of_the_overview_count_what_their_links_select() -> None:
    nodes = (
        node("a", unit(phase="recovering", known=False)), node("b", unit(phase="unhealthy")),
        node("c", unit(known=False)), node("d", unit()),
    )  # fmt: skip
    found = cluster(*nodes)
    (row,) = overview(found)
    assert (row.unhealthy, row.unknown) == (2, 1)
    assert names_of(page("nodes", found, NodesQuery(state="unhealthy", sort="name"))) == ["a", "b"]
    assert names_of(page("nodes", found, NodesQuery(state="recovering"))) == ["a"]
    assert names_of(page("nodes", found, NodesQuery(state="unknown"))) == ["c"]


def test_links_to_a_pod_and_a_namespace_lead_to_their_nodes_only() -> None:
    found = cluster(node("a", unit(holders=(holder("ci", "train-1"),))))
    assert 'href="nodes?holder=ci/train-1/"' in html("node", found, PlaceQuery(node="a"))
    assert 'href="nodes?holder=ci/"' in html("namespaces", found)


def test_filters_do_not_reveal_hidden_holders() -> None:
    found = cluster(node("a", unit(holders=(holder("secret", "pod"),))))
    hidden: Callable[[str], bool] = lambda _space: False  # noqa: E731
    assert names_of(page("nodes", found, NodesQuery(holder="secret"), hidden)) == [""]
    assert names_of(page("namespaces", found, ListQuery(text="secret"), hidden)) == [""]


# Summaries


def test_only_changed_nodes_are_summarized_again() -> None:
    summaries = Summaries()
    first = summaries.of(cluster(node("a", unit()), node("b", unit())))
    changed = node("b", unit(phase="unhealthy"))
    second = summaries.of(cluster(first["a"].node, changed))
    assert second["a"] is first["a"]
    assert (second["b"].unhealthy, second["b"].rank) == (1, 1)


def test_unschedulable_nodes_have_no_free_devices() -> None:
    assert [summarize(node("a", unit(), **more)).free for more in ({}, {"cordoned": True}, {"ready": False})] == [
        2,
        0,
        0,
    ]


# The simulated fleet


def simulated() -> Iterator[SimulatedFleet]:
    for seed in (1, 2):
        yield SimulatedFleet(60, seed=seed, now=1764000000)


def test_the_simulated_fleet_is_reproducible_and_its_numbers_agree() -> None:
    for fleet in simulated():
        found = fleet.cluster()
        again = SimulatedFleet(60, seed=1, now=1764000000).cluster()
        assert (found == again) is (
            fleet.cluster().nodes["gpu-0000.example.com"] == again.nodes["gpu-0000.example.com"]
        )
        for each in found.nodes.values():
            for resource in each.resources:
                assert resource.allocated <= resource.ids


async def test_the_simulated_fleet_changes() -> None:
    fleet = SimulatedFleet(30, now=1764000000)
    before = fleet.cluster()
    waiting = asyncio.create_task(fleet.changed(before.generation))
    await asyncio.sleep(0)
    fleet.change(30)
    assert await waiting == before.generation + 1
    changed = [name for name, each in fleet.cluster().nodes.items() if each is not before.nodes[name]]
    assert changed
    assert (await fleet.readings(changed[0])).devices
    assert (await fleet.readings("none")).problem == "no agent answers on this node"


# Requests

TEXTS = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=60)
PATHS = st.sampled_from(["/", "/nodes", "/node", "/device", "/waiting", "/namespaces", "/login", "/assets/x", "/x"])


@given(PATHS, TEXTS, st.sampled_from(["GET", "HEAD", "POST"]), st.binary(max_size=100), TEXTS)
def test_any_request_has_a_page_or_an_error(path: str, query: str, method: str, body: bytes, field: str) -> None:
    site = Site(SCREENS_OF_A_SMALL_FLEET, OpenGate(loopback_only=False))
    fields = dict.fromkeys(("cookie", "host", "origin", "last-event-id", "accept-encoding"), field)
    answer = site(Request(method, path, "", body, query=query, fields=fields))
    found = answer if isinstance(answer, Response) else asyncio.run(_awaited(answer))
    assert found.status in (200, 303, 404, 405)
    if found.content_type.startswith("text/html"):
        assert not Parsed(bytes(found.body).decode()).open


@given(TEXTS, st.binary(max_size=200), TEXTS, TEXTS)
def test_any_form_and_any_cookie_is_read(target: str, body: bytes, cookie: str, host: str) -> None:
    sessions = Sessions()
    gate = SecureGate(NO_API_SERVER, ASSETS, sessions=sessions)
    fields = {"cookie": cookie, "host": host, "origin": f"https://{host}"}
    for request, call in (
        (Request("GET", "/nodes", "", b"", query=target, fields=fields), gate.admit),
        (Request("POST", "/login", "", b"next=" + body, fields=fields), gate.sign_in),
    ):
        found = asyncio.run(_awaited(call(request)))
        assert isinstance(found, Response)
        assert found.status in (401, 429)
        parsed = Parsed(bytes(found.body).decode())
        (hidden,) = [attributes["value"] for tag, attributes in parsed.tags if attributes.get("name") == "next"]
        assert hidden is not None
        assert hidden == "./" or hidden.partition("?")[0] in ("nodes", "node", "device", "waiting", "namespaces")


async def _awaited(answer: Coroutine[object, object, T]) -> T:
    return await answer


SCREENS_OF_A_SMALL_FLEET = Screens(SimulatedFleet(5, now=1764000000))
NO_API_SERVER = Access(Client(ClientConfig(server="http://127.0.0.1:1"), field_manager="test").server)
