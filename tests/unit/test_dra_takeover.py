"""Claims that Intel's driver has prepared are taken over: names stay defined, devices stay held, claims end."""

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from draclaims import World, devices_of, error_of, ref
from trees import gpu_card, write

from accelplane.dra import durable
from accelplane.dra.preparer import Preparer
from accelplane.dra.takeover import TakeoverError, parse
from accelplane.plugins.gpu import GpuPlugin

pytestmark = pytest.mark.memory

DEVICE, OTHER = "0000-03-00-0-0x56c0", "0000-04-00-0-0x56c0"
NAME = f"intel.com/gpu={DEVICE}"
FILE = f"intel.com-gpu_{DEVICE}-accelplane.json"


def device(name: str = DEVICE, kind: str = "gpu") -> dict[str, Any]:
    return {
        "Requests": ["r0"], "PoolName": "node-1", "DeviceName": name, "CDIDeviceIDs": [f"intel.com/{kind}={name}"],
        "ShareID": None, "Metadata": None,
    }  # fmt: skip


def unversioned(claims: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    return {uid: {"Err": None, "Devices": devices} for uid, devices in claims.items()}


def checkpoint(claims: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    prepared = {
        uid: {"PreparedDevices": [{"AdminAccess": False, "KubeletpluginDevice": each} for each in devices]}
        for uid, devices in claims.items()
    }
    version = {"kind": "PreparedClaimsCheckpoint", "apiVersion": "checkpoint.gpu.intel.com/v1"}
    return {**version, "PreparedClaims": prepared}


@pytest.fixture
def world(tmp_path: Path) -> World:
    for index in (0, 1):
        gpu_card(tmp_path, index)
    return World(tmp_path, GpuPlugin())


async def start(world: World, content: Any) -> Preparer:
    write(world.directory / "preparedClaims.json", json.dumps(content))
    preparer = await world.start(take_over=True)
    await preparer.unprepare([ref("other")])  # the first call
    return preparer


async def test_takeover_that_fails_is_repeated_and_no_claim_ends_before(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(world.directory / "preparedClaims.json", json.dumps(unversioned({"a1": [device()]})))
    preparer = await world.start(take_over=True)

    def full(path: str, _data: bytes, _mode: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write", full)
        assert "not taken over" in error_of((await preparer.unprepare([ref("a1")]))["a1"])

    assert await preparer.unprepare([ref("other")]) == {"other": None}
    assert list(world.journal()) == ["a1"]


@pytest.mark.parametrize("form", [unversioned, checkpoint])
async def test_prepared_claims_keep_their_names_and_end(world: World, form: Callable[[Mapping[str, Any]], Any]) -> None:
    preparer = await start(world, form({"a1": [device()], "a2": [device(OTHER)]}))

    assert preparer.prepared() == {"0000:03:00.0": ("a1",), "0000:04:00.0": ("a2",)}
    content = json.loads((world.cdi_dir / FILE).read_text())
    assert content["kind"] == "intel.com/gpu"
    (defined,) = content["devices"]
    assert defined["name"] == DEVICE
    assert [node["path"] for node in defined["containerEdits"]["deviceNodes"]] == [
        "/dev/dri/card0", "/dev/dri/renderD128"
    ]  # fmt: skip
    (answer,) = devices_of((await preparer.prepare([world.claim("a1", DEVICE)]))["a1"])
    assert (answer.device, answer.cdi_ids) == (DEVICE, (NAME,))
    assert "still held by claim a1" in error_of((await preparer.prepare([world.claim("b", DEVICE)]))["b"])

    assert await preparer.unprepare([ref("a1"), ref("a2")]) == {"a1": None, "a2": None}

    assert world.leftovers() == ["preparedClaims.json.imported"]
    devices_of((await preparer.prepare([ref("b")]))["b"])


async def test_claims_are_taken_over_once(world: World) -> None:
    preparer = await start(world, unversioned({"a1": [device()]}))
    await preparer.unprepare([ref("a1")])
    await preparer.close()

    preparer = await world.start(take_over=True)
    await preparer.unprepare([ref("other")])
    assert preparer.prepared() == {}


async def test_nothing_is_taken_over_without_the_option(world: World) -> None:
    write(world.directory / "preparedClaims.json", json.dumps(unversioned({"a1": [device()]})))
    preparer = await world.start()
    await preparer.unprepare([ref("other")])

    assert preparer.prepared() == {}
    assert world.leftovers() == ["preparedClaims.json"]


async def test_names_that_a_file_of_the_other_driver_defines_are_not_defined_twice(world: World) -> None:
    yaml = f"""---
cdiVersion: 0.6.0
devices:
- containerEdits:
    deviceNodes:
    - path: /dev/dri/card0
  name: "{DEVICE}"
kind: intel.com/gpu
"""
    path = write(world.cdi_dir / "intel.com-gpu.yaml", yaml)
    preparer = await start(world, unversioned({"a1": [device()], "a2": [device(OTHER)]}))
    assert not (world.cdi_dir / FILE).exists()
    assert (world.cdi_dir / FILE.replace(DEVICE, OTHER)).exists()

    path.unlink()
    devices_of((await preparer.prepare([ref("a1")]))["a1"])

    assert (world.cdi_dir / FILE).exists()


async def test_after_a_reboot_the_claim_has_its_old_name_and_a_new_one(world: World) -> None:
    preparer = await start(world, checkpoint({"a1": [device()]}))
    await preparer.close()
    world.reboot()
    preparer = await world.start()

    (answer,) = devices_of((await preparer.prepare([world.claim("a1", DEVICE)]))["a1"])

    assert answer.cdi_ids == (NAME, f"k8s.gpu.intel.com/claim=a1-{DEVICE}", "k8s.gpu.intel.com/claim=a1-r0")
    assert (world.cdi_dir / FILE).exists()
    assert await preparer.unprepare([ref("a1")]) == {"a1": None}
    assert world.leftovers() == ["preparedClaims.json.imported"]


async def test_device_of_two_claims_stays_defined_until_both_have_ended(world: World) -> None:
    preparer = await start(world, unversioned({"a1": [device()], "a2": [device()]}))

    await preparer.unprepare([ref("a1")])
    assert (world.cdi_dir / FILE).exists()
    await preparer.unprepare([ref("a2")])
    assert not (world.cdi_dir / FILE).exists()


async def test_device_that_is_not_known_is_held_under_its_name(world: World) -> None:
    preparer = await start(world, unversioned({"a1": [device("0000-99-00-0-0x56c0")]}))

    assert preparer.prepared() == {"0000-99-00-0-0x56c0": ("a1",)}
    assert await preparer.unprepare([ref("a1")]) == {"a1": None}


async def test_device_without_its_nodes_does_not_prevent_the_rest(world: World) -> None:
    (world.root / "dev/dri/renderD128").unlink()

    preparer = await start(world, unversioned({"a1": [device()], "a2": [device(OTHER)]}))

    assert preparer.prepared() == {"0000:03:00.0": ("a1",), "0000:04:00.0": ("a2",)}
    assert [path.name for path in world.cdi_dir.glob("*.json")] == [FILE.replace(DEVICE, OTHER)]


async def test_file_that_cannot_be_read_is_reported_and_kept(world: World) -> None:
    preparer = await start(world, {"kind": "PreparedClaimsCheckpoint", "apiVersion": "checkpoint.gpu.intel.com/v9"})

    ((reason, text),) = world.events
    assert reason == "ClaimTakeoverFailed"
    assert "checkpoint.gpu.intel.com/v9" in text
    assert (world.directory / "preparedClaims.json").exists()
    devices_of((await preparer.prepare([world.claim("b", DEVICE)]))["b"])


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"a1": []}', b'{"a/1": {"Devices": []}}', b'{"a1": {"Devices": [{"PoolName": 1}]}}']
)
def test_other_content_is_an_error_with_the_expected_form(content: bytes) -> None:
    with pytest.raises(TakeoverError, match="expected"):
        parse(content)


@pytest.mark.parametrize("content", [{}, {"a1": {"Devices": None}}, checkpoint({})])
def test_files_without_devices_are_read(content: Any) -> None:
    assert not any(parse(json.dumps(content).encode()).values())
