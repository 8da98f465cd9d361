"""promtool accepts the agent's metrics page with everything on it, and with hostile texts of files, names and pods."""

import math
from collections.abc import Mapping

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus import promtool
from thoroughness import examples

from accelplane.devices import Device, Phase
from accelplane.kubelet.podresources import DeviceHolder
from accelplane.node.status import NodeStatus, PluginStatus, ResourceStatus, UnitHealth
from accelplane.pages import metrics
from accelplane.pages.device_reader import DeviceReading
from accelplane.pages.holders import Holders
from accelplane.pages.readings import NodeReadings
from accelplane.pages.server import PageCounts
from accelplane.plugins import Sample
from accelplane.readings import DevicePlan, families
from accelplane.readings.values import labels

TEXTS = st.text(max_size=200) | st.sampled_from(['"}\n', "\\", "a\nb", "\x00\x7f", "\u202e", "\ud800", "x" * 4000, ""])
VALUES = st.floats(allow_nan=False) | st.sampled_from([math.inf, -math.inf, 0.0, 1e308, 5e-324])


def page(text: str, value: float, others: Mapping[str, str]) -> bytes:
    """A page with a sample of every family, whose labels have a text."""
    name = "gpu.intel.com/i915"
    device = Device(resource="i915", id=text, unit=text)
    plugin = PluginStatus(
        name="gpu",
        namespace="gpu.intel.com",
        resources={"i915": ResourceStatus(name=name, devices={text: device})},
        health={text: UnitHealth(phase=Phase.UNHEALTHY), "card1": UnitHealth(phase=Phase.HEALTHY)},
        failures={"other": 1, "temperature": 2},
    )
    status = NodeStatus(version=text, root="/", kubelet_dir="", plugins={"gpu": plugin}, uevents={"": 1, "pci": 2})
    key = (text, f"{text}-0", "main", name)
    holders = Holders([DeviceHolder(*key, (text,))], "podresources", since={key: 1.0}, allocatable={name: 1})
    extra = labels(plugin="gpu", device=text, **others)
    lines = {family: [f"{family.name}{{{extra}}} {value!r}"] for family in families.FAMILIES}
    plan = DevicePlan(device=text, units=(text,), sources=())
    readings = NodeReadings([DeviceReading(lines, {})], {"gpu": {"ok": 1, "missing": 2}}, {"gpu": [plan]})
    samples = [Sample("fpga_ports", "Published ports.", {"device": text}, value)]
    counts = PageCounts()
    counts.record("metrics", 0.1)
    contents = metrics.Contents(
        samples=samples, readings=readings, holders=holders, requests={("List", "ok"): 1, ("List", "error"): 2}
    )
    return metrics.MetricsPage().render(status, contents, counts.families())


def test_promtool_finds_nothing_to_improve_on_a_page_with_all_families() -> None:
    text = page("card0", 1.0, {"sensor": "card"}).decode()
    assert promtool("check", "metrics", text=text) == ""


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(TEXTS, VALUES, st.dictionaries(st.sampled_from(["sensor", "reason", "gt"]), TEXTS))
def test_promtool_accepts_a_page_with_any_text_and_value(text: str, value: float, others: dict[str, str]) -> None:
    promtool("check", "metrics", text=page(text, value, others).decode())
