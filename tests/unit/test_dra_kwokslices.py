"""The generator of slices for many nodes."""

import tempfile
from pathlib import Path

import memorydirectory
import msgspec
from kwokslices import node_slices, simulated_offers

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
    assert sum(len(one.spec.devices or ()) for one in slices) == 20 * 81
