"""What changes between the reading of a state and the action on it: other calls and instances, the end of a driver."""

import asyncio
import errno
import fcntl
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from draclaims import World, devices_of, error_of, kill, ref
from preparedclaims import gpu_world, prepare, refusal
from waiting import until

from accelplane.apiserver import NotFound
from accelplane.devices import Allocation
from accelplane.dra import durable
from accelplane.dra.boot import MARKER, boot_identity
from accelplane.dra.claimtasks import claim_lock
from accelplane.dra.journal import Entry, JournalError
from accelplane.dra.preparer import Preparer
from accelplane.host.blocking import in_thread

pytestmark = pytest.mark.memory


@pytest.fixture
def world(tmp_path: Path) -> World:
    return gpu_world(tmp_path)


def gate_hooks(world: World, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The next call of the plugin's hooks waits for the event."""
    opened, allocation = asyncio.Event(), world.offers.allocation

    async def gated(units: Sequence[str]) -> Allocation:
        await opened.wait()
        return await allocation(units)

    monkeypatch.setattr(world.offers, "allocation", gated)
    return opened


async def interrupted(world: World, uid: str = "a1") -> None:
    """Leaves an entry that an instance was preparing when it was killed."""
    first = await world.start()
    await prepare(first, world.claim(uid, world.device()))
    path = world.directory / f"claims/{uid}.json"
    owner = f'"owner":"{first._store.owner}"'
    path.write_text(path.read_text().replace('"state":"prepared"', '"state":"preparing"').replace('"owner":""', owner))
    kill(first)


async def test_prepare_after_unprepare_does_not_return_the_result_of_an_earlier_prepare(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    opened = gate_hooks(world, monkeypatch)
    first = asyncio.create_task(preparer.prepare([claim]))
    await until(lambda: bool(world.api.requests))
    end = asyncio.create_task(preparer.unprepare([claim]))
    await asyncio.sleep(0)
    second = asyncio.create_task(preparer.prepare([claim]))
    await asyncio.sleep(0)
    opened.set()

    devices_of((await first)["a1"])
    assert await end == {"a1": None}
    devices_of((await second)["a1"])
    await preparer.idle()
    assert world.journal()["a1"]["state"] == "prepared"


async def test_claim_that_another_instance_has_prepared_is_not_undone_as_interrupted(world: World) -> None:
    await interrupted(world)
    first = world.preparer()
    async with first._tasks.locked((claim_lock("a1"),)):
        await first.restore()
        second = await world.start()
        await prepare(second, world.claim("a1", world.device()))
    await first.idle()

    assert world.journal()["a1"]["state"] == "prepared"
    assert world.cdi_file("a1") is not None


async def test_holder_that_is_prepared_again_during_a_conflict_is_not_undone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer = await world.start()
    await interrupted(world)
    checked, prepared, calls = threading.Event(), threading.Event(), iter(range(99))
    alive = preparer._store.alive

    def delayed(entry: Entry) -> bool:
        if next(calls) == 0:
            checked.set()
            prepared.wait(10)
        return alive(entry)

    monkeypatch.setattr(preparer._store, "alive", delayed)
    other = asyncio.create_task(preparer.prepare([world.claim("b2", world.device())]))
    await until(checked.is_set)
    await prepare(preparer, world.claim("a1", world.device()))
    prepared.set()

    assert "still held by claim shop/claim-a1" in error_of((await other)["b2"])
    assert list(world.journal()) == ["a1"]


async def test_claim_that_another_instance_prepares_meanwhile_is_not_prepared_a_second_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = await world.start(), await world.start()
    claim = world.claim("a1", world.device())
    with monkeypatch.context() as patch:
        opened = gate_hooks(world, patch)
        call = asyncio.create_task(first.prepare([claim]))
        await until(lambda: bool(world.api.requests))
    names = await prepare(second, claim)
    path = world.directory / "claims/a1.json"
    before = path.stat()
    opened.set()

    assert [list(each.cdi_ids) for each in devices_of((await call)["a1"])] == names
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


async def test_units_of_claims_that_another_instance_has_prepared_are_held(world: World) -> None:
    first, second = await world.start(), await world.start()
    await prepare(first, world.claim("a1", world.device()))

    assert list(second.held()) == ["0000:03:00.0"]
    assert second.prepared() == first.prepared()


async def test_unit_in_a_damaged_file_is_held(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    await prepare(preparer, claim)
    path = world.directory / "claims/a1.json"
    durable.write(str(path), path.read_bytes()[:-20], 0o600)

    assert list(preparer.held()) == ["0000:03:00.0"]
    assert preparer.prepared() == {"0000:03:00.0": ("a1",)}
    assert await preparer.unprepare([claim]) == {"a1": None}
    assert not preparer.held()


@pytest.mark.parametrize("share", [None, "0a1b2c3d-4e5f"])
async def test_units_of_an_empty_file_are_in_the_cdi_file_of_the_claim(world: World, share: str | None) -> None:
    preparer = await world.start()
    claim = world.api.add(ref("a1"), [world.result(world.device(), shareID=share)])
    await prepare(preparer, claim)
    durable.write(str(world.directory / "claims/a1.json"), b"", 0o600)

    assert list(preparer.held()) == ["0000:03:00.0"]
    assert list(preparer.cleanup()) == ["0000:03:00.0"]
    with pytest.raises(AssertionError, match="journal file is damaged"):
        await prepare(preparer, world.claim("b2", world.device()))
    assert await preparer.unprepare([claim]) == {"a1": None}
    assert not preparer.held()


async def test_admin_access_holds_no_unit_after_its_file_is_damaged(world: World) -> None:
    preparer = await world.start()
    results = [world.result(world.device(0), adminAccess=True), world.result(world.device(1), "r1")]
    await prepare(preparer, world.api.add(ref("a1"), results))
    durable.write(str(world.directory / "claims/a1.json"), b"", 0o600)

    assert list(preparer.held()) == ["0000:04:00.0"]


async def test_damaged_file_without_units_may_hold_any_unit(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    await prepare(preparer, claim)
    durable.write(str(world.directory / "claims/a1.json"), b"", 0o600)
    (world.cdi_dir / "k8s.gpu.intel.com-claim_a1.json").unlink()

    with pytest.raises(JournalError, match=r"a1\.bad: .* its devices are not known"):
        preparer.held()
    await preparer.unprepare([claim])
    assert not preparer.held()


async def test_unit_whose_owner_changes_while_a_claim_waits_for_another_one_is_refused(world: World) -> None:
    preparer = await world.start()
    async with preparer._tasks.locked(("unit 0000:03:00.0",)):
        call = asyncio.create_task(preparer.prepare([world.claim("a1", world.device())]))
        await until(lambda: len(world.api.requests) == 2)
        await until(lambda: preparer._tasks._locks["unit 0000:03:00.0"][1] == 2)
        world.change_offer("0000:03:00.0", owner="none")

    assert "not offered while its owner changes" in error_of((await call)["a1"])
    assert world.leftovers() == []


async def test_instance_that_cannot_be_checked_does_not_count_as_dead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await world.start()
    claim = world.claim("a1", world.device())
    await prepare(first, claim)
    path = world.directory / "claims/a1.json"
    owner = f'"owner":"{first._store.owner}"'
    unfinished = path.read_text().replace('"prepared"', '"unpreparing"').replace('"owner":""', owner)
    path.write_text(unfinished)
    second = await world.start()
    open_ = os.open

    def exhausted(path: Any, *arguments: Any, **options: Any) -> int:
        if "instance-" in str(path):
            raise OSError(errno.EMFILE, "Too many open files", path)
        return open_(path, *arguments, **options)

    monkeypatch.setattr(os, "open", exhausted)

    assert "Too many open files" in await refusal(second, claim)
    assert path.read_text() == unfinished


async def slow(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[Preparer, asyncio.Event]:
    """A preparer that ended while it prepares a claim, and what lets the plugin continue."""
    preparer = await world.start(time_limit=0.01)
    opened = gate_hooks(world, monkeypatch)
    assert "still preparing" in await refusal(preparer, world.claim("a1", world.device()))
    await preparer.close(0.01)
    return preparer, opened


async def test_claim_is_not_begun_after_the_end_of_the_driver(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    preparer, opened = await slow(world, monkeypatch)
    opened.set()
    await preparer.idle()

    assert world.leftovers() == []
    assert "is stopping" in await refusal(preparer, world.claim("b2", world.device(1)))


async def test_driver_that_starts_again_continues_with_a_claim_in_progress(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer, opened = await slow(world, monkeypatch)
    await preparer.restore()
    await preparer.restore()
    opened.set()
    await preparer.idle()

    assert world.journal()["a1"]["state"] == "prepared"
    await preparer.close()
    assert not list(world.directory.glob("instance-*"))


async def test_instance_counts_as_alive_until_its_last_change_has_ended(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    await prepare(preparer, claim)
    await preparer.close()
    world.api.remove(claim)
    preparer = world.preparer()
    begun, ended, undo = threading.Event(), threading.Event(), preparer._store.undo

    def delayed(*arguments: Any, **options: Any) -> None:
        begun.set()
        ended.wait(10)
        undo(*arguments, **options)

    monkeypatch.setattr(preparer._store, "undo", delayed)
    await preparer.restore()
    await until(begun.is_set)
    await preparer.close(0.01)
    assert list(world.directory.glob("instance-*"))
    ended.set()
    await preparer.idle()

    assert world.leftovers() == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cdi", [{"name": "../../victim", "content": {}}]),
        ("undo", [{"action": "rebind", "address": "../../victim", "bound": "vfio-pci", "driver": ""}]),
        ("undo", [{"action": "rebind", "address": "0000:03:00.0", "bound": "../../victim", "driver": ""}]),
        ("undo", [{"action": "reset-port", "address": "0000:03:00.0", "node": "/dev/../victim"}]),
        ("devices", None),
        ("state", ["prepared"]),
    ],
)
async def test_file_of_the_journal_that_was_changed_by_hand_is_damaged(world: World, field: str, value: Any) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    await prepare(preparer, claim)
    victim = world.root / "var/victim"
    victim.touch()
    path = world.directory / "claims/a1.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))

    assert await preparer.unprepare([claim]) == {"a1": None}
    assert victim.exists()
    assert world.leftovers() == []


async def test_lock_of_the_cdi_directory_by_another_program_does_not_block(tmp_path: Path) -> None:
    """Every user may open the directory."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        identity = await asyncio.wait_for(in_thread(lambda: boot_identity(str(tmp_path), "boot")), 5)
    finally:
        os.close(descriptor)

    assert boot_identity(str(tmp_path), "boot") == identity
    assert boot_identity(str(tmp_path), "") == identity
    assert boot_identity(str(tmp_path), "next") != identity
    assert (tmp_path / MARKER).stat().st_mode & 0o777 == 0o600


async def test_claims_do_not_count_as_gone_while_the_api_is_not_served(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while an API server starts with another configuration."""
    preparer = await world.start()
    await prepare(preparer, world.claim("a1", world.device()))
    await preparer.close()

    async def get(path: str, _kind: Any, **_options: Any) -> Any:
        raise NotFound(f"GET {path}", code=404)

    monkeypatch.setattr(world.api, "get", get)
    preparer = await world.start()
    await until(lambda: all(task.done() for task in preparer._cleanup._running.values()))

    assert list(world.journal()) == ["a1"]
    assert "does not serve the API" in await refusal(preparer, world.claim("b2", world.device(1)))


async def test_hook_that_does_not_return_does_not_keep_its_claim(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    preparer = await world.start(hook_limit=0.01, time_limit=5)
    claim = world.claim("a1", world.device())
    gate_hooks(world, monkeypatch)

    assert "hooks of its plugin have not ended in 0.01 s" in await refusal(preparer, claim)
    assert await preparer.unprepare([claim]) == {"a1": None}
    assert world.leftovers() == []
