"""Claims are prepared and unprepared: answers, files, journal, reboots."""

import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from draclaims import World, devices_of, ref
from preparedclaims import gpu_world, prepare, refusal
from trees import gpu_card, write

pytestmark = pytest.mark.memory


@pytest.fixture
def world(tmp_path: Path) -> World:
    return gpu_world(tmp_path)


async def test_prepared_claim_has_the_nodes_of_its_device_and_unpreparing_leaves_nothing(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())

    answer = devices_of((await preparer.prepare([claim]))["a1"])

    assert [(each.requests, each.pool, each.device) for each in answer] == [(("r0",), "node-1", world.device())]
    names = [f"a1-{world.device()}", "a1-r0"]
    assert list(answer[0].cdi_ids) == [f"k8s.gpu.intel.com/claim={name}" for name in names]
    file = world.cdi_file("a1")
    assert [node["path"] for node in file[names[0]]["deviceNodes"]] == ["/dev/dri/card0", "/dev/dri/renderD128"]
    assert file[names[1]]["env"] == ["ACCELPLANE_GPU_INTEL_COM_A1_0=0000:03:00.0"]
    assert world.journal()["a1"]["state"] == "prepared"
    assert preparer.prepared() == {"0000:03:00.0": ("shop/claim-a1",)}

    assert await preparer.unprepare([claim]) == {"a1": None}
    assert world.leftovers() == []
    assert preparer.prepared() == {}
    await prepare(preparer, world.claim("b2", world.device()))


async def test_each_request_has_its_own_device(world: World) -> None:
    preparer = await world.start()

    first, second = await prepare(preparer, world.claim("a1", world.device(0), world.device(1)))

    file = world.cdi_file("a1")
    nodes = [[node["path"] for node in file[ids[0].partition("=")[2]]["deviceNodes"]] for ids in (first, second)]
    assert nodes == [["/dev/dri/card0", "/dev/dri/renderD128"], ["/dev/dri/card1", "/dev/dri/renderD129"]]
    assert [ids[1].partition("=")[2] for ids in (first, second)] == ["a1-r0", "a1-r1"]
    assert file["a1-r1"]["env"] == ["ACCELPLANE_GPU_INTEL_COM_A1_1=0000:04:00.0"]


async def test_repeated_prepare_changes_no_file_and_asks_nobody(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    before = await prepare(preparer, claim)
    stamps = {path: path.stat() for path in (*world.directory.rglob("*.json"), *world.cdi_dir.glob("*"))}
    world.api.requests.clear()

    assert await prepare(preparer, claim) == before
    assert {path: path.stat() for path in stamps} == stamps
    assert world.api.requests == []


async def test_repeated_prepare_works_while_the_api_server_is_away(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    before = await prepare(preparer, claim)
    world.api.away = True

    assert await prepare(preparer, claim) == before
    assert "cannot be read" in await refusal(preparer, ref("b2"))


async def test_each_call_that_changes_something_is_one_change_and_one_call_of_the_plugin(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    before = preparer._changed.count
    for call, expected in ((preparer.prepare, 1), (preparer.prepare, 1), (preparer.unprepare, 2)):
        await call([claim])
        await preparer.idle()
        assert preparer._changed.count - before == expected
    assert world.offers.allocations == 1


async def test_missing_cdi_file_is_written_again_by_prepare_and_at_the_start(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    await prepare(preparer, claim)
    path = world.cdi_dir / "k8s.gpu.intel.com-claim_a1.json"
    content = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_text("{")):
        damage()
        await prepare(preparer, claim)
        assert path.read_bytes() == content
    path.unlink()
    await preparer.close()

    await world.start()

    assert path.read_bytes() == content


async def test_claim_prepared_before_a_reboot_gets_the_same_names_and_the_new_nodes(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    before = await prepare(preparer, claim)
    await preparer.close()
    world.reboot()
    for directory in ("sys", "dev"):
        shutil.rmtree(world.root / directory)
    gpu_card(world.root, 1, address="0000:03:00.0")
    gpu_card(world.root, 0, address="0000:04:00.0")
    world.scan()

    preparer = await world.start()
    assert world.cdi_file("a1") is None
    assert await prepare(preparer, claim) == before

    nodes = world.cdi_file("a1")[f"a1-{world.device()}"]["deviceNodes"]
    assert [node["path"] for node in nodes] == ["/dev/dri/card1", "/dev/dri/renderD129"]


@pytest.mark.skipif(os.geteuid() != 0, reason="making device nodes needs root")
async def test_device_nodes_have_their_numbers_and_groups(world: World) -> None:
    node = world.root / "dev/dri/renderD128"

    def make(minor: int) -> None:
        node.unlink()
        os.mknod(node, stat.S_IFCHR | 0o660, os.makedev(226, minor))
        os.chown(node, 0, 44)

    make(128)
    preparer = await world.start(cdi_groups=True)
    claim = world.claim("a1", world.device())
    await prepare(preparer, claim)

    def edits() -> dict[str, Any]:
        return world.cdi_file("a1")[f"a1-{world.device()}"]

    assert edits()["deviceNodes"][1] == {
        "path": str(node).removeprefix(str(world.root)), "hostPath": "/dev/dri/renderD128", "permissions": "rw",
        "type": "c", "major": 226, "minor": 128,
    }  # fmt: skip
    assert edits()["additionalGids"] == [44]
    make(130)  # the driver was loaded again
    await prepare(preparer, claim)
    assert edits()["deviceNodes"][1]["minor"] == 130


async def test_claim_of_an_earlier_boot_holds_its_device_until_it_is_unprepared(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    await prepare(preparer, claim)
    await preparer.close()
    world.reboot()

    preparer = await world.start()
    assert "still held by claim shop/claim-a1" in await refusal(preparer, world.claim("b2", world.device()))
    assert await preparer.unprepare([claim]) == {"a1": None}
    await prepare(preparer, world.claim("b2", world.device()))


async def test_claim_of_an_earlier_boot_keeps_its_unit_if_it_cannot_be_prepared_again(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    before = await prepare(preparer, claim)
    await preparer.close()
    world.reboot()
    node = world.root / "dev/dri/renderD128"
    node.unlink()
    preparer = await world.start()

    assert "does not exist" in await refusal(preparer, claim)

    assert list(preparer.prepared()) == ["0000:03:00.0"]
    assert world.cdi_file("a1") is None
    write(node, "")
    assert await prepare(preparer, claim) == before


async def test_lost_marker_of_the_boot_counts_as_a_reboot(world: World) -> None:
    preparer = await world.start()
    await prepare(preparer, world.claim("a1", world.device()))
    await preparer.close()
    (world.cdi_dir / ".accelplane-boot").unlink()
    preparer = await world.start()
    world.api.requests.clear()

    await prepare(preparer, ref("a1"))

    assert any("claim-a1" in path for path in world.api.requests)


async def test_damaged_journal_file_is_set_aside_and_its_claim_can_be_unprepared(world: World) -> None:
    preparer = await world.start()
    for number in (0, 1):
        await prepare(preparer, world.claim(f"a{number}", world.device(number)))
    await preparer.close()
    path = world.directory / "claims/a0.json"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])

    preparer = await world.start()

    assert [reason for reason, _text in world.events] == ["ClaimJournalDamaged"]
    assert list(preparer.cleanup()) == ["0000:03:00.0"]
    assert preparer.prepared() == {"0000:03:00.0": ("a0",), "0000:04:00.0": ("shop/claim-a1",)}
    assert "journal file is damaged" in await refusal(preparer, world.claim("b2", world.device(0)))
    assert await preparer.unprepare([ref("a0")]) == {"a0": None}
    assert preparer.cleanup() == {}
    await prepare(preparer, world.claim("b2", world.device(0)))
    assert sorted(path.name for path in (world.directory / "claims").iterdir()) == ["a1.json", "b2.json"]


async def test_claim_with_a_damaged_journal_file_is_prepared_again_with_the_same_names(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    before = await prepare(preparer, claim)
    await preparer.close()
    write(world.directory / "claims/a1.json", "{")

    preparer = await world.start()

    assert await prepare(preparer, claim) == before
    assert preparer.cleanup() == {}
    await preparer.unprepare([claim])
    assert world.leftovers() == []


async def test_fields_of_a_newer_version_stay_in_the_journal(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    await prepare(preparer, claim)
    await preparer.close()
    path = world.directory / "claims/a1.json"
    path.write_text(path.read_text().replace("{", '{"quota": 3, ', 1))
    world.reboot()

    preparer = await world.start()
    await prepare(preparer, claim)

    assert world.journal()["a1"]["quota"] == 3
