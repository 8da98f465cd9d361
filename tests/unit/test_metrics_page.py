"""The metrics page: limits, labels of holders and of the node, and text that a strict parser accepts."""

from collections.abc import Iterable, Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from textformat import Family, parse

from accelplane.devices import CdiDevice, Device, Inventory, Phase
from accelplane.host import Host
from accelplane.kubelet.podresources import ClaimHolder, DeviceHolder
from accelplane.kubelet.server import Stage
from accelplane.node.settings import ConfigurationError, Settings
from accelplane.node.status import NodeStatus, PluginStatus, ResourceStatus, UnitHealth
from accelplane.pages.current_values import document
from accelplane.pages.device_reader import DeviceReader
from accelplane.pages.hardware_metrics import held_units
from accelplane.pages.holders import Holders
from accelplane.pages.measurements import Measurements
from accelplane.pages.metrics import Contents, MetricsPage, PageOptions
from accelplane.pages.readings import NodeReadings
from accelplane.plugins import Plugin, Sample
from accelplane.plugins.base import Config
from accelplane.readings import DevicePlan, Source, Value
from accelplane.readings import Family as ReadingFamily
from accelplane.readings.families import TEMPERATURE
from accelplane.readings.values import labels, scalar
from accelplane.report.readings import CurrentValues

RESOURCE = "x.example.com/r"


def node(units: int = 2, shares: int = 2, **counts: object) -> NodeStatus:
    devices = {
        f"u{unit}-{share}": Device(resource="r", id=f"u{unit}-{share}", unit=f"u{unit}")
        for unit in range(units)
        for share in range(shares)
    }
    resource = ResourceStatus(name=RESOURCE, stage=Stage.REGISTERED, devices=devices)
    plugin = PluginStatus(name="p", namespace="x.example.com", resources={"r": resource})
    return NodeStatus(version="1", root="/", kubelet_dir="/k", plugins={"p": plugin}, **counts)  # type: ignore[arg-type]


def readings(units: int = 2) -> NodeReadings:
    """One temperature of each unit."""
    source = Source(path="/proc/sys/kernel/pid_max", parse=scalar(TEMPERATURE, extra='sensor="s"'))
    plans = [
        DevicePlan(device=f"d{unit}", units=(f"u{unit}",), bdf=f"0000:{unit:02x}:00.0", sources=(source,))
        for unit in range(units)
    ]
    found = [DeviceReader("p", plan).read(Host(), "auto", 0.0, held=True) for plan in plans]
    return NodeReadings(found, {"p": {"ok": 1}}, {"p": plans})


def holding(*rows: tuple[str, str]) -> Holders:
    """Pods, each with the IDs that it holds, separated by blanks."""
    found = [DeviceHolder("n", pod, "c", RESOURCE, tuple(ids.split())) for pod, ids in rows]
    return Holders(found, "podresources", since={("n", pod, "c", RESOURCE): 5.0 for pod, _ in rows})


def render(options: PageOptions, contents: Contents, status: NodeStatus | None = None) -> dict[str, Family]:
    return parse(MetricsPage(options).render(status or node(), contents))


SHARED = holding(("a", "u0-0"), ("b", "u0-1"), ("c", "u1-0 u1-1"))


def test_each_resource_of_a_unit_has_the_device_of_the_unit() -> None:
    """The third unit has no resource yet, as while the agent starts."""
    status = node(units=2)
    plugin = status.plugins["p"]
    more = ResourceStatus(name="x.example.com/m", devices={"u0": Device(resource="m", id="u0")})
    status = replace(status, plugins={"p": replace(plugin, resources={**plugin.resources, "m": more})})
    found = render(PageOptions(), Contents(readings=readings(3)), status)["accelplane_unit_info"]
    assert [sample.labels for sample in found.samples] == [
        {"plugin": "p", "unit": unit, "device": f"d{unit[1]}", "bdf": f"0000:0{unit[1]}:00.0"} | resource
        for unit, resource in (
            ("u0", {"resource": RESOURCE}),
            ("u0", {"resource": "x.example.com/m"}),
            ("u1", {"resource": RESOURCE}),
        )
    ]


@pytest.mark.parametrize("prefix", ["", "holder_"])
def test_attach_adds_the_pod_to_samples_of_devices_with_one_holder(prefix: str) -> None:
    contents = Contents(readings=readings(), holders=SHARED)
    for mode in ("join", "attach", "off"):
        found = render(PageOptions(holders=mode, holder_labels=prefix), contents)
        temperatures = {each.labels["device"]: each.labels for each in found[TEMPERATURE.name].samples}
        pods = {device: labels.get(f"{prefix}pod") for device, labels in temperatures.items()}
        assert pods == {"d0": None, "d1": "c" if mode == "attach" else None}
        assert all("pod" not in each.labels for each in found["accelplane_device_info"].samples)
        assert ("accelplane_container_devices" in found) == (mode != "off")
        if mode != "off":
            samples = found["accelplane_container_devices"].samples
            assert {(each.labels[f"{prefix}pod"], each.labels["unit"], each.value) for each in samples} == {
                ("a", "u0", 1),
                ("b", "u0", 1),
                ("c", "u1", 2),
            }
            since = found["accelplane_container_held_since_timestamp_seconds"].samples
            assert {each.labels[f"{prefix}namespace"] for each in since} == {"n"}


def test_attach_adds_the_pod_to_counters_of_events() -> None:
    contents = Contents(readings=readings(), holders=SHARED)
    found = render(PageOptions(holders="attach"), contents, node(wedged={"0000:01:00.0": 1}))
    for name in ("accelplane_pci_recoveries_total", "accelplane_gpu_wedged_total"):
        pods = {(each.labels["device"], each.labels.get("pod")) for each in found[name].samples}
        assert pods - {("d0", None)} == {("d1", "c")}


def test_claims_name_the_holders_of_the_units_of_their_cdi_devices() -> None:
    """A claim is shared by two containers, and one has a device of another driver."""
    names = ("example.com/r=u0",)
    claims = [
        ClaimHolder("n", "a", "c", "dra.example.com", "pool", "u0", names),
        ClaimHolder("n", "b", "c", "dra.example.com", "pool", "u0", names),
        ClaimHolder("n", "c", "c", "dra.example.com", "pool", "u1", ("example.com/r=u1",)),
        ClaimHolder("n", "c", "c", "other.example.com", "pool", "x", ("example.com/x=u1",)),
    ]
    status = node()
    resource = status.plugins["p"].resources["r"]
    devices = {
        id_: replace(device, cdi=CdiDevice(kind="example.com/r", name=device.unit))
        for id_, device in resource.devices.items()
    }
    plugin = replace(status.plugins["p"], resources={"r": replace(resource, devices=devices)})
    status = replace(status, plugins={"p": plugin})
    holders = replace(holding(("d", "u1-0")), claims=claims)
    found = render(PageOptions(holders="attach"), Contents(readings=readings(), holders=holders), status)
    samples = [each.labels for each in found["accelplane_container_devices"].samples]
    assert {(each["pod"], each["unit"], each["bdf"], each["resource"], each.get("via")) for each in samples} == {
        ("a", "u0", "0000:00:00.0", "dra.example.com", "dra"),
        ("b", "u0", "0000:00:00.0", "dra.example.com", "dra"),
        ("c", "u1", "0000:01:00.0", "dra.example.com", "dra"),
        ("d", "u1", "0000:01:00.0", RESOURCE, None),
    }
    assert [each.value for each in found["accelplane_resource_allocated"].samples] == [1]
    # Both units have two holders, by a claim or not.
    assert all("pod" not in each.labels for each in found[TEMPERATURE.name].samples)
    assert held_units(status, holders) == {("p", "u0"), ("p", "u1")}
    holders = replace(holding(), claims=claims[2:])
    found = render(PageOptions(holders="attach"), Contents(readings=readings(), holders=holders), status)
    assert {each.labels.get("pod") for each in found[TEMPERATURE.name].samples} == {None, "c"}


def test_ids_of_ended_pods_are_counted_if_the_kubelet_answers() -> None:
    holders = msgspec.structs.replace(holding(("a", "card0-0")), stale=2)
    [stale] = render(PageOptions(), Contents(readings=readings(), holders=holders))[
        "accelplane_holders_stale_ids"
    ].samples
    assert (stale.labels, stale.value) == ({}, 2)
    found = render(PageOptions(), Contents(readings=readings(), holders=Holders(source="checkpoint")))
    assert "accelplane_holders_stale_ids" not in found


def test_the_node_label_is_on_every_sample() -> None:
    found = render(PageOptions(node='n"1'), Contents(readings=readings(), holders=SHARED))
    assert {each.labels.get("node") for family in found.values() for each in family.samples} == {'n"1'}


def test_events_are_shown_for_the_device_that_they_are_about() -> None:
    counts = {"recoveries": {("0000:01:00.0", "failed"): 2}, "wedged": {"0000:00:00.0": 1}}
    found = render(PageOptions(), Contents(readings=readings()), node(**counts))
    recoveries = {
        (each.labels["device"], each.labels["outcome"]): each.value
        for each in found["accelplane_pci_recoveries_total"].samples
    }
    assert recoveries == {
        ("d0", "began"): 0,
        ("d0", "succeeded"): 0,
        ("d0", "failed"): 0,
        ("d1", "began"): 0,
        ("d1", "succeeded"): 0,
        ("d1", "failed"): 2,
    }
    [wedged] = found["accelplane_gpu_wedged_total"].samples
    assert (wedged.labels, wedged.value) == ({"plugin": "p", "device": "d0", "bdf": "0000:00:00.0"}, 1)


def test_gpus_that_were_never_wedged_have_a_count_of_zero() -> None:
    found = readings()
    gpus = NodeReadings(found.devices, found.outcomes, {"gpu": found.plans["p"]})
    samples = render(PageOptions(), Contents(readings=gpus))["accelplane_gpu_wedged_total"].samples
    assert {each.labels["device"]: each.value for each in samples} == {"d0": 0, "d1": 0}


def test_pods_whose_names_differ_beyond_the_length_of_a_label_are_one_sample() -> None:
    names = ("p" * 200 + "a", "p" * 200 + "b")
    holders = holding((names[0], "u0-0"), (names[1], "u0-1"))
    found = render(PageOptions(), Contents(readings=readings(), holders=holders))
    for name in ("accelplane_container_devices", "accelplane_container_held_since_timestamp_seconds"):
        assert [each.labels["pod"] for each in found[name].samples] == ["p" * 128]


def test_a_page_over_the_limit_omits_the_last_metric_families() -> None:
    samples = [Sample(name, "h", {"i": str(i)}, i) for name in ("first_x", "last_x") for i in range(150)]
    contents = Contents(samples=samples, readings=readings(), holders=SHARED, dropped={("p", "invalid-name"): 4})
    page = MetricsPage(PageOptions(max_samples=250))
    for times in (1, 2):
        found = parse(page.render(node(), contents))
        assert len(found["first_x"].samples) == 150
        assert "last_x" not in found
        assert "accelplane_container_devices" in found
        dropped = {(each.labels["plugin"], each.labels["cause"]): each.value for each in found[DROPPED].samples}
        assert dropped == {("", "limit"): 150 * times, ("p", "invalid-name"): 4}
    found = render(PageOptions(max_samples=100), contents)
    assert "first_x" not in found
    many = Contents(readings=readings(200))
    found = render(PageOptions(max_samples=350), many, node(200))
    assert TEMPERATURE.name not in found
    assert {each.labels["plugin"] for each in found[DROPPED].samples} == {"p"}


def test_a_page_has_at_most_the_configured_number_of_samples() -> None:
    """The samples that count what is left out are included."""
    samples = [Sample(f"x{name}", "h", {}, 1) for name in range(20)]
    contents = Contents(samples=samples, readings=readings(40), holders=SHARED)
    for limit in range(100, 350):
        found = render(PageOptions(max_samples=limit), contents, node(40))
        assert sum(len(family.samples) for family in found.values()) <= limit


DROPPED = "accelplane_samples_dropped_total"


class Third(Plugin[Config]):
    """Returns the measurements that a test sets."""

    namespace = "x.example.com"

    def __init__(self, samples: Iterable[Sample]) -> None:
        super().__init__()
        self.samples = samples

    def measure(self, host: Host, devices: Iterable[Device]) -> Iterator[Sample]:
        yield from self.samples


def endless() -> Iterator[Sample]:
    while True:
        yield Sample("third_x", "h", {}, 1)


@pytest.mark.parametrize(
    ("samples", "kept", "dropped"),
    [
        ([Sample("third_x", "h", {"i": str(i)}, i) for i in range(20_000)], 0, {"limit": 20_000}),
        ([Sample(f"third_{n}", "h", {"i": str(i)}, i) for n in "ab" for i in range(1500)], 1500, {"limit": 1500}),
        ([Sample("accelplane_devices", "h", {}, 1)], 0, {"invalid-name": 1}),
        ([Sample("process_cpu_seconds_total", "h", {}, 1)], 0, {"invalid-name": 1}),
        ([Sample("accelplane_sgx_epc_bytes", "h", {}, 1)], 1, {}),
        ([Sample("third x", "h", {}, 1)], 0, {"invalid-name": 1}),
        ([Sample("third_x", "h", {"a-b": ""}, 1)], 0, {"invalid-name": 1}),
        ([Sample("third_x", "h", {}, "1")], 0, {"invalid-value": 1}),  # type: ignore[arg-type]
        (endless(), 0, {"limit": 20_001}),
    ],
    ids=["many", "families", "ours", "process", "sgx", "name", "label", "value", "endless"],
)
async def test_measurements_of_a_plugin_are_limited_and_valid(
    samples: Iterable[Sample], kept: int, dropped: dict[str, int]
) -> None:
    plugin = Third(samples)
    measurements = Measurements(lambda: {"third": (plugin, Inventory())}, "/")
    try:
        found = await measurements.take()
    finally:
        await measurements.close()
    assert len(found) == kept
    assert dict(measurements.dropped) == {("third", cause): count for cause, count in dropped.items()}
    contents = Contents(samples=found, dropped=measurements.dropped)
    assert sum(len(family.samples) for name, family in render(PageOptions(), contents).items() if "third" in name) in (
        kept,
        0,
    )


def read(plugin: str, *values: Value) -> NodeReadings:
    """The device `d0` of a plugin, of which a plan of another project makes these values."""
    source = Source(path="/proc/version", parse=lambda _text: values)
    plan = DevicePlan(device="d0", units=("u0",), sources=(source,))
    return NodeReadings([DeviceReader(plugin, plan).read(Host(), "auto", 0.0, held=True)], {}, {plugin: [plan]})


OTHER = ReadingFamily("third_x", "X.")


@pytest.mark.parametrize(
    ("values", "kept", "dropped"),
    [
        ([Value(OTHER, f'i="{i}"', i) for i in range(20_000)], 0, {"limit": 20_000}),
        (
            [Value(ReadingFamily(f"third_{n}", "h"), f'i="{i}"', i) for n in "ab" for i in range(1500)],
            1500,
            {"limit": 1500},
        ),
        ([Value(ReadingFamily("accelplane_devices", "h"), "", 1)], 0, {"invalid-name": 1}),
        ([Value(ReadingFamily("process_start_time_seconds", "h"), "", 1)], 0, {"invalid-name": 1}),
        ([Value(OTHER, "", 1), Value(ReadingFamily("third_x", "Other."), "", 1)], 1, {"invalid-name": 1}),
        ([Value(OTHER, 'a b="c"', 1), Value(OTHER, 'a="b"', 1)], 1, {"invalid-name": 1}),
        ([Value(OTHER, 'device="x"', 1)], 0, {"invalid-name": 1}),
        ([Value(OTHER, labels(a='"\\\n{},=" \u2028'), 1)], 1, {}),
    ],
    ids=["many", "families", "ours", "process", "help", "label", "twice", "text"],
)
def test_readings_of_other_projects_are_limited_and_valid(
    values: list[Value], kept: int, dropped: dict[str, int]
) -> None:
    found = render(PageOptions(), Contents(readings=read("third", *values)))
    assert sum(len(family.samples) for name, family in found.items() if name.startswith("third_")) == kept
    samples = found[DROPPED].samples if DROPPED in found else ()
    assert {each.labels["cause"]: each.value for each in samples if each.labels["plugin"] == "third"} == dropped
    assert "accelplane_device_info" in found


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_readings_that_are_no_json_numbers_are_left_out_of_the_current_values(number: float) -> None:
    found = read("third", Value(OTHER, "", number), Value(OTHER, 'a="b"', 2))
    [plugin] = msgspec.json.decode(document(found, 1.0), type=CurrentValues).plugins
    assert [(each.name, each.value) for each in plugin.devices[0].values] == [("third_x", 2)]


def test_labels_of_other_projects_with_the_names_of_added_labels_stay() -> None:
    values = [Value(OTHER, 'pod="x",node="y"', 1), Value(OTHER, labels(text=',node="'), 2)]
    contents = Contents(
        readings=read("p", *values),
        holders=holding(("a", "u0-0")),
        samples=[Sample("measured_x", "h", {"node": "other"}, 1)],
    )
    found = render(PageOptions(holders="attach", node="n1"), contents)
    own = {"plugin": "p", "device": "d0"}
    assert [each.labels for each in found["third_x"].samples] == [
        {**own, "pod": "x", "node": "y"},
        {**own, "text": ',node="', "namespace": "n", "pod": "a", "container": "c", "node": "n1"},
    ]
    assert [each.labels for each in found["measured_x"].samples] == [{"node": "other"}]
    assert [each.labels["node"] for each in found["accelplane_container_devices"].samples] == ["n1"]


def test_a_measured_family_with_the_name_of_a_read_one_is_left_out() -> None:
    contents = Contents(readings=read("p", Value(OTHER, "", 1)), samples=[Sample("third_x", "h", {"a": "1"}, 2)])
    found = render(PageOptions(), contents)
    assert [each.value for each in found["third_x"].samples] == [1]
    assert [(each.labels["cause"], each.value) for each in found[DROPPED].samples] == [("invalid-name", 1)]


@pytest.mark.parametrize("name", ["model-name", "1x", "__x", "plugin", "bdf"])
def test_facts_of_a_device_have_valid_names(name: str) -> None:
    with pytest.raises(ValueError, match=f"^fact '{name}': expected letters"):
        DevicePlan(device="d", units=("u",), facts={name: "x"})


def test_families_and_labels_of_readings_have_valid_names() -> None:
    with pytest.raises(ValueError, match="metric name 'a b': expected letters"):
        ReadingFamily("a b", "h")
    with pytest.raises(ValueError, match="metric a: found kind 'histogram', expected counter or gauge"):
        ReadingFamily("a", "h", "histogram")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label 'a-b': expected letters"):
        labels(**{"a-b": "x"})


def test_the_health_of_units_counts_for_the_limit_of_a_page() -> None:
    status = node()
    health = {f"u{unit}": UnitHealth(phase=Phase.HEALTHY) for unit in range(100)}
    status = replace(status, plugins={"p": replace(status.plugins["p"], health=health)})
    found = render(PageOptions(max_samples=300), Contents(readings=readings(), holders=SHARED), status)
    assert sum(len(family.samples) for family in found.values()) <= 300 + 1
    assert "accelplane_unit_health" not in found
    assert {each.labels["plugin"] for each in found[DROPPED].samples} == {"p", ""}
    assert "accelplane_registered" in found


def test_equal_samples_are_shown_once() -> None:
    samples = [Sample("third_x", "h", {"a": "1"}, value) for value in (1, 2)]
    [sample] = render(PageOptions(), Contents(samples=samples))["third_x"].samples
    assert sample.value == 1


def test_equal_states_give_equal_pages() -> None:
    contents = Contents(readings=readings(), holders=SHARED)
    pages = [MetricsPage().render(node(), contents) for _ in range(2)]
    first, second = ([line for line in page.split(b"\n") if b"process_" not in line] for page in pages)
    assert first == second


TEXTS = st.text(max_size=300) | st.sampled_from(['a"b', "a\\", "a\nb", "\ud800", "\u202ex", "x" * 300])


@pytest.mark.untraced
@given(TEXTS, TEXTS, TEXTS, st.sampled_from(["join", "attach"]))
def test_names_of_pods_cannot_break_the_page(pod: str, container: str, sample: str, mode: str) -> None:
    rows = [
        DeviceHolder(pod, pod, container, RESOURCE, ("u0-0",)),
        DeviceHolder("n", f"{pod}2", container, RESOURCE, ("u1-0",)),
    ]
    samples = [Sample("third_x", sample, {"a": sample}, 1.0)]
    contents = Contents(readings=readings(), holders=Holders(rows[:1], "podresources"), samples=samples)
    found = render(PageOptions(holders=mode, node=pod[:20]), contents)
    assert len(found["accelplane_container_devices"].samples) == 1
    assert len(found["third_x"].samples) == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"metrics-holders": "all"}, "metrics-holders: found 'all', expected one of join, attach, off"),
        ({"metrics-waking": "no"}, "metrics-waking: found 'no', expected one of auto, always, never"),
        ({"metrics-max-samples": 99}, "metrics-max-samples: found 99, expected 100 to 1000000"),
        ({"metrics-min-interval": 61.0}, "metrics-min-interval: found 61, expected 0 to 60 seconds"),
        ({"metrics-holder-labels": "A-"}, "metrics-holder-labels: found 'A-', expected at most 32 lower-case"),
    ],
)
def test_invalid_options_of_metrics_are_rejected(options: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Settings.of(options, "-")
    assert problem in str(error.value)
