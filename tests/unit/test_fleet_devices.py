"""What an administrator asks the fleet page about devices: lists, filters, orders, downloads, pods, groups, search."""

import csv
import io
import json

import pytest
from fleetscreens import FLEET, I915, cluster, holder, html, names_of, node, page, text, unit

from accelplane.fleet.model import NodeReadings, Waiting
from accelplane.fleet.simulated import SimulatedFleet
from accelplane.fleet.use import UseHistory
from accelplane.fleet.web.query import Query, ScreenName
from accelplane.fleet.web.screens import SCREENS
from accelplane.report.inventory import Holder
from accelplane.report.readings import DeviceReadings, Value

BAD = {"phase": "unhealthy", "reason": "bus"}
# Each node has a device that the team holds and one that is not healthy; only on b they are the same one.
TEAMS = cluster(
    node("a", unit("card0", holders=(holder("ci", "x"),)), unit("card1", **BAD)),
    node("b", unit("card0", holders=(holder("ci", "y"),), **BAD), unit("card1")),
    node("c", unit("card0", holders=(holder("ml", "z"),), idle_since=100.0), unit("card1", **BAD)),
)


def use(busy: dict[str, float], power: float = 0.0) -> UseHistory:
    """The use of card0 of some nodes, from two readings that are 10 s apart."""
    found = UseHistory()
    for name, share in busy.items():
        for time in (100.0, 110.0):
            values = (
                Value("accelplane_gpu_idle_seconds_total", {"gt": "gt0"}, (time - 100) * (1 - share)),
                Value("accelplane_device_energy_joules_total", {"sensor": "card"}, (time - 100) * power),
                Value("accelplane_device_temperature_celsius", {"sensor": "card"}, 40 + 50 * share),
            )
            found.add(name, NodeReadings(time, (DeviceReadings("gpu", "card0", values=values),)), time + 50)
    return found


def test_filters_apply_to_one_device_and_not_to_different_ones_of_a_node() -> None:
    query = Query(holder="ci/", state="unhealthy")
    assert names_of(page("nodes", TEAMS, query)) == ["b"]
    assert names_of(page("devices", TEAMS, query)) == ["b gpu card0"]
    assert names_of(page("pods", TEAMS, query)) == ["ci/y b"]


def test_idle_or_failing_devices_of_a_team_are_one_question() -> None:
    found = [
        names_of(page("devices", TEAMS, Query(holder=f"{team}/", state="idle,unhealthy"))) for team in ("ci", "ml")
    ]
    assert found == [["b gpu card0"], ["c gpu card0"]]


def test_devices_of_a_node_that_the_filters_do_not_select_are_dimmed() -> None:
    output = html("nodes", TEAMS, Query(holder="ci/"))
    assert output.count('class="cell healthy f0 other"') == 1
    assert output.count('class="cell unhealthy f0 other"') == 1
    assert 'aria-label="gpu card1: unhealthy, free, not selected"' in output


def test_the_numbers_of_a_simulated_fleet_agree_with_its_devices() -> None:
    fleet = SimulatedFleet(100, now=1764000000).cluster()
    expected = {
        f"{found.name} {each.plugin} {each.unit}"
        for found in fleet.nodes.values()
        for each in found.units
        if any(one.namespace == "ci" for one in each.holders) and (each.phase != "healthy" or each.idle_since)
    }
    listing = page("devices", fleet, Query(holder="ci/", state="idle,suspect,unhealthy,recovering")).listing
    assert listing is not None
    assert {f"{row.node.name} {row.unit.plugin} {row.unit.unit}" for row in listing.rows} == expected != set()


@pytest.mark.parametrize(
    ("sort", "expected"),
    [
        ("", ["a", "b", "c"]),
        ("node", ["a", "b", "c"]),
        ("-node", ["c", "b", "a"]),
        ("state", ["a", "b", "c"]),
        ("-state", ["c", "b", "a"]),
        ("age_seconds", ["c", "a", "b"]),
        ("-age_seconds", ["b", "a", "c"]),
        ("idle_seconds", ["b", "a", "c"]),
        ("-idle_seconds", ["a", "b", "c"]),
        ("held_since", ["b", "c", "a"]),
        ("-held_since", ["c", "b", "a"]),
        ("temperature_celsius", ["b", "a", "c"]),
        ("-temperature_celsius", ["a", "b", "c"]),
        ("busy_percent", ["b", "a", "c"]),
        ("-busy_percent", ["a", "b", "c"]),
        ("model", ["c", "b", "a"]),
        ("unknown", ["a", "b", "c"]),
    ],
)
def test_devices_are_sorted_by_any_column_in_both_directions_with_unknown_values_last(
    sort: str, expected: list[str]
) -> None:
    def held(since: float) -> tuple[Holder, ...]:
        return (Holder("team", "p", "main", I915, 1, since),)

    found = cluster(
        node("a", unit(since=50.0, model="z", holders=held(0.0), idle_since=20.0, **BAD)),
        node("b", unit(since=20.0, model="card10", holders=held(30.0), idle_since=90.0, phase="suspect")),
        node("c", unit(since=90.0, model="card9", holders=held(60.0))),
    )
    shown = page("devices", found, Query(sort=sort), use=use({"a": 0.9, "b": 0.2}))
    assert [name.split()[0] for name in names_of(shown)] == expected


def test_the_header_of_the_sorted_column_leads_to_the_other_direction() -> None:
    output = html("devices", TEAMS, Query(sort="-busy_percent", state="held"))
    assert (
        '<th scope="col" aria-sort="descending" class="number"><a href="devices?state=held&amp;sort=busy_percent">'
        in output
    )
    assert '<a href="devices?state=held&amp;sort=-age_seconds">Age</a>' in output


@pytest.mark.parametrize("name", ["overview", "node", "device", "nodes", "pods", "waiting", "namespaces", "groups"])
def test_all_columns_of_all_tables_are_links_that_sort(name: ScreenName) -> None:
    found = cluster(*TEAMS.nodes.values(), waiting=(Waiting("t", "p", 5, {I915: 1}),))
    place = Query(node="a", plugin="gpu", unit="card0")
    query = place if name in ("node", "device") else Query()
    output = html(name, found, query)
    assert output.count('<th scope="col"') == output.count("sort=") > 0


def test_a_table_below_another_one_is_sorted_by_its_own_columns() -> None:
    found = cluster(node("a", unit("card2"), unit("card10"), unit("card1", **BAD)))
    query = Query(node="a", sort="devices.device")
    assert names_of(page("node", found, query), "devices") == ["a gpu card1", "a gpu card2", "a gpu card10"]
    assert names_of(page("node", found, Query(node="a")), "devices")[0] == "a gpu card1"
    assert 'href="node?node=a&amp;sort=-devices.device#devices"' in html("node", found, query)


def test_a_download_has_all_rows_of_the_filters_with_numbers_and_times_without_units() -> None:
    listing = page("devices", TEAMS, Query(state="idle"), use=use({"c": 0.25}, power=80.0)).listing
    assert listing is not None
    (row,) = csv.DictReader(io.StringIO(listing.as_csv().decode()))
    assert (row["node"], row["state"], row["holders"]) == ("c", "healthy", "ml/z")
    assert (row["busy_percent"], row["power_watts"], row["temperature_celsius"]) == ("25.0", "80.0", "52.5")
    assert (row["idle_seconds"], row["ids"], row["held_ids"]) == ("60", "2", "1")
    assert row["held_since"] == "2025-11-24T16:00:00Z"
    document = json.loads(listing.as_json())
    assert (document["apiVersion"], document["kind"]) == ("accelplane/v1", "FleetDevicesTable")
    (item,) = document["items"]
    assert (item["busy_percent"], item["idle_seconds"], item["numa"]) == (25.0, 60, 0)


def test_downloads_hide_names_and_contain_no_formulas() -> None:
    found = cluster(node("a", unit(model="=HYPERLINK(1)", holders=(holder("secret", "pod"),))))
    listing = page("devices", found, visible=lambda _space: False).listing
    assert listing is not None
    content = listing.as_csv().decode()
    assert "secret" not in content
    assert "'=HYPERLINK(1)" in content


@pytest.mark.parametrize("name", [name for name in SCREENS if name not in ("overview", "node", "device", "search")])
def test_links_of_downloads_have_the_filters(name: ScreenName) -> None:
    output = html(name, TEAMS, Query(state="idle", sort="x", start=3))
    assert f'href="{name}.csv?state=idle&amp;sort=x"' in output
    assert f'href="{name}.json?state=idle&amp;sort=x"' in output


# Pods


def test_a_pod_is_idle_since_the_last_one_of_its_devices_is_and_not_while_one_works() -> None:
    pod = (holder("ml", "job"),)
    found = cluster(
        node("a", unit("card0", holders=pod, idle_since=40.0), unit("card1", holders=pod, idle_since=100.0)),
        node("b", unit("card0", holders=(holder("ml", "half"),), idle_since=10.0),
             unit("card1", holders=(holder("ml", "half"),))),
    )  # fmt: skip
    listing = page("pods", found).listing
    assert listing is not None
    first, second = listing.records()
    assert (first["pod"], first["devices"], first["idle_seconds"], first["idle_devices"]) == ("ml/job", 2, 60, 2)
    assert (second["pod"], second["devices"], second["idle_seconds"], second["idle_devices"]) == ("ml/half", 2, None, 1)


# Groups


def test_devices_are_grouped_by_a_node_label_and_its_counts_lead_to_them() -> None:
    zone = "topology.kubernetes.io/zone"
    nodes = (
        node("a", unit(holders=(holder(),)), unit("card1"), labels={zone: "x", "rack": "1"}),
        node("b", unit(**BAD), labels={zone: "x", "rack": "2"}),
        node("c", unit(holders=(holder(),), idle_since=5.0), labels={"rack": "2"}),
    )
    listing = page("groups", cluster(*nodes)).listing
    assert listing is not None
    counts = [(each["value"], each["nodes"], each["devices"], each["held_devices"]) for each in listing.records()]
    assert counts == [("x", 2, 3, 1), (None, 1, 1, 1)]
    output = html("groups", cluster(*nodes), Query(group="rack", family="gpu"))
    assert '<a href="devices?family=gpu&amp;state=unhealthy&amp;labels=rack%3D2">1</a>' in output
    assert "rack (3 nodes)" in output


# Search


def test_one_search_finds_nodes_devices_and_pods() -> None:
    waiting = (Waiting("ml", "b-waits", 5, {I915: 1}),)
    found = cluster(*TEAMS.nodes.values(), waiting=waiting)
    assert names_of(page("search", found, Query(text="b")), "nodes") == ["b"]
    assert len(names_of(page("search", found, Query(text="card1")), "devices")) == 3
    assert names_of(page("search", found, Query(text="ci/")), "pods") == ["ci/x a", "ci/y b"]
    assert names_of(page("search", found, Query(text="B-WAITS")), "waiting") == ["ml/b-waits"]
    assert names_of(page("search", found, Query(text="waits"), lambda _space: False), "waiting") == [""]
    assert "Enter a part of a name." in text("search", found)


# Use


def test_the_use_of_a_device_is_shown_with_heat_and_a_plot_of_the_last_hour() -> None:
    history = UseHistory()
    for minute in range(3):
        values = (
            Value("accelplane_gpu_idle_seconds_total", {"gt": "gt0"}, 15.0 * minute),
            Value("accelplane_device_power_watts", {"sensor": "card"}, 100.0 + minute),
            Value("accelplane_device_power_limit_watts", {"sensor": "card", "limit": "sustained"}, 150.0),
        )
        history.add("a", NodeReadings(60.0 * minute, (DeviceReadings("gpu", "card0", values=values),)), 60.0 * minute)
    found = cluster(node("a", unit()))
    place = Query(node="a", plugin="gpu", unit="card0")
    assert '<td data-label="Busy" class="number use heat3">75%</td>' in html("node", found, place, use=history)
    output = html("device", found, place, use=history)
    assert "102 W of 150 W" in output
    assert 'aria-label="Busy in the last hour: 75 % to 75 %"' in output
    assert 'aria-label="Power in the last hour: 100 W to 102 W"' in output
    assert "<svg" not in html("device", found, place)


# Grafana


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("overview", "https://g/d/accelplane-fleet"),
        ("node", "https://g/d/accelplane-node?var-node=a"),
        ("device", "https://g/d/accelplane-node?var-node=a&amp;var-plugin=gpu&amp;var-device=card0"),
    ],
)
def test_cluster_node_and_device_lead_to_their_dashboards(name: ScreenName, address: str) -> None:
    query = Query() if name == "overview" else Query(node="a", plugin="gpu", unit="card0")
    assert f'href="{address}"' in html(name, TEAMS, query, grafana_url="https://g/")
    assert ("Open in Grafana" in text(name, TEAMS, query, grafana_url="https://g/{device}")) is (name == "device")


def test_devices_without_an_agent_are_no_rows_but_their_nodes_are() -> None:
    assert names_of(page("nodes", FLEET, Query(state="no-agent,unanswered", sort="name"))) == ["d", "e"]
    assert names_of(page("devices", FLEET, Query(state="no-agent"))) == [""]
