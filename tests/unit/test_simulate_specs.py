"""Descriptions of simulated nodes: parsing, errors and messages."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thoroughness import examples

from accelplane.simulate import DescriptionError, GpuSpec, NodeSpec, NpuSpec
from accelplane.simulate.description import MAX_SIZE
from accelplane.simulate.specs import gpu_address, npu_address


def test_yaml_can_describe_every_property_of_a_device(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(
        """
numa-nodes: 2
gpus:
  - {}
  - driver: xe
    index: 7
    device-id: 0x0bd5
    pci-class: 0x038000
    bdf: 0000:03:00.0
    numa-node: 1
    vfs: 2
    tiles: 4
    memory: 1048576
    mei: false
    by-path: false
    connectors: [DP-1, HDMI-A-2]
npus:
  - device-id: 0x7e4c
    bdf: 0000:00:0b.0
"""
    )
    assert NodeSpec.load(path) == NodeSpec(
        numa_nodes=2,
        gpus=[
            GpuSpec(),
            GpuSpec(
                driver="xe",
                index=7,
                device_id="0x0bd5",
                pci_class="0x038000",
                bdf="0000:03:00.0",
                numa_node=1,
                vfs=2,
                tiles=4,
                memory=1048576,
                mei=False,
                by_path=False,
                connectors=["DP-1", "HDMI-A-2"],
            ),
        ],
        npus=[NpuSpec(device_id="0x7e4c", bdf="0000:00:0b.0")],
    )


def test_an_empty_file_is_a_node_without_devices(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.touch()
    assert NodeSpec.load(path) == NodeSpec()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: []", r"unknown field `gpu`"),
        ("gpus: [{vf: 1}]", r"unknown field `vf` - at `\$.gpus\[0\]`"),
        ("gpus: [{driver: amdgpu}]", r"'amdgpu' - at `\$.gpus\[0\].driver`"),
        ("gpus: [{}, {vfs: -1}]", r"vfs is -1, expected 0 to 127 - at `\$.gpus\[1\]`"),
        ("gpus: [{tiles: many}]", r"Expected `int`, got `str` - at `\$.gpus\[0\].tiles`"),
        ("gpus: [{bdf: 03:00.0}]", "bdf is '03:00.0', expected the form 0000:03:00.0"),
        ("gpus: [{bdf: ../../../etc}]", "bdf is '../../../etc'"),
        ("gpus: [{device-id: 56c0}]", "device-id is '56c0', expected the form 0x56c0"),
        ("gpus: [{connectors: [../x]}]", "connectors is '../x'"),
        ("gpus: [{index: 99999}]", "index is 99999, expected 0 to 1023"),
        ("gpus: [{numa-node: -2}]", "numa-node is -2, expected -1 to 511"),
        ("npus: [{driver: xe}]", r"at `\$.npus\[0\].driver`"),
        ("numa-nodes: 1000", "numa-nodes is 1000"),
        ("gpus: 4", r"at `\$.gpus`"),
        ("- just\n- a list", "Expected `object`, got `array`"),
        ("gpus: [", "not YAML"),
        ("a: \x07", "not YAML"),
        ("!!python/object/apply:os.system [id]", "Expected `object`|not YAML"),
        ("[" * 3000, "not YAML|nested too deeply"),
        ("gpus: [" + "{}," * 1025 + "]", "number of gpus is 1025"),
    ],
)
def test_an_error_is_reported_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "node.yaml"
    path.write_text(text)
    with pytest.raises(DescriptionError, match=message) as caught:
        NodeSpec.load(path)
    assert str(path) in str(caught.value)


def test_an_unreadable_file_is_reported_with_its_path(tmp_path: Path) -> None:
    endless, binary, fifo = tmp_path / "big.yaml", tmp_path / "binary.yaml", tmp_path / "fifo.yaml"
    endless.write_bytes(b"#" * (MAX_SIZE + 1))
    binary.write_bytes(b"\xff\xfe\x00")
    os.mkfifo(fifo)
    for path, message in (
        (tmp_path / "absent.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (endless, f"more than {MAX_SIZE} bytes"),
        (binary, "can't decode"),
        (Path("/dev/zero"), "more than"),
    ):
        with pytest.raises(DescriptionError, match=message):
            NodeSpec.load(path)
    assert NodeSpec.load(fifo) == NodeSpec()  # without a writer: empty, without blocking


def test_a_description_of_the_fake_device_generator_is_read_as_a_node(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text(
        json.dumps({"DevCount": 4, "DevsPerNode": 2, "TilesPerDev": 2, "Driver": "xe", "Mei": True, "Npus": 1})
    )
    node = NodeSpec.load(path)
    assert [(gpu.driver, gpu.numa_node, gpu.tiles, gpu.mei, gpu.by_path) for gpu in node.gpus] == [
        ("xe", 0, 2, True, False),
        ("xe", 0, 2, True, False),
        ("xe", 1, 2, True, False),
        ("xe", 1, 2, True, False),
    ]
    assert (len(node.npus), node.numa_nodes) == (1, 2)


def test_virtual_functions_of_the_generator_belong_to_every_nth_card(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text('{"devcount": 8, "VFSPERPF": 3, "bypath": true}')
    assert [gpu.vfs for gpu in NodeSpec.load(path).gpus] == [3, 3]


def test_a_seed_mixes_the_addresses_the_same_way_each_time(tmp_path: Path) -> None:
    def addresses(seed: int) -> list[str | None]:
        path = tmp_path / "node.json"
        path.write_text(json.dumps({"DevCount": 16, "PciLinks": True, "Seed": seed}))
        return [gpu.bdf for gpu in NodeSpec.load(path).gpus]

    assert addresses(1) == addresses(1) != addresses(2)
    assert sorted(filter(None, addresses(1))) == [gpu_address(index, 0) for index in range(16)]


def test_default_addresses_never_meet() -> None:
    gpus = {gpu_address(index, numa) for index in range(1024) for numa in range(6)}
    npus = {npu_address(index) for index in range(1024)}
    assert len(gpus) == 6 * 1024
    assert len(npus) == 1024
    assert not gpus & npus


@settings(max_examples=examples(150), deadline=None)
@given(text=st.one_of(st.text(max_size=200), st.from_regex(r"(gpus|npus|numa-nodes): [\[{a-z:,}\] 0-9]*")))
def test_any_text_is_a_node_or_a_clear_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    for suffix in ("yaml", "json"):
        path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
        path.write_bytes(text.encode("utf-8", "replace"))
        try:
            NodeSpec.load(path)
        except DescriptionError as error:
            message = str(error)
        else:
            continue
        assert message.startswith(f"{path}: ")
