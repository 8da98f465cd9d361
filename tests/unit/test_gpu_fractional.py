"""Cards and tiles of containers by the annotations of GPU Aware Scheduling."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import gpu_card, write

from accelplane.host import Host
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.plugins.gpu.fractional import (
    Candidate,
    Container,
    NoCandidate,
    Pod,
    affinity_mask,
    assign,
    assigned_cards,
    find_candidate,
    project,
    select_ids,
)
from accelplane.plugins.gpu.tiles import common_tile_count, tile_counts

GPU, IDLE = Container(True, "FLAT"), Container(False, "FLAT")
I915, XE = "gpu.intel.com/i915", "gpu.intel.com/xe"


def pod(
    name: str = "a",
    *containers: Container,
    pending: bool = True,
    cards: str | None = None,
    tiles: str | None = None,
    timestamp: str | None = None,
) -> Pod:
    return Pod("team", name, f"uid of {name}", pending, containers or (GPU,), cards, tiles, timestamp)


def holding(**counts: int) -> dict[tuple[str, str], int]:
    return {("team", name): count for name, count in counts.items()}


def name_of(found: Candidate | NoCandidate) -> tuple[str, int]:
    assert isinstance(found, Candidate), found
    return found.pod.name, found.number


# The candidate.


@pytest.mark.parametrize(
    ("pods", "holders", "expected"),
    [
        ([pod(cards="card0")], holding(a=0), ("a", 0)),
        ([pod("a", GPU, IDLE, GPU, cards="card0||card1")], holding(a=1), ("a", 1)),
        # Only one pod lacks devices: its time stamp does not matter.
        ([pod("a", cards="card0", timestamp="1"), pod("b", cards="card1")], holding(a=1, b=0), ("b", 0)),
        ([pod("a", pending=False, cards="card0"), pod("b", cards="card1")], holding(a=0, b=0), ("b", 0)),
        # The kubelet does not know pod a yet.
        ([pod("a", cards="card0", timestamp="1"), pod("b", cards="card1")], holding(b=0), ("b", 0)),
        # The smallest time stamp, compared as text; pods without one are left out.
        ([pod("a", cards="c", timestamp="9"), pod("b", cards="c", timestamp="10")], holding(a=0, b=0), ("b", 0)),
        ([pod("a", cards="c"), pod("b", cards="c", timestamp="7")], holding(a=0, b=0), ("b", 0)),
        ([pod("b", timestamp="7"), pod("a", timestamp="7")], holding(a=0, b=0), ("a", 0)),
    ],
)
def test_the_candidate_is_the_pending_pod_that_lacks_devices(
    pods: list[Pod], holders: dict[tuple[str, str], int], expected: tuple[str, int]
) -> None:
    assert name_of(find_candidate(pods, holders)) == expected


@pytest.mark.parametrize(
    ("pods", "holders", "reason", "retry"),
    [
        ([], {}, "no pending pod", False),
        ([pod(cards="card0")], holding(a=1), "no pending pod", False),
        ([pod(cards="card0")], holding(a=2), "no pending pod", False),
        ([pod("a", IDLE, cards="card0")], holding(a=0), "no pending pod", False),
        ([pod()], holding(a=0), "pod team/a has no gas-container-cards", True),
        ([pod("a", cards="c"), pod("b", cards="c")], holding(a=0, b=0), "none of 2 pending pods has gas-ts", True),
    ],
)
def test_without_a_candidate_the_plugin_waits_for_late_annotations(
    pods: list[Pod], holders: dict[tuple[str, str], int], reason: str, retry: bool
) -> None:
    found = find_candidate(pods, holders)
    assert isinstance(found, NoCandidate)
    assert reason in found.reason
    assert found.retry == retry


# Cards and IDs.


@pytest.mark.parametrize(
    ("annotation", "number", "expected"),
    [
        ("card0,card1|card2,card3", 0, ["card0", "card1"]),
        ("card0,card1|card2,card3", 1, ["card2", "card3"]),
        ("|card2||card3", 1, ["card3"]),
        ("card0", 1, []),
        ("", 0, []),
        ("||", 0, []),
        (None, 0, []),
    ],
)
def test_annotated_cards_are_selected_by_the_index_of_the_container(
    annotation: str | None, number: int, expected: list[str]
) -> None:
    assert assigned_cards(Candidate(pod(cards=annotation), number)) == expected


AVAILABLE = ["card1-7", "card0-10", "card0-2", "card1-0", "card2-3"]


@pytest.mark.parametrize(
    ("cards", "size", "must_include", "expected"),
    [
        (["card0"], 1, [], ["card0-10"]),
        (["card1", "card0"], 2, [], ["card1-7", "card0-10"]),
        (["card0", "card0"], 2, [], ["card0-10", "card0-2"]),
        (["card0", "card0", "card0"], 3, [], ["card0-10", "card0-2"]),
        (["card0", "card1"], 1, [], ["card0-10"]),
        (["card0"], 2, [], ["card0-10"]),
        (["card9", "card2"], 2, [], ["card2-3"]),
        ([""], 1, [], []),
        ([], 1, [], []),
        (["card0"], 0, [], []),
        (["card1", "card0"], 2, ["card1-0"], ["card1-0", "card0-10"]),
        (["card1", "card1"], 2, ["card1-0"], ["card1-0", "card1-7"]),
        (["card0"], 1, ["card1-0"], ["card0-10"]),
        (["card3"], 1, ["card3-5"], ["card3-5"]),
    ],
)
def test_ids_are_chosen_card_by_card_after_the_required_ones(
    cards: list[str], size: int, must_include: list[str], expected: list[str]
) -> None:
    candidate = Candidate(pod(cards=",".join(cards)), 0)
    assert list(assign(candidate, AVAILABLE, must_include, size, 0).ids) == expected


def test_an_id_without_a_share_number_is_its_own_card() -> None:
    assert select_ids(["card0", "x"], ["x", "card0"], []) == ["card0", "x"]


# The affinity mask.

COMPOSITE, COMBINED = Container(True, "COMPOSITE"), Container(True, "COMBINED")


@pytest.mark.parametrize(
    ("annotation", "containers", "number", "tiles_per_card", "expected"),
    [
        ("card0:gt0+gt1", (GPU,), 0, 2, "0,1"),
        ("card0:gt0+gt1", (COMBINED,), 0, 2, "0,1"),
        ("card0:gt0+gt1", (COMPOSITE,), 0, 2, "0.0,0.1"),
        ("card0:gt0+gt1|card1:gt1,card2:gt0", (GPU, GPU), 1, 2, "1,2"),
        ("card0:gt0+gt1|card1:gt1,card2:gt0", (GPU, COMPOSITE), 1, 2, "0.1,1.0"),
        ("card7:gt3,card5:gt0", (GPU,), 0, 4, "3,4"),
        # The hierarchy is that of the container at the part's position, with empty parts.
        ("|card0:gt1", (IDLE, COMPOSITE), 0, 2, "0.1"),
        ("|card0:gt1", (COMPOSITE, GPU), 0, 2, "1"),
        ("||card0:gt1", (COMPOSITE,), 0, 2, "1"),
        # No mask.
        ("card0:gt0", (GPU,), 0, 1, ""),
        ("card0:gt0", (GPU,), 0, 0, ""),
        ("card0:gt0", (GPU, GPU), 1, 2, ""),
        ("", (GPU,), 0, 2, ""),
        (None, (GPU,), 0, 2, ""),
        ("|||", (GPU,), 0, 2, ""),
        # Malformed entries and tiles.
        ("card0", (GPU,), 0, 2, ""),
        ("card0:gt0,card1", (GPU,), 0, 2, ""),
        ("card0:gt0:gt1", (GPU,), 0, 2, ""),
        ("card0:gt0,", (GPU,), 0, 2, ""),
        ("card0:", (GPU,), 0, 2, ""),
        ("card0:gt", (GPU,), 0, 2, ""),
        ("card0:0", (GPU,), 0, 2, ""),
        ("card0:gt0+", (GPU,), 0, 2, ""),
        ("card0:gt0x1", (GPU,), 0, 2, ""),
        ("card0:gt 1", (GPU,), 0, 2, ""),
        ("card0:gt1_0", (GPU,), 0, 2, ""),
        ("card0:gt\u0661", (GPU,), 0, 2, ""),
        (":gt1", (GPU,), 0, 2, "1"),
        # Numbers with a sign and 16 bits.
        ("card0:gt32767", (GPU,), 0, 2, "32767"),
        ("card0:gt32768", (GPU,), 0, 2, ""),
        ("card0:gt-32768", (GPU,), 0, 2, "-32768"),
        ("card0:gt-32769", (GPU,), 0, 2, ""),
        ("card0:gt+1", (GPU,), 0, 2, ""),
        ("card0:gt-1", (COMPOSITE,), 0, 2, "0.-1"),
        ("card0:gt" + 5000 * "0" + "1", (GPU,), 0, 2, "1"),
        ("card0:gt" + 5000 * "9", (GPU,), 0, 2, ""),
    ],
)
def test_the_affinity_mask_numbers_tiles_by_the_hierarchy_of_the_container(
    annotation: str | None, containers: tuple[Container, ...], number: int, tiles_per_card: int, expected: str
) -> None:
    assert affinity_mask(Candidate(pod("a", *containers, tiles=annotation), number), tiles_per_card) == expected


# Pods in JSON.


def document(
    *containers: dict[str, Any], phase: str = "Pending", annotations: dict[str, str] | None = None, **metadata: Any
) -> memoryview:
    described = {
        "metadata": {"name": "a", "namespace": "team", "uid": "u", "annotations": annotations, **metadata},
        "spec": {"containers": containers or None, "nodeName": "one"},
        "status": {"phase": phase},
    }
    return memoryview(json.dumps(described).encode())


def requesting(**more: Any) -> dict[str, Any]:
    return {"name": "main", "resources": {"requests": {I915: "1"}}, **more}


AMOUNTS = dict.fromkeys(("1", "10", "100m", "2k", "0.5", "+1", 1, 2.0), True) | dict.fromkeys(
    ("0", "0.0", "-1", "", 0, None, "e5"), False
)


@pytest.mark.parametrize(("amount", "uses_gpu"), AMOUNTS.items())
@pytest.mark.parametrize("resource", [I915, XE])
def test_a_container_that_requests_a_positive_amount_uses_gpus(resource: str, amount: object, uses_gpu: bool) -> None:
    found = project(document({"resources": {"requests": {resource: amount}}}))
    assert (found is not None) == uses_gpu


@pytest.mark.parametrize(
    "container",
    [
        {"resources": {"limits": {I915: "1"}}},
        {"resources": {"requests": {"gpu.intel.com/i915_monitoring": "1", "cpu": "1"}}},
        {"resources": {"requests": None}},
        {"resources": None},
        {},
    ],
)
def test_a_container_without_requests_for_gpus_uses_none(container: dict[str, Any]) -> None:
    assert project(document(container)) is None


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Unknown", ""])
def test_an_ended_pod_is_omitted(phase: str) -> None:
    assert project(document(requesting(), phase=phase)) is None


def test_only_the_name_of_a_running_pod_is_kept() -> None:
    found = project(document(requesting(), phase="Running", annotations={"gas-container-cards": "card0"}))
    assert found == Pod("team", "a", "u", False)


@pytest.mark.parametrize(
    ("variables", "hierarchy"),
    [
        (None, "FLAT"),
        ([], "FLAT"),
        ([{"name": "ZE_FLAT_DEVICE_HIERARCHY", "value": "COMPOSITE"}], "COMPOSITE"),
        ([{"name": "ZE_FLAT_DEVICE_HIERARCHY", "value": "COMBINED"}], "COMBINED"),
        ([{"name": "ZE_FLAT_DEVICE_HIERARCHY", "value": "FLAT"}], "FLAT"),
        ([{"name": "ZE_FLAT_DEVICE_HIERARCHY", "value": "composite"}], "FLAT"),
        ([{"name": "ZE_FLAT_DEVICE_HIERARCHY", "valueFrom": {"fieldRef": {}}}], "FLAT"),
        ([{"name": "OTHER", "value": "COMPOSITE"}], "FLAT"),
        ([{"name": "ZE_FLAT_DEVICE_HIERARCHY", "value": each} for each in ("COMPOSITE", "COMBINED")], "COMBINED"),
    ],
)
def test_the_hierarchy_is_that_of_the_containers_environment(
    variables: list[dict[str, object]] | None, hierarchy: str
) -> None:
    found = project(document({"name": "idle"}, requesting(env=variables)))
    assert found is not None
    assert found.containers == (IDLE, Container(True, hierarchy))


def test_annotations_are_read_up_to_a_limit() -> None:
    annotations = {"gas-container-cards": "x" * 16384, "gas-container-tiles": "x" * 16385, "gas-ts": "17", "other": "y"}
    found = project(document(requesting(), annotations=annotations))
    assert found is not None
    assert (found.cards, found.tiles, found.timestamp) == ("x" * 16384, None, "17")


@pytest.mark.parametrize("text", [b"[]", b"", b"{", b'{"metadata": []}', b'{"status": {"phase": 3}}', b"\xff"])
def test_a_list_item_that_is_not_a_pod_raises_an_error_that_skips_it(text: bytes) -> None:
    with pytest.raises((msgspec.MsgspecError, ValueError)):
        project(memoryview(text))


# Tiles.


def test_tiles_of_both_drivers_and_of_physical_functions_are_counted(tmp_path: Path) -> None:
    for index in range(4):
        gpu_card(tmp_path, index, driver="xe" if index == 1 else "i915", vfs="2" if index == 3 else None)
    gpu_card(tmp_path, 4, vendor="0x10de")
    drm = tmp_path / "sys/class/drm"
    for name in ("gt0", "gt1", "rps"):
        (drm / "card0/gt" / name).mkdir(parents=True)
    for name in ("tile0", "tile1", "tile", "tile10"):
        (drm / "card1/device" / name).mkdir()
    (drm / "card3/gt/gt0").mkdir(parents=True)
    (drm / "card3/gt/gt1").mkdir()
    write(drm / "card5/device/vendor", "0x8086\n")  # without device/drm
    (drm / "card0-DP-1").mkdir()
    assert tile_counts(Host(tmp_path), "/sys/class/drm") == {"card0": 2, "card1": 2, "card2": 1, "card3": 2}
    assert tile_counts(Host(tmp_path / "none"), "/sys/class/drm") == {}


def test_cards_with_unreadable_tiles_are_omitted_or_count_as_one_tile(tmp_path: Path) -> None:
    for index in range(3):
        gpu_card(tmp_path, index)
    drm = tmp_path / "sys/class/drm"
    (drm / "card0/device/vendor").unlink()
    (drm / "card0/device/vendor").mkdir()
    write(drm / "card1/gt", "not a directory")
    host = Host(tmp_path)
    assert tile_counts(host, "/sys/class/drm") == {"card1": 1, "card2": 1}
    assert any("tiles not counted" in note for note in host.notes)


@pytest.mark.parametrize(
    ("counts", "before", "expected"), [([2, 2], 0, 2), ([2], 4, 2), ([2, 1], 0, 0), ([2, 1], 2, 2), ([], 2, 2)]
)
def test_the_number_of_tiles_is_set_only_if_all_cards_agree(counts: list[int], before: int, expected: int) -> None:
    assert common_tile_count(counts, before) == expected


def test_cards_with_different_tile_counts_are_reported(tmp_path: Path) -> None:
    for index in range(2):
        gpu_card(tmp_path, index)
    (tmp_path / "sys/class/drm/card0/gt/gt0").mkdir(parents=True)
    (tmp_path / "sys/class/drm/card0/gt/gt1").mkdir()
    host = Host(tmp_path)
    plugin = GpuPlugin(GpuConfig(resource_manager=True, shared_dev_num=2))
    plugin.prepare(host)
    assert any("cards differ in their numbers of tiles" in note for note in host.notes)


def test_without_the_flag_the_plugin_has_no_hooks_for_it() -> None:
    plugin = GpuPlugin(GpuConfig(shared_dev_num=2))
    assert not plugin.overrides("pod_allocator")
    assert not plugin.overrides("prepare")


# Hostile annotations.

PIECES = st.sampled_from(
    ["|", ",", ":", "+", "-", "card0", "card1", "card9", "gt0", "gt1", "gt-1", "gt99999", "gt", "", " ", "\0", "é", "٣"]
)
TEXTS = st.one_of(st.none(), st.lists(PIECES, max_size=30).map("".join), st.text(max_size=50))
IDS = st.lists(st.sampled_from([f"card{card}-{share}" for card in range(3) for share in range(3)]), unique=True)


@given(cards=TEXTS, tiles=TEXTS, number=st.integers(0, 5), tile_count=st.integers(-1, 64), data=st.data())
def test_with_any_annotations_the_result_is_a_subset_of_the_offer(
    cards: str | None, tiles: str | None, number: int, tile_count: int, data: st.DataObject
) -> None:
    available, must_include = data.draw(IDS), data.draw(IDS)
    size = data.draw(st.integers(-1, 12))
    containers = data.draw(st.lists(st.sampled_from([GPU, IDLE, COMPOSITE]), max_size=4))
    candidate = Candidate(pod("a", *containers, cards=cards, tiles=tiles), number)
    ids, mask = assign(candidate, available, must_include, size, tile_count)
    assert set(ids) <= {*available, *must_include}
    assert len(set(ids)) == len(ids) <= max(size, 0)
    named = Counter(assigned_cards(candidate))
    assert all(count <= named[card] for card, count in Counter(id_.partition("-")[0] for id_ in ids).items())
    assert set(mask) <= set("0123456789.,-")
    assert not mask or tile_count > 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["requests", "name", "value", I915, XE, "gas-ts", "containers", "env", "phase"]), inner
    ),
    max_leaves=8,
)  # fmt: skip


@given(
    place=st.sampled_from(["metadata", "spec", "status", "containers", "resources", "env", "annotations"]), value=VALUES
)
def test_any_pod_is_projected_or_skipped(place: str, value: object) -> None:
    described: dict[str, Any] = json.loads(bytes(document(requesting(env=[]), annotations={"gas-ts": "1"})))
    parents: dict[str, dict[str, Any]] = {
        "containers": described["spec"],
        "annotations": described["metadata"],
        "resources": described["spec"]["containers"][0],
        "env": described["spec"]["containers"][0],
    }
    parents.get(place, described)[place] = value
    try:
        found = project(memoryview(json.dumps(described).encode()))
    except (msgspec.MsgspecError, ValueError):
        return
    assert found is None or any(container.uses_gpu for container in found.containers)


PODS = st.builds(
    lambda name, containers, pending, cards, timestamp: pod(
        name, *containers, pending=pending, cards=cards, timestamp=timestamp
    ),
    st.sampled_from("abcd"),
    st.lists(st.sampled_from([GPU, IDLE]), min_size=1, max_size=3),
    st.booleans(),
    TEXTS,
    st.none() | st.sampled_from(["1", "2", "10", "x"]),
)


@given(
    pods=st.lists(PODS, max_size=5, unique_by=lambda each: each.name),
    holders=st.dictionaries(st.tuples(st.just("team"), st.sampled_from("abcd")), st.integers(0, 3)),
)
def test_a_candidate_pod_is_pending_known_to_the_kubelet_and_independent_of_the_order(
    pods: list[Pod], holders: dict[tuple[str, str], int]
) -> None:
    found = find_candidate(pods, holders)
    assert find_candidate(pods[::-1], holders) == found
    if isinstance(found, Candidate):
        assert found.pod.pending
        assert found.number == holders[found.pod.namespace, found.pod.name]
        assert found.number < sum(container.uses_gpu for container in found.pod.containers)
