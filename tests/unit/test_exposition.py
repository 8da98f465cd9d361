"""The Prometheus text format, compared with prometheus-client's parser and process collector."""

import math
import os
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from accelplane.node.status import NodeStatus
from accelplane.pages import metrics
from accelplane.pages.exposition import Family, render

# A lone surrogate cannot be encoded; see the test of its own.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NAMES = st.text(string.ascii_letters + string.digits, max_size=5).map(lambda text: f"n{text}")


def parsed(page: bytes) -> dict[str, tuple[str, str, list[tuple[str, dict[str, str], float]]]]:
    """Type, help and samples by family, as the reference implementation reads them."""
    return {
        family.name: (
            family.type, family.documentation, [(each.name, each.labels, each.value) for each in family.samples],
        )
        for family in text_string_to_metric_families(page.decode())
    }  # fmt: skip


@given(TEXTS, st.dictionaries(NAMES, TEXTS, max_size=3), st.floats(allow_nan=False))
def test_any_text_and_value_is_read_back_by_the_reference_parser(
    description: str, labels: dict[str, str], value: float
) -> None:
    family = Family("x_total", description, "counter")
    family.add(value, labels)
    kind, help_text, samples = parsed(render([family]))["x"]
    visible = {name: "".join(c if c.isprintable() else "?" for c in text) for name, text in labels.items()}
    visible = {name: text.encode(errors="replace")[:128].decode(errors="ignore") for name, text in visible.items()}
    assert (kind, samples) == ("counter", [("x_total", visible, value)])
    # The parser strips the help text.
    assert help_text == description.strip() or help_text.strip() == description.strip()


def test_nan_and_an_unencodable_label_are_read_back() -> None:
    family = Family("x", "Text.")
    family.add(math.nan, {"file": os.fsdecode(b"a\xff")})
    _, _, [(_, labels, value)] = parsed(render([family]))["x"]
    assert labels == {"file": "a?"}
    assert math.isnan(value)


def test_a_histogram_has_cumulative_buckets_a_count_and_a_sum() -> None:
    family = Family("x_seconds", "Text.", "histogram")
    family.add_histogram((0.5, 1.0), (2, 0, 1), 4.5, {"a": "b"})
    assert parsed(render([family])) == {
        "x_seconds": (
            "histogram",
            "Text.",
            [
                ("x_seconds_bucket", {"a": "b", "le": "0.5"}, 2.0),
                ("x_seconds_bucket", {"a": "b", "le": "1.0"}, 2.0),
                ("x_seconds_bucket", {"a": "b", "le": "+Inf"}, 3.0),
                ("x_seconds_count", {"a": "b"}, 3.0),
                ("x_seconds_sum", {"a": "b"}, 4.5),
            ],
        )
    }


@pytest.mark.parametrize("name", ["", "0x", "a-b", "ä", "a\n"])
def test_an_invalid_metric_name_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="metric name"):
        Family(name, "Text.")


@pytest.mark.parametrize("name", ["", "0x", "a:b", "__a", "ä", 'a"'])
def test_an_invalid_label_name_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="label"):
        Family("x", "Text.").add(1, {name: ""})


def test_process_metrics_equal_those_of_the_reference_collector() -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    page = metrics.MetricsPage().render(NodeStatus(version="1", root="/", kubelet_dir="/k"), metrics.Contents())
    actual = {name: found for name, found in parsed(page).items() if name.startswith("process_")}
    reference = parsed(generate_latest(registry))
    assert {name: found[:1] for name, found in actual.items()} == {name: found[:1] for name, found in reference.items()}

    def value(page: dict[str, tuple[str, str, list[tuple[str, dict[str, str], float]]]], name: str) -> float:
        return page[name][2][0][2]

    assert value(actual, "process_max_fds") == value(reference, "process_max_fds")
    # The reference's start time has the precision of a second, and of a clock tick.
    for name, tolerance in (("start_time_seconds", 2), ("open_fds", 2), ("cpu_seconds", 2)):
        found, expected = value(actual, f"process_{name}"), value(reference, f"process_{name}")
        assert abs(found - expected) <= tolerance, name
    for name in ("virtual", "resident"):
        found, expected = (value(page, f"process_{name}_memory_bytes") for page in (actual, reference))
        assert found == pytest.approx(expected, rel=0.2)
