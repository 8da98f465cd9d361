"""The labels of GPUs: the tables of the specification, unusual trees and hostile ones."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import gpu_card, link, write

from accelplane.host import Host, HostError
from accelplane.nodelabels.gpu import Gpu, LabelOptions, gpu_labels, read_gpus
from accelplane.nodelabels.labelvalues import number_labels, split
from accelplane.simulate.specs import GpuSpec, NodeSpec
from accelplane.simulate.tree import SimulatedNode

pytestmark = pytest.mark.memory

GIB = 1024**3
NOTHING = LabelOptions()


def card(root: Path, index: int, *, memory: str | None = None, gts: int = 0, tiles: int = 0, **more: Any) -> Path:
    """A card with directories of i915 (`gts`) or xe (`tiles`) for its tiles."""
    function = gpu_card(root, index, **more)
    directory = function / f"drm/card{index}"
    if memory is not None:
        write(directory / "lmem_total_bytes", f"{memory}\n")
    for number in range(gts):
        (directory / f"gt/gt{number}").mkdir(parents=True)
    for number in range(tiles):
        (function / f"tile{number}").mkdir()
    return function


def labels(root: Path, options: LabelOptions = NOTHING, sizes: Mapping[str, int] | None = None) -> dict[str, str]:
    """Without their prefix."""
    found = gpu_labels(read_gpus(Host(root)), options, sizes)
    assert all(key.startswith("gpu.intel.com/") for key in found)
    return {key.removeprefix("gpu.intel.com/"): value for key, value in found.items()}


def test_a_node_without_gpus_has_no_tiles_and_no_other_labels(tmp_path: Path) -> None:
    assert labels(tmp_path) == {"tiles": "0"}
    (tmp_path / "sys/class/drm").mkdir(parents=True)
    assert labels(tmp_path) == {"tiles": "0"}


def test_cards_are_counted_with_their_memory_tiles_and_numa_nodes(tmp_path: Path) -> None:
    card(tmp_path, 0, memory=str(4 * GIB), gts=2, numa=1)
    card(tmp_path, 1, memory=str(2 * GIB), driver="xe", tiles=1, numa=0)
    card(tmp_path, 10, memory=str(GIB), numa=1)
    assert labels(tmp_path) == {
        "millicores": "3000",
        "memory.max": str(11 * GIB),
        "tiles": "4",
        "cards": "card0.card1.card10",
        "gpu-numbers": "0.1.10",
        "numa-gpu-map": "0-1_1-0.10",
    }


def test_other_entries_vendors_and_functions_with_virtual_functions_do_not_count(tmp_path: Path) -> None:
    card(tmp_path, 0, vfs="2")
    card(tmp_path, 1, vfs="0", physfn=True)
    card(tmp_path, 2, vendor="0x10de")
    (tmp_path / "sys/devices/pci0000:06/0000:06:00.0/drm/card1-DP-1").mkdir(parents=True)
    link(tmp_path / "sys/class/drm/card1-DP-1", tmp_path / "sys/devices/pci0000:06/0000:06:00.0/drm/card1-DP-1")
    found = labels(tmp_path)
    assert (found["gpu-numbers"], found["millicores"], found["tiles"]) == ("1", "1000", "1")


def test_a_card_with_an_unreadable_vendor_is_skipped_and_reported(tmp_path: Path) -> None:
    card(tmp_path, 0)
    (card(tmp_path, 1) / "vendor").unlink()
    host = Host(tmp_path)
    assert [gpu.number for gpu in read_gpus(host)] == ["0"]
    assert any("card1" in note for note in host.notes)


def test_a_card_without_drm_directory_fails_all_labels(tmp_path: Path) -> None:
    card(tmp_path, 0)
    function = card(tmp_path, 1)
    (function / "drm").rename(function / "elsewhere")
    link(tmp_path / "sys/class/drm/card2", function / "elsewhere/card1")
    (tmp_path / "sys/class/drm/card1").unlink()
    with pytest.raises(HostError, match="card2/device/drm"):
        read_gpus(Host(tmp_path))


@pytest.mark.parametrize(
    ("memory", "tiles", "options", "total"),
    [
        ("0", 1, NOTHING, "0"),
        ("0x100", 2, NOTHING, "512"),
        ("010", 1, NOTHING, "8"),
        ("0b11", 1, NOTHING, "3"),
        ("100", 2, LabelOptions(memory_reserved=50), "150"),
        ("100", 1, LabelOptions(memory_override=7, memory_reserved=100), "0"),
        # The subtraction wraps around, and the result is too large to be added.
        ("100", 1, LabelOptions(memory_reserved=101), None),
        (str(2**63 - 2), 1, NOTHING, str(2**63 - 2)),
        (str(2**63 - 1), 1, NOTHING, None),
        (str(2**63), 2, NOTHING, "0"),
        *(
            (bad, 1, LabelOptions(memory_override=7, memory_reserved=3), "7")
            for bad in ("", "09", "-1", "4G", str(2**64))
        ),
        (None, 3, LabelOptions(memory_override=7), "7"),
        (None, 1, NOTHING, "0"),
        (None, 1, LabelOptions(memory_override=2**64 - 1), None),
    ],
)
def test_memory_is_that_of_all_tiles_without_what_is_reserved(
    tmp_path: Path, memory: str | None, tiles: int, options: LabelOptions, total: str | None
) -> None:
    card(tmp_path, 0, memory=memory, gts=tiles)
    assert labels(tmp_path, options).get("memory.max") == total


@pytest.mark.parametrize(
    ("options", "total"),
    [
        (NOTHING, "300"),
        (LabelOptions(memory_reserved=50), "250"),
        (LabelOptions(memory_reserved=301), None),
        (LabelOptions(memory_override=7), "7"),
    ],
)
def test_memory_of_xe_is_used_unless_a_variable_overrides_it(
    tmp_path: Path, options: LabelOptions, total: str | None
) -> None:
    function = card(tmp_path, 0, driver="xe", tiles=3)
    write(function / "tile0/physical_vram_size_bytes", "0x00000000000000c8\n")
    write(function / "tile1/physical_vram_size_bytes", "0x0000000000000064\n")
    write(function / "tile2/physical_vram_size_bytes", "much\n")
    assert labels(tmp_path, options).get("memory.max") == total


def test_simulated_cards_of_both_drivers_have_their_tiles_and_memory(tmp_path: Path) -> None:
    node = NodeSpec(
        gpus=(GpuSpec(tiles=2, memory=GIB), GpuSpec(driver="xe", tiles=3, memory=GIB), GpuSpec(memory=0, vfs=1)),
    )
    SimulatedNode(tmp_path, device_nodes="files").build(node)
    found = labels(tmp_path)
    assert (found["tiles"], found["memory.max"]) == ("6", str(5 * GIB))
    # The physical function of the last card does not count, its virtual function does.
    assert found["millicores"] == "3000"


def test_a_size_from_the_level_zero_service_is_used_unless_it_is_zero(tmp_path: Path) -> None:
    for index in range(2):
        card(tmp_path, index, memory="100", gts=2)
    # Without a link there is no address to query.
    card2 = tmp_path / "sys/class/drm/card2"
    (card2 / "device/drm").mkdir(parents=True)
    write(card2 / "device/vendor", "0x8086")
    write(card2 / "lmem_total_bytes", "5")
    options = LabelOptions(memory_reserved=1)
    sizes = {"0000:03:00.0": 1000, "0000:04:00.0": 0, "": 77}
    assert labels(tmp_path, options, sizes)["memory.max"] == str(1000 + 199 + 4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", "0-0"),
        ("+3", "3-0"),
        ("32767", "32767-0"),
        *((bad, None) for bad in ("-1", "32768", "x", "", "4294967296")),
    ],
)
def test_an_unknown_numa_node_is_omitted(tmp_path: Path, text: str, expected: str | None) -> None:
    write(card(tmp_path, 0) / "numa_node", text)
    assert labels(tmp_path).get("numa-gpu-map") == expected


@pytest.mark.parametrize(
    ("level", "groups"),
    [(0, None), (1, "0.1_2"), (2, "0.1_2"), (3, "0_1"), (6, "0_1"), (7, None), (2**64 - 1, None)],
)
def test_cards_are_grouped_by_their_path_from_the_host_bridge(tmp_path: Path, level: int, groups: str | None) -> None:
    for index, place in enumerate(
        ("pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:00/0000:00:01.0/0000:02:00.0", "pci0000:80")
    ):
        function = tmp_path / "sys/devices" / place / f"0000:{index + 7:02x}:00.0"
        directory = function / f"drm/card{index}" if index < 2 else function
        directory.mkdir(parents=True)
        write(directory / "device/vendor", "0x8086")
        (directory / "device/drm").mkdir()
        link(tmp_path / "sys/class/drm" / f"card{index}", directory)
    assert labels(tmp_path, LabelOptions(pci_grouping_level=level)).get("pci-groups") == groups


def test_long_values_are_split_and_only_the_deprecated_one_is_cut() -> None:
    gpus = [Gpu(str(number), "", f"/sys/devices/pci0000:{number:02x}/x", 1, None, number % 2) for number in range(40)]
    found = gpu_labels(gpus, LabelOptions(pci_grouping_level=1))
    texts = {
        "gpu-numbers": ".".join(map(str, range(40))),
        "numa-gpu-map": "_".join(f"{node}-{'.'.join(map(str, range(node, 40, 2)))}" for node in (0, 1)),
        "pci-groups": "_".join(map(str, range(40))),
    }
    for name, text in texts.items():
        first, second = found[f"gpu.intel.com/{name}"], found[f"gpu.intel.com/{name}2"]
        assert first + second.removeprefix("Z") == text
        assert second.startswith("Z")
        assert f"gpu.intel.com/{name}3" not in found
    assert found["gpu.intel.com/cards"] == ".".join(f"card{number}" for number in range(10)) + ".car"
    assert "gpu.intel.com/cards2" not in found


def test_more_cards_than_a_kernel_has_are_rejected(tmp_path: Path) -> None:
    for index in range(1025):
        (tmp_path / f"sys/class/drm/card{index}/device/drm").mkdir(parents=True)
        (tmp_path / f"sys/class/drm/card{index}/device/vendor").write_text("0x8086\n")
    with pytest.raises(HostError, match="more than 1024"):
        read_gpus(Host(tmp_path))


def test_variables_are_unsigned_decimal_numbers() -> None:
    names = ("GPU_MEMORY_OVERRIDE", "GPU_MEMORY_RESERVED", "GPU_PCI_GROUPING_LEVEL")
    assert LabelOptions.of(dict(zip(names, ("1", "002", str(2**64 - 1)), strict=True))) == (1, 2, 2**64 - 1)
    for bad in ("", "-1", "+1", "0x10", "1_0", " 1", "1\n", "٣", str(2**64), "9" * 5000):
        assert LabelOptions.of(dict.fromkeys(names, bad)) == NOTHING
    assert LabelOptions.of({}) == NOTHING


# Splitting.


@pytest.mark.parametrize(
    ("text", "length", "mark", "parts"),
    [
        ("", 63, "Z", [""]),
        ("a" * 63, 63, "Z", ["a" * 63]),
        ("a" * 64, 63, "Z", ["a" * 63, "Za"]),
        ("0.1_2.3", 4, "Z", ["0.1", "Z_2", "Z.3"]),
        ("foo_bar", 4, "Z", ["foo", "Z_ba", "Zr"]),
        ("ab_____", 3, "Z", []),
        ("___a", 2, "", []),
        ("abc", 1, "Z", []),
        ("abc", 2, "ZZ", []),
        ("abcd", 2, "", ["ab", "cd"]),
        ("ä.b", 2, "Z", []),
    ],
)
def test_a_truncated_label_ends_with_a_letter_or_digit(text: str, length: int, mark: str, parts: list[str]) -> None:
    assert split(text, length, mark) == parts


def test_the_labels_of_a_text_are_numbered_from_two() -> None:
    assert number_labels("a", "x" * 130) == {"a": "x" * 63, "a2": "Z" + "x" * 62, "a3": "Zxxxxx"}


@given(st.text("01Z._-", max_size=300), st.integers(1, 70), st.sampled_from(["", "Z", "ZZ"]))
def test_parts_are_short_and_make_up_the_text(text: str, length: int, mark: str) -> None:
    parts = split(text, length, mark)
    if not parts:
        room = length - len(mark)
        windows = (text[start : start + room] for start in range(len(text) - room + 1))
        assert room <= 0 or any(not window.strip("._-") for window in windows)
        return
    assert parts[0] + "".join(part.removeprefix(mark) for part in parts[1:]) == text
    assert all(len(part) <= length for part in parts)
    assert all(part[-1].isalnum() for part in parts[:-1])
    assert all(part.startswith(mark) for part in parts[1:])


# Hostile trees.

SPOTS = st.sampled_from(
    [
        *(f"sys/class/drm/card{index}" for index in (0, 1, 7)),
        *("sys/class/drm", "sys/class/drm/card" + 240 * "1", "sys/class", "sys/devices"),
        *(
            f"sys/class/drm/card{index}/{name}"
            for index in (0, 1)
            for name in ("device", "device/vendor", "device/drm", "device/sriov_numvfs", "device/numa_node",
                         "device/tile0", "device/tile0/physical_vram_size_bytes", "lmem_total_bytes", "gt", "gt/gt0",
                         "gt/gt1\n")
        ),
    ]
)  # fmt: skip


def _removed(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        path.rename(f"{path}.moved")


def _filled(content: bytes) -> Callable[[Path], None]:
    return lambda path: (_removed(path), path.write_bytes(content), None)[-1]


def _linked(target: str) -> Callable[[Path], None]:
    return lambda path: (_removed(path), path.symlink_to(target), None)[-1]


def _piped(path: Path) -> None:
    _removed(path)
    os.mkfifo(path)


DEEDS = st.one_of(
    st.sampled_from([_removed, _piped, lambda path: (_removed(path), path.mkdir(), None)[-1]]),
    st.binary(max_size=30).map(_filled),
    st.sampled_from([b"9" * 4300, b"0x" + b"f" * 16, b"0" * 70_000, b"-1", b"\xff\x00", b"0x8086"]).map(_filled),
    st.sampled_from(["..", "/", "card0", "loop", "device", "/etc/passwd", "../../..", "x/" * 2000]).map(_linked),
)
OPTIONS = st.builds(LabelOptions, *(st.integers(0, 2**64 - 1) | st.integers(0, 9) for _ in range(3)))


@given(
    st.lists(st.tuples(SPOTS, DEEDS), min_size=1, max_size=5),
    OPTIONS,
    st.dictionaries(st.sampled_from(["", "0000:03:00.0", "0000:04:00.0"]), st.integers(-1, 2**64)),
)
@settings(max_examples=150, deadline=None)
def test_a_hostile_tree_has_valid_labels_or_an_error(
    tmp_path: Path, changes: list[tuple[str, Callable[[Path], None]]], options: LabelOptions, sizes: dict[str, int]
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as root:
        card(Path(root), 0, memory="4096", gts=2)
        card(Path(root), 1, driver="xe", tiles=1, vfs="0")
        for location, change in changes:
            try:
                change(Path(root, location))
            except OSError:
                continue
        try:
            gpus = read_gpus(Host(root))
        except HostError:
            return
        assert gpus == read_gpus(Host(root))
        found = gpu_labels(gpus, options, sizes)
        assert found["gpu.intel.com/tiles"].isdecimal()
        for key, value in found.items():
            assert len(key.removeprefix("gpu.intel.com/")) <= 63
            assert 0 < len(value) <= 63
            assert value[0].isalnum()
            assert value[-1].isalnum()
            assert value.isascii()
