"""Claims that the preparer refuses or undoes: devices held by others, lost pods, other instances."""

import asyncio
from pathlib import Path

import pytest
from draclaims import World, devices_of, error_of, kill, ref
from preparedclaims import gpu_world, prepare, refusal
from waiting import until

from accelplane.devices import Unit
from accelplane.dra import durable
from accelplane.dra.model import ClaimError, ClaimRef, DeviceName, Offer
from accelplane.kubelet.podresources import ClaimHolder

pytestmark = pytest.mark.memory


@pytest.fixture
def world(tmp_path: Path) -> World:
    return gpu_world(tmp_path)


async def test_unit_held_by_a_claim_in_use_is_refused_with_its_name(world: World) -> None:
    preparer = await world.start()
    holder = world.claim("a1", world.device())
    await prepare(preparer, holder)

    message = await refusal(preparer, world.claim("b2", world.device()))

    assert message == f"device {world.device()} is still held by claim shop/claim-a1, waiting for its pod to end"
    assert world.leftovers() == ["a1.json", "k8s.gpu.intel.com-claim_a1.json"]
    await preparer.unprepare([holder])
    await prepare(preparer, ref("b2"))


async def test_holder_without_pod_is_undone(world: World) -> None:
    preparer = await world.start()
    for number, claim_is in enumerate(("gone", "replaced", "deallocated", "unreserved")):
        holder = world.claim(f"a{number}", world.device())
        await prepare(preparer, holder)
        if claim_is == "gone":
            world.api.remove(holder)
        elif claim_is == "replaced":
            world.api.objects[world.api.path(holder)]["metadata"]["uid"] = "other"
        elif claim_is == "deallocated":
            world.api.objects[world.api.path(holder)]["status"] = {}
        else:
            world.claim(holder.uid, world.device(), reserved=False)

        new = world.claim(f"b{number}", world.device())
        await prepare(preparer, new)

        assert list(world.journal()) == [f"b{number}"], claim_is
        await preparer.unprepare([new])


async def test_holder_with_a_running_container_is_kept_after_its_pod_was_deleted_by_force(world: World) -> None:
    preparer = await world.start()
    holder = world.claim("a1", world.device())
    names = (await prepare(preparer, holder))[0]
    world.api.remove(holder)
    device = world.device()
    world.containers = [ClaimHolder("shop", "pod", "main", world.driver, "node-1", device, (names[0],))]

    assert "still held by claim shop/claim-a1" in await refusal(preparer, world.claim("b2", device))
    world.containers = []
    await prepare(preparer, ref("b2"))


async def test_holder_without_pod_is_kept_for_some_time(world: World) -> None:
    preparer = await world.start(orphan_delay=1000.0)
    holder = world.claim("a1", world.device())
    await prepare(preparer, holder)
    world.api.remove(holder)

    assert "still held by claim shop/claim-a1" in await refusal(preparer, world.claim("b2", world.device()))


async def test_entries_without_pods_are_undone_after_a_start(world: World) -> None:
    preparer = await world.start()
    holder = world.claim("a1", world.device(0))
    await prepare(preparer, holder)
    await prepare(preparer, world.claim("a2", world.device(1)))
    await preparer.close()
    world.api.remove(holder)

    preparer = await world.start()
    while "a1" in world.journal():
        await preparer.changed()

    assert list(preparer.prepared()) == ["0000:04:00.0"]


async def test_claim_that_was_created_again_is_not_prepared(world: World) -> None:
    preparer = await world.start()
    world.claim("a1", world.device())
    old = ClaimRef("shop", "a0", "claim-a1")

    assert "was replaced" in await refusal(preparer, old)
    assert world.leftovers() == []


async def test_unknown_claims_are_unprepared(world: World) -> None:
    preparer = await world.start()

    assert await preparer.unprepare([ref("a1"), ref("a2")]) == {"a1": None, "a2": None}


async def test_claim_that_cannot_be_prepared_does_not_affect_the_others(world: World) -> None:
    preparer = await world.start()
    claims = [world.claim("a0", world.device(0)), world.claim("a1", world.device(1)), world.claim("a2", "no-such")]

    answers = await preparer.prepare([*claims, ref("a3")])

    assert list(answers) == ["a0", "a1", "a2", "a3"]
    for uid in ("a0", "a1"):
        devices_of(answers[uid])
    assert "device no-such is no longer on this node" in error_of(answers["a2"])
    assert "does not exist" in error_of(answers["a3"])


@pytest.mark.parametrize(
    ("offer", "message"),
    [
        ({"state": "gone"}, "is no longer on this node"),
        ({"owner": "plugin"}, "is owned by the device plugin on this node, expected DRA; delete the pod"),
        ({"owner": "none"}, "while its owner changes"),
        ({"containers": ("shop/pod/main",)}, "still held by container shop/pod/main"),
        ({"state": "unhealthy", "text": "wedged"}, "is not healthy: wedged; delete the pod to get another device"),
        ({"state": "unhealthy", "text": 500 * "long "}, "; delete the pod to get another device"),
        ({"state": "unbound", "reason": "driver"}, "its state is unbound: driver"),
    ],
)
async def test_unit_that_dra_cannot_hand_out_is_refused(world: World, offer: dict[str, str], message: str) -> None:
    preparer = await world.start()
    world.change_offer("0000:03:00.0", **offer)

    assert message in await refusal(preparer, world.claim("a1", world.device()))
    assert world.leftovers() == []


@pytest.mark.parametrize(
    ("toleration", "tolerated"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "gpu.intel.com/health", "operator": "Exists"}, True),
        ({"key": "gpu.intel.com/health", "operator": "Equal", "value": "wedged"}, True),
        ({"key": "gpu.intel.com/health", "operator": "Equal", "value": "temperature"}, False),
        ({"key": "gpu.intel.com/gone", "operator": "Exists"}, False),
    ],
)
async def test_toleration_allows_a_unit_that_is_not_healthy(
    world: World, toleration: dict[str, str], tolerated: bool
) -> None:
    preparer = await world.start()
    world.change_offer("0000:03:00.0", state="unhealthy", reason="wedged", text="is wedged")
    world.api.add(ref("a1"), [world.result(world.device(), tolerations=[toleration])])

    assert isinstance((await preparer.prepare([ref("a1")]))["a1"], ClaimError) is not tolerated


async def test_function_whose_virtual_function_is_held_by_a_container_is_refused(world: World) -> None:
    preparer = await world.start()
    virtual = Unit(id="0000:03:00.1", parent="0000:03:00.0", health="card9")
    offer = Offer(unit=virtual, owner="plugin", containers=("shop/pod/main",))
    world.offers.offers = {**world.offers.offers, virtual.id: offer}

    assert "still held by container shop/pod/main" in await refusal(preparer, world.claim("a1", world.device()))
    await prepare(preparer, world.claim("a2", world.device(1)))


async def test_device_without_its_nodes_is_refused(world: World) -> None:
    preparer = await world.start()
    (world.root / "dev/dri/renderD128").unlink()

    assert "/dev/dri/renderD128: does not exist" in await refusal(preparer, world.claim("a1", world.device()))
    assert world.leftovers() == []
    assert preparer.prepared() == {}


async def test_results_of_other_drivers_and_pools_are_ignored(world: World) -> None:
    preparer = await world.start()
    mine = world.result(world.device())
    world.api.add(ref("a1"), [{**mine, "driver": "net.example.com"}, mine, {**mine, "pool": "node-2"}])
    world.api.add(ref("a2"), [{**mine, "pool": "node-2"}])

    assert len(await prepare(preparer, ref("a1"))) == 1
    assert "no device of gpu.intel.com in the pool node-1" in await refusal(preparer, ref("a2"))


async def test_admin_access_takes_nothing_and_is_not_refused(world: World) -> None:
    preparer = await world.start()
    user = world.claim("a1", world.device())
    await prepare(preparer, user)
    results = [world.result(device, adminAccess=True) for device in world.names]
    monitor = world.api.add(ref("a2"), results)

    names = await prepare(preparer, monitor)

    assert len(names) == 2
    assert names[0][0].endswith(f"a2-{world.device()}-admin")
    assert "DRA_ADMIN_ACCESS=true" in world.cdi_file("a2")["a2-r0"]["env"]
    await prepare(preparer, world.claim("a3", world.device(1)))
    await preparer.unprepare([monitor])
    assert world.cdi_file("a1") is not None


async def test_share_ids_are_slots_of_a_unit(world: World) -> None:
    preparer = await world.start()
    device = world.device()
    world.names = {**world.names, device: DeviceName(unit="0000:03:00.0", multiple=True)}
    shares = [f"{number}2345678-aaaa" for number in range(2)]
    for number, share in enumerate(shares):
        world.api.add(ref(f"a{number}"), [world.result(device, shareID=share)])

    answers = await preparer.prepare([ref("a0"), ref("a1")])

    for number, share in enumerate(shares):
        (prepared,) = devices_of(answers[f"a{number}"])
        assert (prepared.share_id, prepared.cdi_ids[0]) == (
            share, f"k8s.gpu.intel.com/claim=a{number}-{device}-{share[:8]}"
        )  # fmt: skip
    world.api.add(ref("b"), [world.result(device, shareID=shares[0])])
    assert "still held by claim shop/claim-a0" in await refusal(preparer, ref("b"))
    assert preparer.prepared() == {"0000:03:00.0": ("shop/claim-a0", "shop/claim-a1")}


async def test_parts_of_a_unit_exclude_the_whole_and_have_an_affinity_mask(world: World) -> None:
    preparer = await world.start()
    for tile in (0, 1):
        world.names[f"part-t{tile}"] = DeviceName(unit="0000:03:00.0", slot=f"t{tile}", tile=tile)
    await prepare(preparer, world.claim("a0", "part-t0"))
    await prepare(preparer, world.claim("a1", "part-t1"))

    assert "ZE_AFFINITY_MASK=0.1" in world.cdi_file("a1")["a1-r0"]["env"]
    assert "still held" in await refusal(preparer, world.claim("b", world.device(0)))
    assert "still held" in await refusal(preparer, world.claim("c", "part-t0"))
    assert "are of one unit" in await refusal(preparer, world.claim("d", "part-t0", world.device(0)))


async def test_claim_that_was_allocated_again_gets_its_new_device(world: World) -> None:
    preparer = await world.start()
    await prepare(preparer, world.claim("a1", world.device(0)))
    await preparer.close()
    world.reboot()
    preparer = await world.start()

    await prepare(preparer, world.claim("a1", world.device(1)))

    assert list(preparer.prepared()) == ["0000:04:00.0"]


async def test_claims_of_older_api_versions_are_read(world: World) -> None:
    world.api.version = "v1beta1"
    preparer = await world.start()

    await prepare(preparer, world.claim("a1", world.device()))


async def test_two_instances_share_the_journal(world: World) -> None:
    first, second = await world.start(), await world.start()
    claim = world.claim("a1", world.device())

    names = await prepare(first, claim)

    assert await prepare(second, claim) == names
    assert "still held by claim shop/claim-a1" in await refusal(second, world.claim("b2", world.device()))
    assert await second.unprepare([claim]) == {"a1": None}
    await prepare(first, ref("b2"))


async def test_claim_that_another_instance_prepares_is_not_touched(world: World) -> None:
    first = await world.start()
    claim = world.claim("a1", world.device())
    await prepare(first, claim)
    path = world.directory / "claims/a1.json"
    prepared = path.read_text()
    unfinished = prepared.replace('"prepared"', '"preparing"').replace('"owner":""', f'"owner":"{first._store.owner}"')
    durable.write(str(path), unfinished.encode(), 0o600)
    second = await world.start(time_limit=0.01)

    for call in (second.prepare, second.unprepare):
        assert "in another instance of this driver" in error_of((await call([claim]))["a1"])
    assert path.read_text() == unfinished
    third = await world.start()
    assert "still held by claim shop/claim-a1" in await refusal(third, world.claim("b2", world.device()))
    durable.write(str(path), prepared.encode(), 0o600)
    await second.idle()
    assert world.leftovers() == []


async def test_entry_of_a_dead_instance_is_undone(world: World) -> None:
    first = await world.start()
    claim = world.claim("a1", world.device())
    await prepare(first, claim)
    path = world.directory / "claims/a1.json"
    path.write_text(path.read_text().replace('"state":"prepared"', '"state":"preparing"'))
    kill(first)

    await world.start()

    assert world.leftovers() == []


async def test_calls_for_one_claim_at_the_same_time(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())

    one, two, end = await asyncio.gather(
        preparer.prepare([claim]), preparer.prepare([claim]), preparer.unprepare([claim])
    )

    assert devices_of(one["a1"]) == devices_of(two["a1"])
    assert end == {"a1": None}
    assert world.leftovers() == []


async def test_cancelled_call_does_not_stop_its_work(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    call = asyncio.create_task(preparer.prepare([claim]))
    await until(lambda: bool(world.api.requests))
    call.cancel()
    await preparer.idle()

    assert world.journal()["a1"]["state"] == "prepared"


async def test_changed_returns_after_each_change(world: World) -> None:
    preparer = await world.start()
    claim = world.claim("a1", world.device())
    for call in (preparer.prepare, preparer.unprepare):
        change = asyncio.create_task(preparer.changed())
        await asyncio.sleep(0)
        await call([claim])
        await change
