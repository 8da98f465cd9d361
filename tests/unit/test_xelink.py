"""The Xe-Link topology from XPU Manager's metrics, as labels."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.nodelabels import labelvalues
from accelplane.nodelabels.xelink import Link, PageError, labels, links

ENDS = {"local_device_id": "0", "local_subdevice_id": "0", "remote_device_id": "1", "remote_subdevice_id": "0"}
LINK = {**ENDS, "local_on_subdevice": "true", "lane_count": "4"}


def sample(value: str = "1", name: str = "xpum_topology_link", **changes: str | None) -> str:
    pairs = ",".join(f'{key}="{text}"' for key, text in {**LINK, **changes}.items() if text is not None)
    return f"{name}{{{pairs}}} {value}\n"


def found(page: str, **options: bool) -> list[Link]:
    return links(page + "\n", **options)


def test_a_link_has_two_ends_and_lanes() -> None:
    page = "# HELP xpum_topology_link Links\n# TYPE xpum_topology_link gauge\n" + sample(remote_subdevice_id="7")
    assert found(page) == [Link((0, 0), (1, 7), 4)]


@pytest.mark.parametrize("value", ["1", "1.0", "+1e0", "1 1700000000000", "\t 1"])
def test_the_value_of_a_link_is_exactly_one(value: str) -> None:
    assert len(found(sample(value))) == 1


@pytest.mark.parametrize("value", ["0", "2", "1.1", "NaN", "+Inf", "-1"])
def test_a_sample_with_another_value_is_no_link(value: str) -> None:
    assert found(sample(value)) == []


@pytest.mark.parametrize(
    "changes",
    [
        *({name: None} for name in (*ENDS, "lane_count")),
        *({name: text} for name in (*ENDS, "lane_count") for text in ("", "-1", "x", "1.0", " 1", "1" * 30)),
        {"local_on_subdevice": "false"},
        {"local_on_subdevice": ""},
    ],
)
def test_an_incomplete_sample_is_ignored(changes: dict[str, str | None]) -> None:
    assert found(sample(**changes) + sample()) == found(sample())


def test_the_older_name_of_the_number_of_lanes_is_known() -> None:
    assert found(sample(lane_count=None, lan_count="8")) == [Link((0, 0), (1, 0), 8)]


def test_links_without_sub_devices_can_be_allowed() -> None:
    assert found(sample(local_on_subdevice=None)) == found(sample())
    assert len(found(sample(local_on_subdevice="false"), allow_subdeviceless=True)) == 1


@pytest.mark.parametrize(
    ("kind", "count"), [("gauge", 1), ("untyped", 1), ("GAUGE", 1), ("counter", 0), ("summary", 0)]
)
def test_only_gauges_and_untyped_metrics_are_links(kind: str, count: int) -> None:
    assert len(found(f"# TYPE xpum_topology_link {kind}\n" + sample())) == count


def test_other_metrics_and_comments_are_ignored() -> None:
    page = (
        "# a comment\n#\n\n# HELP go_info x\n# TYPE go_info gauge\n"
        'go_info{version="a\\"b\\\\c\\nd é",} 1 17\n process_cpu_seconds_total 0.5\n'
        'latency_bucket{le="+Inf"} 3\nempty{} 1\nspaces { a = "b" , c = "d" } 1\n'
    )
    assert len(found(page + sample() + page.replace("# HELP go_info x\n# TYPE go_info gauge\n", ""))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "1metric 1",
        "metric",
        "metric{",
        'metric{a="b" 1',
        'metric{a="b"}',
        "metric{a=b} 1",
        'metric{a="b",,} 1',
        'metric{a="b" c="d"} 1',
        'metric{a="\\x"} 1',
        'metric{a="b',
        'metric{a="1",a="2"} 1',
        'metric{__name__="1"} 1',
        "metric one",
        "metric 0x10",
        "metric 1_0",
        "metric 1 2 3",
        "metric 1 2.5",
        "<html>",
        "# TYPE metric strange",
        "# TYPE metric",
        "# TYPE metric gauge\n# TYPE metric gauge",
        "metric 1\n# TYPE metric gauge",
        "# HELP metric x\n# HELP metric y",
        "metric{" + ",".join(f'a{number}="b"' for number in range(101)) + "} 1",
        'metric{a="' + "b" * 70_000 + '"} 1',
        "".join(f"metric{number} 1\n" for number in range(10_001)),
    ],
)
def test_an_error_anywhere_discards_the_page(line: str) -> None:
    with pytest.raises(PageError, match=r"line [0-9]+: found"):
        found(sample() + line + "\n" + sample())


@given(st.text() | st.text(alphabet='#{}="\\,\n \t1.eabcTYPE'))
def test_any_page_is_read_or_an_error(page: str) -> None:
    with contextlib.suppress(PageError):
        found(page)


@given(st.lists(st.tuples(st.sampled_from(sorted(LINK)), st.text(alphabet="0123456789-true"))))
def test_links_have_no_negative_numbers(changes: list[tuple[str, str]]) -> None:
    for link in found(sample(**dict(changes)), allow_subdeviceless=True):
        assert min(*link.local, *link.remote, link.lanes) >= 0


def label_of(*found_links: Link, lanes: int = 4) -> dict[str, str]:
    return labels([*found_links], "gpu.intel.com", min_lanes=lanes)[0]


def test_the_lower_device_comes_first_and_each_link_once() -> None:
    ends = ((0, 1), (1, 0))
    both = (Link(ends[0], ends[1], 4), Link(ends[1], ends[0], 4))
    assert label_of(*both, Link((2, 1), (2, 0), 4)) == {"gpu.intel.com/xe-links": "0.1-1.0_2.0-2.1"}


def test_links_with_fewer_lanes_are_omitted() -> None:
    assert label_of(Link((0, 0), (1, 0), 3)) == {"gpu.intel.com/xe-links": ""}
    assert label_of(Link((0, 0), (1, 0), 3), lanes=3) == {"gpu.intel.com/xe-links": "0.0-1.0"}


def test_more_than_two_occurrences_are_a_warning() -> None:
    link = Link((0, 0), (1, 0), 4)
    assert labels([link] * 2, "x", min_lanes=4)[1] == []
    assert labels([link] * 3, "x", min_lanes=4) == (
        {"x/xe-links": "0.0-1.0"},
        ["link 0.0-1.0 occurs 3 times, expected at most 2"],
    )


def test_a_long_text_becomes_several_labels() -> None:
    found_links = [Link((0, tile), (1, tile), 4) for tile in range(30)]
    text = "_".join(f"0.{tile}-1.{tile}" for tile in range(30))
    parts = label_of(*found_links)
    assert [*parts] == ["gpu.intel.com/xe-links", *(f"gpu.intel.com/xe-links{n}" for n in range(2, len(parts) + 1))]
    first, *others = parts.values()
    assert first + "".join(part.removeprefix("Z") for part in others) == text
    assert all(re.fullmatch(r"Z?[0-9._-]*[0-9]", part) and len(part) <= labelvalues.LENGTH for part in parts.values())


def test_too_many_links_are_an_error() -> None:
    with pytest.raises(PageError, match="found 4097 links, expected at most 4096"):
        label_of(*(Link((0, 0), (1, tile), 4) for tile in range(4097)))
