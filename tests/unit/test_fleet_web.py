"""The fleet page without a cluster: markup, queries, summaries, the simulated fleet, and any request."""

import asyncio
import re
from collections.abc import Coroutine, Iterator
from typing import TypeVar

import pytest
from fleetscreens import ASSETS, Parsed, cluster, html, node, text, unit
from hypothesis import given
from hypothesis import strategies as st

from accelplane.apiserver import ClientConfig
from accelplane.fleet.model import Holder
from accelplane.fleet.simulated import SimulatedFleet
from accelplane.fleet.web.access import Access
from accelplane.fleet.web.gate import Gate, SecureGate
from accelplane.fleet.web.html import count, element, render
from accelplane.fleet.web.query import Query, fields_of, link, query_of
from accelplane.fleet.web.screens import SCREENS
from accelplane.fleet.web.selection import SelectorError, Term, selector_terms
from accelplane.fleet.web.sessions import Sessions
from accelplane.fleet.web.site import Screens, Site
from accelplane.fleet.web.summaries import Summaries, summarize
from accelplane.http.messages import Request, Response
from accelplane.kube.client import Client
from accelplane.readings import Family, families

T = TypeVar("T")

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


def test_elements_are_counted_and_none_is_left_out() -> None:
    tree = element("ul", element("li", "a", class_="x", hidden=True), None, "b", id=None)
    assert count(tree) == 2
    assert render(tree) == '<ul><li class="x" hidden>a</li>b</ul>'


# Queries


@given(st.text(max_size=6000))
def test_any_query_and_its_link_are_parsed_equally(query: str) -> None:
    fields = fields_of(query)
    found = query_of(fields)
    again = query_of(fields_of(link("nodes", found).partition("?")[2]))
    assert again == found
    assert all(len(value) <= 253 for value in fields.values())
    assert found.node == fields.get("node", "")


@pytest.mark.parametrize("start", ["-1", "x", "1e3", "٣", "9" * 20])
def test_an_invalid_page_start_is_the_first_page(start: str) -> None:
    assert query_of({"start": start}).start == 0
    assert query_of({"start": "100"}).start == 100


def test_links_have_only_what_differs_from_the_default() -> None:
    assert link("nodes", Query()) == "nodes"
    assert link("nodes", Query(state="idle", start=100)) == "nodes?state=idle&start=100"
    assert link("device", Query(node="n", plugin="p", unit="a b&c")) == "device?node=n&plugin=p&unit=a%20b%26c"


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
    assert Parsed(html("nodes", cluster(node()), Query(labels=selector))).text.count("labels: found") == 1


def test_terms_are_values() -> None:
    assert selector_terms("a!=b") == (Term("a", "b", negated=True),)


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


def test_the_simulated_fleet_looks_the_same_after_an_hour() -> None:
    start = 1764000000.0
    fleet = SimulatedFleet(60, now=start)

    def shares() -> dict[str, int]:
        units = [unit for node in fleet.cluster().nodes.values() for unit in node.units]
        return {
            "not healthy": sum(unit.phase != "healthy" for unit in units),
            "held": sum(bool(unit.holders) for unit in units),
            "idle": sum(bool(unit.idle_since) for unit in units),
            "all": len(units),
        }

    before = shares()
    for second in range(0, 3600, 5):
        fleet.change(15, now=start + second)
    after = shares()
    assert after["not healthy"] <= 0.07 * after["all"]
    assert after["held"] >= 0.6 * after["all"]
    assert after["idle"] >= max(1, before["idle"] // 3)


async def test_the_simulated_readings_are_those_of_real_agents() -> None:
    names = {each.name for each in vars(families).values() if isinstance(each, Family)}
    fleet = SimulatedFleet(20, now=1764000000)
    for name in fleet.cluster().nodes:
        for device in (await fleet.readings(name)).devices:
            assert {value.name for value in device.values} <= names


async def test_a_power_limit_beside_an_energy_counter_is_in_watts() -> None:
    fleet = SimulatedFleet(5, now=1764000000)
    held = next(each for each in fleet.cluster().nodes["gpu-0000.example.com"].units if each.holders)
    output = text(
        "device",
        fleet.cluster(),
        Query(node="gpu-0000.example.com", plugin="gpu", unit=held.unit),
        readings=await fleet.readings("gpu-0000.example.com"),
    )
    assert "package, sustained150 W" in output
    assert "150 J" not in output


# Requests

TEXTS = st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126), max_size=60)
PATHS = st.sampled_from(
    [
        "/", *(f"/{name}" for name in SCREENS if name != "overview"), "/devices.csv", "/pods.json", "/node.csv",
        "/api/v1/devices", "/login", "/assets/x", "/x",
    ]
)  # fmt: skip


@given(PATHS, TEXTS, st.sampled_from(["GET", "HEAD", "POST"]), st.binary(max_size=100), TEXTS)
def test_any_request_has_a_page_or_an_error(path: str, query: str, method: str, body: bytes, field: str) -> None:
    site = Site(SCREENS_OF_A_SMALL_FLEET, Gate(loopback_only=False))
    fields = dict.fromkeys(("cookie", "host", "origin", "last-event-id", "accept-encoding"), field)
    answer = site(Request(method, path, "", body, query=query, fields=fields))
    found = answer if isinstance(answer, Response) else asyncio.run(_awaited(answer))
    assert found.status in (200, 303, 400, 404, 405)
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
        assert hidden == "./" or hidden.partition("?")[0] in SCREENS


async def _awaited(answer: Coroutine[object, object, T]) -> T:
    return await answer


SCREENS_OF_A_SMALL_FLEET = Screens(SimulatedFleet(5, now=1764000000))
NO_API_SERVER = Access(Client(ClientConfig(server="http://127.0.0.1:1"), field_manager="test").server)


def test_pods_with_enclave_memory_and_no_enclave_are_a_problem_of_their_node() -> None:
    def held(pod: str, *resources: str) -> list[Holder]:
        return [Holder("team", pod, "", f"sgx.intel.com/{each}", 1) for each in resources]

    right = held("a", "epc", "enclave")
    assert summarize(node("n", holders=right)).problems == ()
    (found,) = summarize(node("n", holders=[*right, *held("b", "epc")])).problems
    assert found.text.startswith("1 pod requests sgx.intel.com/epc without an enclave")
    (found,) = summarize(node("n", holders=[*held("b", "epc"), *held("c", "epc")])).problems
    assert found.text.startswith("2 pods request ")
