"""The generator of slices for many nodes."""

import tempfile
from pathlib import Path

import memorydirectory
import msgspec
from kwokslices import foreign_slice, node_slices, simulated_offers

from accelplane.dra.resourceslice import ResourceSlice
from accelplane.dra.validation import problems


def test_nodes_have_valid_slices_with_different_names() -> None:
    with tempfile.TemporaryDirectory(dir=memorydirectory.path()) as path:
        offers = simulated_offers(Path(path))
    bodies = [body for number in range(20) for body in node_slices(f"kwok-{number}", "1", offers)]
    names = [body["metadata"]["name"] for body in bodies]
    assert len(set(names)) == len(names)
    slices = [msgspec.convert(body, ResourceSlice) for body in bodies]
    assert not [str(each) for one in slices for each in problems(one, "separate")]
    assert sum(len(one.spec.devices or ()) for one in slices) == 20 * 82


def test_shared_devices_replace_tiles() -> None:
    with tempfile.TemporaryDirectory(dir=memorydirectory.path()) as path:
        offers = simulated_offers(Path(path), shares={"gpu.intel.com": 4})
    bodies = list(node_slices("kwok-0", "1", {"gpu.intel.com": offers["gpu.intel.com"]}))
    devices = [device for body in bodies for device in body["spec"]["devices"]]
    assert [device["allowMultipleAllocations"] for device in devices] == [True] * 4


def test_a_foreign_slice_is_valid() -> None:
    assert not list(problems(msgspec.convert(foreign_slice("kwok-0"), ResourceSlice), "separate"))
