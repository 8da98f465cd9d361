"""Leader election: one at a time, whoever dies and whatever the server does."""

import asyncio
import contextlib
from collections.abc import Awaitable

import pytest
from kubeapi import KubeApi
from waiting import until

from accelplane.kube.client import Client
from accelplane.kube.leader import Election, LeaderElector, LeaseLost, boot_time

PATH = "/apis/coordination.k8s.io/v1/namespaces/n/leases"


def candidate(client: Client, identity: str, *, renew: float = 0.6) -> LeaderElector:
    return LeaderElector(
        client,
        Election(name="l", namespace="n", identity=identity, lease_duration=1, renew_deadline=renew, retry_period=0.05),
    )


async def soon(awaitable: Awaitable[None]) -> None:
    async with asyncio.timeout(5):
        await awaitable


def holder(api: KubeApi) -> object:
    return (api.get("leases", "l", "n") or {}).get("spec", {}).get("holderIdentity")


async def test_the_first_one_leads_and_the_second_waits_until_it_is_released(api: KubeApi, client: Client) -> None:
    first, second = candidate(client, "first"), candidate(client, "second")
    await soon(first.acquire())
    holding = asyncio.create_task(first.renew())
    waiting = asyncio.create_task(second.acquire())
    # longer than the Lease would last if it were not renewed
    for _ in range(30):
        await asyncio.sleep(0.05)
        assert (first.leading, second.leading, holder(api)) == (True, False, "first")
    holding.cancel()
    await first.release()
    await soon(waiting)
    assert (first.leading, second.leading, holder(api)) == (False, True, "second")
    assert api.get("leases", "l", "n")["spec"]["leaseTransitions"] == 1  # pyright: ignore[reportOptionalSubscript]


async def test_a_leader_that_died_is_followed_after_its_lease(api: KubeApi, client: Client) -> None:
    await soon(candidate(client, "dead").acquire())
    second = candidate(client, "second")
    loop = asyncio.get_running_loop()
    began = loop.time()
    await soon(second.acquire())
    assert loop.time() - began >= 1
    assert holder(api) == "second"


async def test_a_leader_that_comes_back_under_its_name_leads_on(api: KubeApi, client: Client) -> None:
    await soon(candidate(client, "one").acquire())
    acquired = api.objects["leases", "n", "l"]["spec"]["acquireTime"]
    await soon(candidate(client, "one").acquire())
    assert api.objects["leases", "n", "l"]["spec"]["acquireTime"] == acquired


async def test_who_finds_another_in_its_place_has_lost(api: KubeApi, client: Client) -> None:
    leader = candidate(client, "one")
    await soon(leader.acquire())
    lease = api.objects["leases", "n", "l"]
    api.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": "another"}})
    with pytest.raises(LeaseLost, match="lease n/l: lost by one: another holds it"):
        await soon(leader.renew())
    assert not leader.leading
    await leader.release()
    assert holder(api) == "another"


@pytest.mark.parametrize("how", [{"status": 500}, {"status": 409}, {"status": 429}, {"hang": True}, {}])
async def test_who_cannot_renew_has_lost_before_the_lease_ends(
    api: KubeApi, client: Client, how: dict[str, int]
) -> None:
    leader = candidate(client, "one")
    await soon(leader.acquire())
    api.fault(PATH, times=1_000_000, **how)
    began = asyncio.get_running_loop().time()
    with pytest.raises(LeaseLost, match=r"not renewed for 0\.6 s"):
        await soon(leader.renew())
    assert asyncio.get_running_loop().time() - began < 1
    assert not leader.leading


async def test_a_few_failures_are_no_loss(api: KubeApi, client: Client) -> None:
    leader = candidate(client, "one")
    await soon(leader.acquire())
    api.fault(f"GET {PATH}", 500, times=2)
    api.fault(f"PUT {PATH}", times=2)
    api.fault(f"PUT {PATH}", 409, times=1)
    holding = asyncio.create_task(leader.renew())
    writes = api.count("PUT")
    await until(lambda: api.count("PUT") > writes + 8)
    assert leader.leading
    assert not holding.done()
    holding.cancel()


async def test_a_lease_that_somebody_deleted_is_made_again(api: KubeApi, client: Client) -> None:
    leader = candidate(client, "one")
    await soon(leader.acquire())
    holding = asyncio.create_task(leader.renew())
    api.remove("leases", "l", "n")
    await until(lambda: holder(api) == "one")
    assert leader.leading
    holding.cancel()


async def test_many_candidates_have_one_leader_at_a_time(api: KubeApi, client: Client) -> None:
    candidates = [candidate(client, f"c{number}") for number in range(6)]
    led: list[str] = []

    async def compete(one: LeaderElector) -> None:
        await one.acquire()
        holding = asyncio.create_task(one.renew())
        for _ in range(5):
            assert [other.election.identity for other in candidates if other.leading] == [one.election.identity]
            await asyncio.sleep(0.01)
        led.append(one.election.identity)
        holding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await holding
        await one.release()

    async with asyncio.timeout(20):
        await asyncio.gather(*(compete(one) for one in candidates))
    assert sorted(led) == [one.election.identity for one in candidates]


async def test_a_lease_that_cannot_be_released_holds_nobody_up(
    api: KubeApi, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    leader = candidate(client, "one")
    await soon(leader.acquire())
    api.fault(f"PUT {PATH}", hang=True)
    await soon(leader.release())
    assert "lease n/l: not released" in caplog.text


async def test_a_renewal_that_arrives_late_does_not_keep_the_lease(api: KubeApi, client: Client) -> None:
    leader = candidate(client, "one")
    await soon(leader.acquire())
    api.fault(f"PUT {PATH}", 409)
    await soon(leader.release())
    assert not holder(api)


async def test_a_leader_whose_machine_slept_has_lost_when_it_wakes_up(api: KubeApi, client: Client) -> None:
    slept = [0.0]
    leader = LeaderElector(
        client,
        Election(name="l", namespace="n", identity="one", lease_duration=1, renew_deadline=0.6, retry_period=0.05),
        clock=lambda: boot_time() + slept[0],
    )
    await soon(leader.acquire())
    slept[0] = 3600
    with pytest.raises(LeaseLost, match=r"not renewed for 0\.6 s"):
        await soon(leader.renew())


def test_times_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="renew_deadline > retry_period > 0, found 15, 20, 2"):
        Election(name="l", namespace="n", identity="i", renew_deadline=20)
