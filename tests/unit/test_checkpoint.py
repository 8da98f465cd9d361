"""The checkpoint file: the real kubelet's layout, and invalid files."""

import base64
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.checkpoint import (
    FILE_NAME,
    MAX_BYTES,
    Checkpoint,
    CheckpointError,
    Holding,
    by_node,
    decode_checkpoint,
    encode_checkpoint,
    read_checkpoint,
    write_checkpoint,
)

ANSWER = pb.ContainerAllocateResponse(envs={"A": "1"}).SerializeToString()
HOLDING = Holding("uid", "main", "example.com/gadget", {-1: ("s",), 0: ("a", "b")}, ANSWER)


def test_the_text_has_the_kubelets_layout() -> None:
    text = json.loads(encode_checkpoint(Checkpoint((HOLDING,), {"example.com/gadget": ("a", "b")})))
    assert text["Data"] == {
        "PodDeviceEntries": [
            {
                "PodUID": "uid",
                "ContainerName": "main",
                "ResourceName": "example.com/gadget",
                "DeviceIDs": {"-1": ["s"], "0": ["a", "b"]},
                "AllocResp": base64.b64encode(ANSWER).decode(),
            }
        ],
        "RegisteredDevices": {"example.com/gadget": ["a", "b"]},
    }
    assert isinstance(text["Checksum"], int)


def test_a_file_of_a_real_kubelet_is_read_with_any_checksum() -> None:
    text = (
        b'{"Data":{"PodDeviceEntries":[{"PodUID":"a3c","ContainerName":"main","ResourceName":"gpu.intel.com/i915",'
        b'"DeviceIDs":{"-1":null,"1":["card0-0"]},"AllocResp":"CgUKAUESADEi"}],'
        b'"RegisteredDevices":{"gpu.intel.com/i915":["card0-0"],"x.com/y":null},"BootID":"b"},"Checksum":4243904230}'
    ).replace(b"CgUKAUESADEi", base64.b64encode(ANSWER))
    checkpoint = decode_checkpoint(text)
    assert checkpoint.holdings[0].ids == ("card0-0",)
    assert checkpoint.holdings[0].answer.envs == {"A": "1"}
    assert checkpoint.registered == {"gpu.intel.com/i915": ("card0-0",), "x.com/y": ()}


def test_an_empty_checkpoint_of_a_real_kubelet_is_read() -> None:
    text = b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}'
    assert decode_checkpoint(text) == Checkpoint()


@given(
    st.lists(
        st.builds(
            Holding,
            st.text(),
            st.text(),
            st.text(),
            st.dictionaries(st.integers(-1, 2**40), st.lists(st.text()).map(tuple)),
            st.just(ANSWER),
        )
    ).map(tuple),
    st.dictionaries(st.text(), st.lists(st.text()).map(tuple)),
)
def test_an_encoded_checkpoint_is_decoded_unchanged(
    holdings: tuple[Holding, ...], registered: dict[str, tuple[str, ...]]
) -> None:
    checkpoint = Checkpoint(holdings, registered)
    assert decode_checkpoint(encode_checkpoint(checkpoint)) == checkpoint


@given(st.binary())
def test_invalid_checkpoints_are_rejected(text: bytes) -> None:
    with pytest.raises(CheckpointError):
        decode_checkpoint(text)


def entry(**fields: object) -> bytes:
    """A checkpoint with one entry, in which some fields are as given."""
    good = {"PodUID": "a", "ContainerName": "b", "ResourceName": "c", "DeviceIDs": {}, "AllocResp": ""}
    return json.dumps({"Data": {"PodDeviceEntries": [{**good, **fields}], "RegisteredDevices": {}}}).encode()


def test_the_valid_checkpoint_entry_is_decoded() -> None:
    assert len(decode_checkpoint(entry()).holdings) == 1


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"Data":{}}',
        entry(DeviceIDs={"x": []}),
        entry(DeviceIDs={"0": [1]}),
        entry(AllocResp="////"),
        entry(AllocResp="not base64"),
        entry(PodUID=7),
    ],
)
def test_a_damaged_checkpoint_is_rejected(text: bytes) -> None:
    with pytest.raises(CheckpointError, match="not a device manager checkpoint"):
        decode_checkpoint(text)


def test_a_missing_file_is_no_checkpoint_and_an_invalid_file_is_reported(tmp_path: Path) -> None:
    assert read_checkpoint(str(tmp_path)) is None
    path = tmp_path / FILE_NAME
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=str(path)):
        read_checkpoint(str(tmp_path))
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(CheckpointError, match=f"{path}: more than"):
        read_checkpoint(str(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=f"{path}: Is a directory"):
        read_checkpoint(str(tmp_path))


def test_a_fifo_instead_of_the_file_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(CheckpointError):
        read_checkpoint(str(tmp_path))


def test_writing_leaves_one_file(tmp_path: Path) -> None:
    write_checkpoint(str(tmp_path), Checkpoint())
    write_checkpoint(str(tmp_path), Checkpoint((HOLDING,)))
    assert read_checkpoint(str(tmp_path)) == Checkpoint((HOLDING,))
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_ids_are_recorded_under_each_of_their_nodes() -> None:
    nodes = by_node(["s", "b", "a", "gone"], {"a": (0, 1), "b": (1,), "s": ()})
    assert nodes == {0: ("a",), 1: ("a", "b"), -1: ("gone", "s")}
    assert Holding("u", "c", "r", nodes, b"").ids == ("a", "b", "gone", "s")
