"""The drop-in for `intel_gpu_fakedev`: files, labels, limits and errors of its specification, and additions."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from accelplane.host import Host
from accelplane.simulate.description import Description, DescriptionError, read_description
from accelplane.simulate.fakedev import FakedevError, generate, label_lines, links

pytestmark = pytest.mark.memory

CONFIGS = Path(__file__).parents[2] / "src/accelplane/simulate/configs"


def files(root: Path) -> dict[str, str]:
    return {
        str(path.relative_to(root)): path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def fakedev(
    directory: Path, *flags: str, description: Mapping[str, object] | str | None = None
) -> subprocess.CompletedProcess[str]:
    directory.mkdir(exist_ok=True)
    arguments = list(flags)
    if description is not None:
        path = directory.with_suffix(".json")
        path.write_text(description if isinstance(description, str) else json.dumps(description))
        arguments += ["-json", str(path)]
    program = "from accelplane.cli.fakedev import main; raise SystemExit(main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_plain_layout_is_that_of_the_original(tmp_path: Path) -> None:
    description = Description(
        devcount=2, tilesperdev=2, devmemsize=2**20, devspernode=1, capabilities={"platform": "x"}, unprivileged=True
    )
    generate(description, str(tmp_path))
    assert files(tmp_path) == {
        "dev/dri/card0": "",
        "dev/dri/card1": "",
        "dev/dri/renderD128": "",
        "dev/dri/renderD129": "",
        "sys/bus/pci/drivers/i915/0000:00:00.0/device": "0x4905",
        "sys/bus/pci/drivers/i915/0000:00:00.0/drm/card0": "",
        "sys/bus/pci/drivers/i915/0000:00:00.0/drm/renderD128": "",
        "sys/bus/pci/drivers/i915/0000:00:01.0/device": "0x4905",
        "sys/bus/pci/drivers/i915/0000:00:01.0/drm/card1": "",
        "sys/bus/pci/drivers/i915/0000:00:01.0/drm/renderD129": "",
        "sys/class/drm/card0/device/numa_node": "0",
        "sys/class/drm/card0/device/vendor": "0x8086",
        "sys/class/drm/card0/lmem_total_bytes": "1048576",
        "sys/class/drm/card1/device/numa_node": "1",
        "sys/class/drm/card1/device/vendor": "0x8086",
        "sys/class/drm/card1/lmem_total_bytes": "1048576",
        "sys/kernel/debug/dri/0/i915_capabilities": "platform: x\n",
        "sys/kernel/debug/dri/1/i915_capabilities": "platform: x\n",
        "xpum-sidecar-labels.txt": "xpumanager.intel.com/xe-links=\n",
    }
    for directory in ("card1/device/drm/card1", "card1/device/drm/renderD129", "card0/gt/gt0", "card1/gt/gt1"):
        assert (tmp_path / "sys/class/drm" / directory).is_dir()
    assert not (tmp_path / "sys/class/drm/card0/device").is_symlink()


def test_every_nth_card_is_a_physical_function(tmp_path: Path) -> None:
    generate(Description(devcount=6, vfsperpf=2, unprivileged=True), str(tmp_path))
    assert {path: text for path, text in files(tmp_path).items() if path.endswith("sriov_numvfs")} == {
        "sys/class/drm/card0/device/sriov_numvfs": "2",
        "sys/class/drm/card3/device/sriov_numvfs": "2",
    }


def test_the_tenth_card_has_the_two_digit_address_of_the_original(tmp_path: Path) -> None:
    generate(Description(devcount=11, unprivileged=True), str(tmp_path))
    assert (tmp_path / "sys/bus/pci/drivers/i915/0000:00:010.0/drm/card10").exists()
    assert (tmp_path / "sys/class/drm/card10/device/numa_node").read_text() == "0"


def test_nodes_are_null_devices(tmp_path: Path) -> None:
    result = fakedev(tmp_path / "node", description={"DevCount": 1})
    if "CAP_MKNOD" in result.stderr:
        assert result.returncode == 1
        pytest.skip("needs CAP_MKNOD")
    for path in ("dev/dri/card0", "sys/bus/pci/drivers/i915/0000:00:00.0/drm/renderD128"):
        status = os.stat(tmp_path / "node" / path)
        assert stat.S_ISCHR(status.st_mode)
        assert (status.st_rdev, stat.S_IMODE(status.st_mode)) == (os.makedev(1, 3), 0o644)


def test_a_missing_capability_is_reported_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"DevCount": 1}')
    program = "from accelplane.cli.fakedev import main; raise SystemExit(main(['-json', 'd.json']))"
    result = subprocess.run(
        ["setpriv", "--inh-caps=-mknod", "--bounding-set=-mknod", sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if result.returncode not in (0, 1):
        pytest.skip("needs root")
    assert result.returncode == 1
    assert "CAP_MKNOD, or use -unprivileged" in result.stderr


@pytest.mark.parametrize(
    ("name", "cards", "tiles", "lines"),
    [("8x-DG1", 8, 0, 1), ("8x2-PVC-xelink", 8, 2, 16), ("2x4-PVC-xelink", 2, 4, 4)],
)
def test_the_samples_work_as_they_are(tmp_path: Path, name: str, cards: int, tiles: int, lines: int) -> None:
    result = fakedev(tmp_path / "node", "-json", str(CONFIGS / f"{name}.json"), "-unprivileged", "--verbose=true")
    assert (result.returncode, result.stderr) == (0, "")
    written = (tmp_path / "node/xpum-sidecar-labels.txt").read_text()
    assert len(written.splitlines()) == lines
    assert result.stdout.endswith(written)
    assert f"created card{cards - 1}" in result.stdout
    assert len(list((tmp_path / "node/dev/dri").glob("card*"))) == cards
    assert len(list((tmp_path / "node/sys/class/drm").glob("card*/gt/gt*"))) == cards * tiles


def test_the_listed_links_equal_those_of_the_full_topology() -> None:
    listed = read_description(CONFIGS / "2x4-PVC-xelink.json")
    full = Description(devcount=2, tilesperdev=4, capabilities={"connection-topology": "FULL"})
    assert links(listed) == links(full)
    assert len(links(listed).split("_")) == 28


@pytest.mark.parametrize(
    ("gpus", "tiles", "text"),
    [
        (2, 2, "0.1-0.0_1.0-0.0_1.1-0.0_1.0-0.1_1.1-0.1_1.1-1.0"),
        (1, 1, ""),
        (3, 0, ""),
        (3, 1, "1.0-0.0_2.0-0.0_2.0-1.0"),
    ],
)
def test_full_topology_links_every_tile_to_every_other(gpus: int, tiles: int, text: str) -> None:
    assert links(Description(devcount=gpus, tilesperdev=tiles, capabilities={"connection-topology": "FULL"})) == text


def test_labels_are_cut_after_63_and_then_62_characters() -> None:
    text = "a" * 63 + "b" * 62 + "c"
    assert label_lines(text) == [
        "xpumanager.intel.com/xe-links=" + "a" * 63,
        "xpumanager.intel.com/xe-links2=Z" + "b" * 62,
        "xpumanager.intel.com/xe-links3=Zc",
    ]
    assert label_lines("a" * 63) == ["xpumanager.intel.com/xe-links=" + "a" * 63]


@given(text=st.text("0123456789.-_", max_size=400))
def test_labels_joined_again_are_the_whole_text(text: str) -> None:
    values = [line.partition("=")[2] for line in label_lines(text)]
    assert values[0] + "".join(value.removeprefix("Z") for value in values[1:]) == text
    assert all(len(value) <= 63 for value in values)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({}, "DevCount is 0, expected 1 to 128"),
        ({"DevCount": 129}, "DevCount is 129"),
        ({"DevCount": -1}, "DevCount is -1"),
        ({"DevCount": "4"}, "Expected `int`, got `str` - at `$.devcount`"),
        ({"DevCount": 1.5}, "Expected `int`, got `float`"),
        ({"DevCount": 1, "DevMemSize": 1000}, "multiple of 1 MiB"),
        ({"DevCount": 1, "DevMemSize": 2**80}, "DevMemSize"),
        ({"DevCount": 2, "DevsPerNode": 3}, "DevsPerNode is 3, expected 0 to 2"),
        ({"DevCount": 2, "TilesPerDev": 65}, "TilesPerDev is 65"),
        ({"DevCount": 4, "VfsPerPf": 1, "TilesPerDev": 1}, "VfsPerPf cannot be combined with TilesPerDev"),
        (
            {"DevCount": 4, "VfsPerPf": 1, "DevsPerNode": 1},
            "VfsPerPf cannot be combined with TilesPerDev or DevsPerNode",
        ),
        ({"DevCount": 4, "VfsPerPf": 2}, "multiple of VfsPerPf + 1 (3)"),
        ({"DevCount": 128, "TilesPerDev": 64, "Capabilities": {"connection-topology": "FULL"}}, "8192 tiles"),
        ({"DevCount": 1, "Capabilities": {"platform": 1}}, "Expected `str`, got `int`"),
        ({"DevCount": 1, "Driver": "nouveau"}, "nouveau"),
        ({"DevCount": 1, "DeviceId": "../../x"}, "DeviceId is '../../x'"),
        ("[1]", "Expected `object`, got `array`"),
        ("", "truncated"),
        ('{"DevCount": 1} trailing', "trailing"),
        ("[" * 100_000, "d.json"),
    ],
)
def test_wrong_descriptions_are_rejected_with_status_1(
    tmp_path: Path, description: dict[str, object] | str, message: str
) -> None:
    path = tmp_path / "d.json"
    path.write_text(description if isinstance(description, str) else json.dumps(description))
    with pytest.raises(DescriptionError) as caught:
        read_description(path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "-json: found nothing, expected the file with the description"),
        (["-json"], "flag needs an argument"),
        (["-json", "absent.json"], "'absent.json': cannot be read: No such file"),
        (["-jsn", "x"], "not defined: -jsn"),
        (["-json", "x", "more"], "unexpected argument 'more'"),
        (["-json", "x", "-seed", "y"], "invalid value"),
    ],
)
def test_wrong_command_lines_end_with_status_1(tmp_path: Path, flags: list[str], message: str) -> None:
    result = fakedev(tmp_path / "node", *flags)
    assert result.returncode == 1
    assert message in result.stderr
    assert list((tmp_path / "node").iterdir()) == []


def test_help_exits_with_0(tmp_path: Path) -> None:
    result = fakedev(tmp_path / "node", "-h")
    assert result.returncode == 0
    assert "-unprivileged" in result.stderr


def test_keys_count_in_any_case_and_unknown_ones_do_not(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text('{"DEVCOUNT": 3, "devMemSize": null, "Comment": {"DevCount": 9}, "Capabilities": {"A": "b"}}')
    found = read_description(path)
    assert (found.devcount, found.devmemsize, found.capabilities) == (3, 0, {"A": "b"})


def test_an_earlier_tree_is_replaced(tmp_path: Path) -> None:
    generate(Description(devcount=4, mei=True, npus=1, unprivileged=True), str(tmp_path))
    generate(Description(devcount=2, unprivileged=True), str(tmp_path))
    assert sorted(os.listdir(tmp_path / "sys")) == ["bus", "class", "kernel"]
    assert sorted(os.listdir(tmp_path / "sys/class/drm")) == ["card0", "card1"]
    assert os.listdir(tmp_path / "dev") == ["dri"]


@pytest.mark.parametrize(
    "existing",
    [
        ["dev/null"],
        ["dev/dri/card0", "dev/null"],
        ["dev/empty-not"],
        ["sys/block/x", "sys/bus/x", "sys/class/x", "sys/dev/x"],
    ],
)
def test_a_tree_that_may_be_real_is_unchanged(tmp_path: Path, existing: list[str]) -> None:
    for path in [*existing, "sys/class/x" if existing[0].startswith("dev") else "dev/dri/card0"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    before = files(tmp_path)
    with pytest.raises(FakedevError, match="expected a tree of an earlier call"):
        generate(Description(devcount=1, unprivileged=True), str(tmp_path))
    assert files(tmp_path) == before


def test_links_in_place_of_the_directories_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere/dri").mkdir(parents=True)
    (tmp_path / "dev").symlink_to("elsewhere")
    with pytest.raises(FakedevError, match="not a directory"):
        generate(Description(devcount=1, unprivileged=True), str(tmp_path))
    assert (tmp_path / "elsewhere/dri").is_dir()


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "xpum-sidecar-labels.txt").mkdir()
    with pytest.raises(FakedevError, match=r"xpum-sidecar-labels.txt: Is a directory"):
        generate(Description(devcount=1, unprivileged=True), str(tmp_path))


def test_driver_and_device_id_are_added_to_the_plain_layout(tmp_path: Path) -> None:
    generate(Description(devcount=1, driver="xe", device_id="0x0bd5", unprivileged=True), str(tmp_path))
    host = Host(tmp_path)
    assert host.driver("/sys/class/drm/card0/device") == "xe"
    assert host.text("/sys/class/drm/card0/device/device") == "0x0bd5"
    assert host.text("/sys/class/drm/card0/device/driver/0000:00:00.0/device") == "0x0bd5"


def test_the_layout_of_the_kernel_has_additional_files(tmp_path: Path) -> None:
    description = {"DevCount": 4, "VfsPerPf": 1, "Driver": "xe", "ByPath": True, "Mei": True, "Npus": 1}
    result = fakedev(tmp_path / "node", "-unprivileged", description={**description, "Capabilities": {"a": "b"}})
    assert (result.returncode, result.stderr) == (0, "")
    host = Host(tmp_path / "node")
    assert host.resolve("/sys/class/drm/card0/device").startswith("/sys/devices/pci0000:00/")
    assert [host.is_vf(f"/sys/class/drm/card{index}/device") for index in range(4)] == [False, True, False, True]
    assert len(host.names("/dev/dri/by-path")) == 8
    assert len(list(host.glob("/sys/class/drm/card*/device/xe.mei-gscfi.*/mei/mei*"))) == 2
    assert host.names("/dev/accel") == ["accel0"]
    assert host.text("/sys/kernel/debug/dri/3/i915_capabilities") == "a: b"


def test_a_seed_shuffles_the_same_way_each_time(tmp_path: Path) -> None:
    description = {"DevCount": 1, "Capabilities": {str(number): "" for number in range(30)}}

    def capabilities(seed: int) -> list[str]:
        result = fakedev(tmp_path / "node", "-unprivileged", f"-seed={seed}", description=description)
        assert result.returncode == 0
        return (tmp_path / "node/sys/kernel/debug/dri/0/i915_capabilities").read_text().splitlines()

    assert capabilities(1) == capabilities(1) != capabilities(2)
    assert sorted(capabilities(1)) == sorted(f"{number}: " for number in range(30))


keys = st.sampled_from(["DevCount", "TilesPerDev", "DevMemSize", "DevsPerNode", "VfsPerPf", "Npus", "Mei", "Info"])


@settings(max_examples=examples(60), deadline=None)
@given(
    description=st.dictionaries(
        keys | st.text(max_size=5),
        st.none() | st.integers(-1, 6) | st.booleans() | st.text(max_size=5) | st.dictionaries(keys, keys, max_size=2),
        max_size=5,
    )
)
def test_any_description_makes_a_tree_or_a_clear_error(tmp_path: Path, description: dict[str, object]) -> None:
    directory = Path(tempfile.mkdtemp(dir=tmp_path))
    path = directory / "d.json"
    path.write_text(json.dumps({"DevCount": 2, **description, "Unprivileged": True}))
    try:
        found = read_description(path)
    except DescriptionError:
        return
    generate(found, str(directory))
    assert len(list((directory / "dev/dri").glob("card*"))) == found.devcount
