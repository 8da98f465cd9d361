"""Leader election: one leader at a time with any behaviour of replicas and API server."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest
from kubeapi import KubeApi
from waiting import until

from accelplane.apiserver.errors import NotFound
from accelplane.kube.client import Client
from accelplane.kube.leader import Election, LeaderElector, LeaseLost, boot_time
from accelplane.kube.metrics import Metrics
from accelplane.kube.models import Lease, LeaseSpec
from accelplane.kube.objects import Metadata

PATH = "/apis/coordination.k8s.io/v1/namespaces/n/leases"


def candidate(client: Client, identity: str, *, renew: float = 0.6) -> LeaderElector:
    return LeaderElector(
        client,
        Election(name="l", namespace="n", identity=identity, lease_duration=1, renew_deadline=renew, retry_period=0.05),
    )


async def with_timeout(awaitable: Awaitable[None]) -> None:
    async with asyncio.timeout(5):
        await awaitable


def holder(api: KubeApi) -> object:
    return (api.get("leases", "l", "n") or {}).get("spec", {}).get("holderIdentity")


async def test_a_candidate_waits_until_the_lease_is_released(api: KubeApi, client: Client) -> None:
    first, second = candidate(client, "first"), candidate(client, "second")
    await with_timeout(first.acquire())
    holding = asyncio.create_task(first.renew())
    waiting = asyncio.create_task(second.acquire())
    # longer than the Lease would last if it were not renewed
    for _ in range(30):
        await asyncio.sleep(0.05)
        assert (first.leading, second.leading, holder(api)) == (True, False, "first")
    holding.cancel()
    await first.release()
    await with_timeout(waiting)
    assert (first.leading, second.leading, holder(api)) == (False, True, "second")
    assert api.get("leases", "l", "n")["spec"]["leaseTransitions"] == 1  # pyright: ignore[reportOptionalSubscript]


async def test_a_lease_is_taken_over_after_its_duration(api: KubeApi, client: Client) -> None:
    await with_timeout(candidate(client, "dead").acquire())
    second = candidate(client, "second")
    loop = asyncio.get_running_loop()
    began = loop.time()
    await with_timeout(second.acquire())
    assert loop.time() - began >= 1
    assert holder(api) == "second"


async def test_a_leader_that_restarts_with_its_identity_keeps_the_acquire_time(api: KubeApi, client: Client) -> None:
    await with_timeout(candidate(client, "one").acquire())
    acquired = api.objects["leases", "n", "l"]["spec"]["acquireTime"]
    await with_timeout(candidate(client, "one").acquire())
    assert api.objects["leases", "n", "l"]["spec"]["acquireTime"] == acquired


async def test_a_lease_with_another_holder_is_lost(api: KubeApi, client: Client) -> None:
    leader = candidate(client, "one")
    await with_timeout(leader.acquire())
    lease = api.objects["leases", "n", "l"]
    api.put("leases", {**lease, "spec": {**lease["spec"], "holderIdentity": "another"}})
    with pytest.raises(LeaseLost, match="lease n/l: lost by one: held by another"):
        await with_timeout(leader.renew())
    assert not leader.leading
    await leader.release()
    assert holder(api) == "another"


@pytest.mark.parametrize("how", [{"status": 500}, {"status": 409}, {"status": 429}, {"hang": True}, {}])
async def test_a_lease_that_cannot_be_renewed_is_lost_before_it_expires(
    api: KubeApi, client: Client, how: dict[str, int]
) -> None:
    leader = candidate(client, "one")
    await with_timeout(leader.acquire())
    api.fault(PATH, times=1_000_000, **how)
    began = asyncio.get_running_loop().time()
    with pytest.raises(LeaseLost, match=r"not renewed for 0\.6 s"):
        await with_timeout(leader.renew())
    assert asyncio.get_running_loop().time() - began < 1
    assert not leader.leading


async def test_a_few_failed_renewals_do_not_lose_the_lease(api: KubeApi, client: Client) -> None:
    leader = candidate(client, "one")
    await with_timeout(leader.acquire())
    api.fault(f"GET {PATH}", 500, times=2)
    api.fault(f"PUT {PATH}", times=2)
    api.fault(f"PUT {PATH}", 409, times=1)
    holding = asyncio.create_task(leader.renew())
    writes = api.count("PUT")
    await until(lambda: api.count("PUT") > writes + 8)
    assert leader.leading
    assert not holding.done()
    holding.cancel()


async def test_a_lease_is_renewed_without_reading_it(api: KubeApi, client: Client) -> None:
    leader = candidate(client, "one")
    await with_timeout(leader.acquire())
    first = api.objects["leases", "n", "l"]["spec"]["renewTime"]
    reads = api.count("GET .*/leases/l")
    holding = asyncio.create_task(leader.renew())
    await until(lambda: api.count("PUT .*/leases/l") >= 5)
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    assert api.count("GET .*/leases/l") == reads
    assert api.objects["leases", "n", "l"]["spec"]["renewTime"] > first


async def test_a_lease_that_another_program_wrote_is_read_before_it_is_renewed(api: KubeApi, client: Client) -> None:
    leader = candidate(client, "one")
    await with_timeout(leader.acquire())
    lease = api.objects["leases", "n", "l"]
    api.put("leases", {**lease, "metadata": {**lease["metadata"], "labels": {"by": "another"}}})
    holding = asyncio.create_task(leader.renew())
    renewed = lease["spec"]["renewTime"]
    await until(lambda: api.objects["leases", "n", "l"]["spec"]["renewTime"] > renewed)
    assert api.objects["leases", "n", "l"]["metadata"]["labels"] == {"by": "another"}
    assert not holding.done()
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)


async def test_a_deleted_lease_is_created_again(api: KubeApi, client: Client) -> None:
    leader = candidate(client, "one")
    await with_timeout(leader.acquire())
    holding = asyncio.create_task(leader.renew())
    api.remove("leases", "l", "n")
    await until(lambda: holder(api) == "one")
    assert leader.leading
    holding.cancel()


async def test_at_most_one_of_many_candidates_leads(api: KubeApi, client: Client) -> None:
    candidates = [candidate(client, f"c{number}") for number in range(6)]
    leaders: list[str] = []

    async def compete(one: LeaderElector) -> None:
        await one.acquire()
        holding = asyncio.create_task(one.renew())
        for _ in range(5):
            assert [other.election.identity for other in candidates if other.leading] == [one.election.identity]
            await asyncio.sleep(0.01)
        leaders.append(one.election.identity)
        holding.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await holding
        await one.release()

    async with asyncio.timeout(20):
        await asyncio.gather(*(compete(one) for one in candidates))
    assert sorted(leaders) == [one.election.identity for one in candidates]


async def test_release_ends_though_the_server_does_not_respond(
    api: KubeApi, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    leader = candidate(client, "one")
    await with_timeout(leader.acquire())
    api.fault(f"PUT {PATH}", hang=True)
    await with_timeout(leader.release())
    assert "lease n/l: not released" in caplog.text


async def test_release_retries_after_a_late_renewal(api: KubeApi, client: Client) -> None:
    leader = candidate(client, "one")
    await with_timeout(leader.acquire())
    api.fault(f"PUT {PATH}", 409)
    await with_timeout(leader.release())
    assert not holder(api)


async def test_a_suspended_leader_has_lost_the_lease_when_it_wakes_up(api: KubeApi, client: Client) -> None:
    slept = [0.0]
    leader = LeaderElector(
        client,
        Election(name="l", namespace="n", identity="one", lease_duration=1, renew_deadline=0.6, retry_period=0.05),
        clock=lambda: boot_time() + slept[0],
    )
    await with_timeout(leader.acquire())
    slept[0] = 3600
    with pytest.raises(LeaseLost, match=r"not renewed for 0\.6 s"):
        await with_timeout(leader.renew())


def test_invalid_times_are_rejected() -> None:
    with pytest.raises(ValueError, match="renew_deadline > retry_period > 0, found 15, 20, 2"):
        Election(name="l", namespace="n", identity="i", renew_deadline=20)


class LeaseApi:
    """A client with one Lease in memory. Each request takes `latency` seconds of virtual time."""

    def __init__(self, clock: list[float]) -> None:
        self.metrics = Metrics()
        self.clock = clock
        self.latency = {"get": 0.0, "create": 0.0, "replace": 0.0}
        self.spec: LeaseSpec | None = None

    def without_rate_limit(self) -> "LeaseApi":
        return self

    def _pass(self, request: str) -> None:
        self.clock[0] += self.latency[request]

    async def get(self, _kind: type[Lease], name: str, namespace: str) -> Lease:
        self._pass("get")
        if self.spec is None:
            raise NotFound("GET", code=404)
        return Lease(metadata=Metadata(name=name, namespace=namespace), spec=msgspec.structs.replace(self.spec))

    async def create(self, lease: Lease) -> Lease:
        self._pass("create")
        self.spec = lease.spec
        return lease

    async def replace(self, lease: Lease) -> Lease:
        self._pass("replace")
        self.spec = lease.spec
        return lease


def elector(api: Any) -> LeaderElector:
    election = Election(name="l", namespace="n", identity="one")
    return LeaderElector(api, election, clock=lambda: api.clock[0])


@pytest.mark.parametrize("slow", ["get", "create", "replace"])
async def test_the_lease_counts_from_the_start_of_the_request(slow: str) -> None:
    api = LeaseApi([1000.0])
    leader = elector(api)
    if slow == "replace":
        api.spec = LeaseSpec(holderIdentity="", leaseDurationSeconds=1)
    api.latency[slow] = 4.0
    await leader.acquire()
    assert api.clock == [1004.0]
    api.clock[0] = 1009.9
    leader.check()
    api.clock[0] = 1010.0
    with pytest.raises(LeaseLost, match="not renewed for 10 s"):
        leader.check()


@pytest.mark.parametrize(("holders", "expected"), [(40, 40), (3, 3), (None, 15)])
async def test_a_candidate_waits_for_the_duration_that_the_holder_set(holders: int | None, expected: int) -> None:
    api = LeaseApi([1000.0])
    api.spec = LeaseSpec(holderIdentity="another", leaseDurationSeconds=holders)
    candidate = elector(api)
    assert not await candidate._try("acquire")
    api.clock[0] = 1000.0 + expected - 0.1
    assert not await candidate._try("acquire")
    api.clock[0] = 1000.0 + expected
    assert await candidate._try("acquire")
    assert api.spec.holderIdentity == "one"


async def test_a_lease_whose_acquisition_was_cancelled_is_released() -> None:
    api = LeaseApi([1000.0])
    candidate = elector(api)
    create = api.create

    async def create_without_response(lease: Lease) -> Lease:
        await create(lease)
        await asyncio.Event().wait()
        return lease

    api.create = create_without_response
    acquiring = asyncio.create_task(candidate.acquire())
    await until(lambda: api.spec is not None)
    acquiring.cancel()
    await asyncio.gather(acquiring, return_exceptions=True)
    assert not candidate.leading
    await candidate.release()
    assert api.spec
    assert not api.spec.holderIdentity


async def test_a_candidate_that_never_wrote_releases_nothing() -> None:
    api = LeaseApi([1000.0])
    await elector(api).release()
    api.spec = LeaseSpec(holderIdentity="another", leaseDurationSeconds=15)
    candidate = elector(api)
    assert not await candidate._try("acquire")
    await candidate.release()
    assert api.spec.holderIdentity == "another"


async def test_a_candidate_waits_for_the_retry_period_between_attempts(api: KubeApi, client: Client) -> None:
    await with_timeout(candidate(client, "first").acquire())
    election = Election(
        name="l", namespace="n", identity="second", lease_duration=4000, renew_deadline=3000, retry_period=2000
    )
    reads = api.count(f"GET {PATH}")
    waiting = asyncio.create_task(LeaderElector(client, election).acquire())
    await until(lambda: api.count(f"GET {PATH}") == reads + 1)
    await asyncio.sleep(0.1)
    assert api.count(f"GET {PATH}") == reads + 1
    waiting.cancel()


async def test_the_same_problem_of_several_attempts_is_logged_once(
    api: KubeApi, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    api.fault(f"GET {PATH}", 500, times=3)
    await with_timeout(candidate(client, "one").acquire())
    assert caplog.text.count("cannot acquire it") == 1
