"""`status.devices` of claims shows what is prepared, and entries of others stay."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from draclaims import NODE, Claims, World, devices_of, ref
from trees import gpu_card

from accelplane.apiserver import Conflict, StatusError
from accelplane.dra.devicestatus import desired_devices
from accelplane.dra.journal import Entry, Holding
from accelplane.plugins.gpu import GpuPlugin

pytestmark = pytest.mark.memory

NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
DRIVER = "gpu.intel.com"


class WritableClaims(Claims):
    """Claims whose status can be replaced. `conflicts` is the number of updates that fail with a conflict."""

    def __init__(self) -> None:
        super().__init__()
        self.conflicts = 0
        self.forbidden = False
        self.writes = 0

    async def put(self, path: str, body: Any, kind: Any, **_options: Any) -> Any:
        self.writes += 1
        if self.forbidden:
            raise StatusError(f"PUT {path}", "no rule", code=403, reason="Forbidden")
        name = path.removesuffix("/status")
        assert name != path
        if self.conflicts:
            self.conflicts -= 1
            raise Conflict(f"PUT {path}", code=409)
        self.objects[name] = json.loads(msgspec.json.encode(body))
        return msgspec.convert(self.objects[name], kind)

    def devices(self, uid: str) -> Any:
        return self.objects[self.path(ref(uid))]["status"].get("devices")


@pytest.fixture
def world(tmp_path: Path) -> World:
    gpu_card(tmp_path, 0)
    world = World(tmp_path, GpuPlugin())
    world.api = WritableClaims()
    return world


async def test_status_follows_the_claim(world: World) -> None:
    api = world.api
    assert isinstance(api, WritableClaims)
    preparer = await world.start(device_status=True)
    claim = world.claim("a1", world.device())
    api.objects[api.path(claim)]["spec"]["later"] = {"kept": True}

    (answer,) = devices_of((await preparer.prepare([claim]))["a1"])
    await preparer.idle()

    (found,) = api.devices("a1")
    assert (found["driver"], found["pool"], found["device"]) == (DRIVER, NODE, world.device())
    assert [(each["type"], each["status"]) for each in found["conditions"]] == [("Ready", "True")]
    assert found["data"]["cdiDeviceIDs"] == list(answer.cdi_ids)
    assert api.objects[api.path(claim)]["spec"]["later"] == {"kept": True}
    await preparer.prepare([claim])
    await preparer.idle()
    assert api.writes == 1
    await preparer.unprepare([claim])
    await preparer.idle()
    assert api.devices("a1") == []


async def test_status_is_not_written_by_default(world: World) -> None:
    preparer = await world.start()
    await preparer.prepare([world.claim("a1", world.device())])
    await preparer.idle()

    assert world.api.devices("a1") is None  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("fields", "written"), [({"conflicts": 2}, True), ({"conflicts": 9}, False)])
async def test_conflicts_are_repeated_and_never_fail_a_claim(
    world: World, fields: dict[str, int], written: bool
) -> None:
    api = world.api
    assert isinstance(api, WritableClaims)
    api.conflicts = fields["conflicts"]
    preparer = await world.start(device_status=True)

    devices_of((await preparer.prepare([world.claim("a1", world.device())]))["a1"])
    await preparer.idle()

    assert bool(api.devices("a1")) == written


async def test_forbidden_update_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    api = world.api
    assert isinstance(api, WritableClaims)
    api.forbidden = True
    preparer = await world.start(device_status=True)

    devices_of((await preparer.prepare([world.claim("a1", world.device())]))["a1"])
    await preparer.idle()

    assert "status.devices not written" in caplog.text


def test_entries_of_others_and_correct_ones_are_kept() -> None:
    other = {"driver": "net.example.com", "pool": NODE, "device": "eth0"}
    elsewhere = {"driver": DRIVER, "pool": "node-2", "device": "d"}
    holdings = [Holding(request="r", pool=NODE, device=name, unit=name, cdi_ids=["k=1"]) for name in ("d", "e")]
    entry = Entry(uid="a", state="prepared", boot="", devices=holdings)
    before = desired_devices([other, elsewhere], entry, DRIVER, NODE, NOW)
    later = NOW.replace(year=2027)

    assert before[:2] == [other, elsewhere]
    assert desired_devices(before, entry, DRIVER, NODE, later) == before
    stale = [*before[:3], {**before[3], "conditions": [{"type": "Ready", "status": "False"}]}]
    again = desired_devices(stale, entry, DRIVER, NODE, later)
    assert again[:3] == before[:3]
    assert again[3]["conditions"][0]["lastTransitionTime"] == "2027-03-04T05:06:07Z"
    assert desired_devices(before, None, DRIVER, NODE, later) == [other, elsewhere]


def test_shares_of_a_device_have_an_entry_each() -> None:
    holdings = [Holding(request="r", pool=NODE, device="d", unit="d", share_id=share) for share in ("1", "2")]
    entry = Entry(uid="a", state="prepared", boot="", devices=holdings)

    found = desired_devices([], entry, DRIVER, NODE, NOW)

    assert [each["shareID"] for each in found] == ["1", "2"]
    assert desired_devices(found, entry, DRIVER, NODE, NOW.replace(year=2027)) == found
