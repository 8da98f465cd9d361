"""DRA drivers at the embedded kubelet, in its behaviours by version."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable

import pytest
from draservices import DRIVER, FakePreparer, ServedDriver, serving
from memoryclaims import MemoryClaims
from waiting import until

from accelplane.dra import registration_policy
from accelplane.dra.model import ClaimError, DeviceHealth, PreparedDevice
from accelplane.kubelet.embedded import DRA_BEHAVIOURS, EmbeddedKubelet, KubeletError, Pod, PodStartError
from accelplane.kubelet.podresources import PodResources

POD = Pod("pod", containers={"main": {}, "side": {}}, claims={"gpu": "a"}, container_claims={"main": ["gpu"]})
UIDS = ("3f0c2e0e-93a2-4f2f-a1c5-0d1f7a4c2b11", "7b8d0a1f-2f0a-4b6e-9d8f-9a0b1c2d3e4f")
CDI_A = f"k8s.{DRIVER}/claim=uid-a-a"


def version(behaviour: str) -> tuple[int, int]:
    major, minor = behaviour.split(".")
    return int(major), int(minor)


@pytest.fixture
def api() -> MemoryClaims:
    claims = MemoryClaims()
    claims.allocate("a", DRIVER)
    return claims


@pytest.fixture(params=["1.34", "1.37"])
def behaviour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def kubelet(directory: str, api: MemoryClaims, behaviour: str) -> AsyncIterator[EmbeddedKubelet]:
    async with EmbeddedKubelet(directory, behaviour=behaviour, claim_api=api, unprepare_interval=0.2) as running:
        yield running


@pytest.fixture
async def driver(kubelet: EmbeddedKubelet, directory: str, behaviour: str) -> AsyncIterator[ServedDriver]:
    async with serving(ServedDriver(directory, version=version(behaviour))) as driver:
        await until(lambda: driver.service.status.publishing)
        yield driver


def only(*versions: str) -> Callable[..., None]:
    return pytest.mark.parametrize("behaviour", versions, indirect=True)  # type: ignore[return-value]


def prepared(kubelet: EmbeddedKubelet) -> list[str]:
    assert kubelet.dra is not None
    return [claim.name for claim in kubelet.dra.claims if claim.prepared]


# Prepare and unprepare


@only(*DRA_BEHAVIOURS)
async def test_a_claim_is_prepared_for_the_containers_that_use_it(
    kubelet: EmbeddedKubelet, driver: ServedDriver
) -> None:
    pod = await kubelet.run_pod(POD)
    assert pod.containers["main"].cdi_devices == (CDI_A,)
    assert pod.containers["side"].cdi_devices == ()
    kubelet.delete_pod("pod")
    await until(lambda: prepared(kubelet) == [])
    assert driver.preparer.prepared() == {}
    assert driver.preparer.calls == [("prepare", ("a",)), ("unprepare", ("a",))]


async def test_a_container_that_names_a_request_gets_its_devices_only(
    kubelet: EmbeddedKubelet, driver: ServedDriver
) -> None:
    driver.preparer.results["a"] = [
        PreparedDevice(("fast",), "node-1", "d0", ("x/y=d0", "x/y=env")),
        PreparedDevice(("slow/sub",), "node-1", "d1", ("x/y=d1",)),
    ]
    containers = {"main": ["gpu/fast"], "side": ["gpu/slow"]}
    pod = await kubelet.run_pod(Pod("pod", containers=POD.containers, claims=POD.claims, container_claims=containers))
    assert pod.containers["main"].cdi_devices == ("x/y=d0", "x/y=env")
    assert pod.containers["side"].cdi_devices == ("x/y=d1",)


async def test_two_pods_share_a_claim_and_the_last_one_unprepares_it(
    kubelet: EmbeddedKubelet, driver: ServedDriver, api: MemoryClaims
) -> None:
    api.allocate("a", DRIVER, pods=("pod", "second"))
    await kubelet.run_pod(POD)
    second = Pod("second", containers=POD.containers, claims=POD.claims, container_claims=POD.container_claims)
    assert (await kubelet.run_pod(second)).containers["main"].cdi_devices == (CDI_A,)
    kubelet.delete_pod("pod")
    await asyncio.sleep(0.3)
    assert driver.preparer.calls == [("prepare", ("a",))]
    kubelet.delete_pod("second")
    await until(lambda: driver.preparer.calls[-1] == ("unprepare", ("a",)))


async def test_claims_of_two_drivers_are_prepared_by_both(
    kubelet: EmbeddedKubelet, driver: ServedDriver, api: MemoryClaims, directory: str
) -> None:
    api.allocate("a", DRIVER, "qat.example.com")
    async with serving(ServedDriver(directory, driver="qat.example.com")) as second:
        await until(lambda: second.service.status.publishing)
        await kubelet.run_pod(POD)
        assert driver.preparer.calls == second.preparer.calls == [("prepare", ("a",))]


async def test_a_failed_claim_is_prepared_with_the_next_attempt(kubelet: EmbeddedKubelet, driver: ServedDriver) -> None:
    driver.preparer.results["a"] = ClaimError("device 0 is still held by claim default/b, waiting for its pod to end")
    with pytest.raises(PodStartError) as failure:
        await kubelet.run_pod(POD)
    assert str(failure.value) == (
        "Failed to prepare dynamic resources: prepare dynamic resources: NodePrepareResources failed for "
        "ResourceClaim a: device 0 is still held by claim default/b, waiting for its pod to end"
    )
    driver.preparer.results.clear()
    assert (await kubelet.run_pod(POD)).containers["main"].cdi_devices == (CDI_A,)


async def test_a_failed_unprepare_is_repeated(kubelet: EmbeddedKubelet, driver: ServedDriver) -> None:
    await kubelet.run_pod(POD)
    driver.preparer.results["a"] = ClaimError("unbind failed")
    kubelet.delete_pod("pod")
    await until(lambda: driver.preparer.calls.count(("unprepare", ("a",))) > 1)
    driver.preparer.results.clear()
    await until(lambda: driver.preparer.prepared() == {})


@only("1.36", "1.37")
async def test_since_1_37_a_claim_whose_unprepare_has_failed_is_not_prepared(
    kubelet: EmbeddedKubelet, driver: ServedDriver, api: MemoryClaims, behaviour: str
) -> None:
    await kubelet.run_pod(POD)
    driver.preparer.results["a"] = ClaimError("unbind failed")
    kubelet.delete_pod("pod")
    await until(lambda: driver.preparer.calls[-1][0] == "unprepare")
    if behaviour == "1.37":
        with pytest.raises(PodStartError, match="ResourceClaim a is being unprepared"):
            await kubelet.run_pod(POD)
    else:
        await kubelet.run_pod(POD)


async def test_claims_that_are_not_usable_fail_the_pod(kubelet: EmbeddedKubelet, api: MemoryClaims) -> None:
    with pytest.raises(PodStartError, match=f"DRA driver {DRIVER} is not registered"):
        await kubelet.run_pod(POD)
    api.allocate("a", DRIVER, pods=("other",))
    with pytest.raises(PodStartError, match=r"pod pod is not allowed to use ResourceClaim a \(uid-a\)"):
        await kubelet.run_pod(POD)
    api.claims.clear()
    with pytest.raises(PodStartError, match=r'fetch ResourceClaim a: .*"a" not found'):
        await kubelet.run_pod(POD)


async def test_a_replaced_claim_is_not_mixed_up_with_the_old_one(
    kubelet: EmbeddedKubelet, driver: ServedDriver, api: MemoryClaims
) -> None:
    await kubelet.run_pod(POD)
    api.allocate("a", DRIVER, pods=("second",), uid="uid-new")
    second = Pod("second", containers=POD.containers, claims=POD.claims)
    with pytest.raises(PodStartError, match="old ResourceClaim with same name a and different UID uid-a still exists"):
        await kubelet.run_pod(second)


# Restarts


@only(*DRA_BEHAVIOURS)
async def test_a_kubelet_restart_prepares_again_for_a_second_pod_only(
    kubelet: EmbeddedKubelet, driver: ServedDriver, api: MemoryClaims
) -> None:
    api.allocate("a", DRIVER, pods=("pod", "second"))
    await kubelet.run_pod(POD)
    await kubelet.restart()
    await until(lambda: kubelet.dra is not None and kubelet.dra.plugins.names() == (DRIVER,))
    assert (await kubelet.start_container("pod", "main")).cdi_devices == (CDI_A,)
    assert driver.preparer.calls == [("prepare", ("a",))]
    second = Pod("second", containers=POD.containers, claims=POD.claims, container_claims=POD.container_claims)
    assert (await kubelet.run_pod(second)).containers["main"].cdi_devices == (CDI_A,)
    assert driver.preparer.calls == [("prepare", ("a",))] * 2
    assert kubelet.dra is not None
    (claim,) = kubelet.dra.claims
    replaced = kubelet.dra.claims.get("default", "a")
    assert replaced is claim
    # Until 1.36 the devices are appended to the restored ones.
    assert len(claim.devices[DRIVER]) == (1 if driver.version == (1, 37) else 2)


async def test_a_restarted_kubelet_unprepares_claims_of_pods_that_ended_meanwhile(
    kubelet: EmbeddedKubelet, driver: ServedDriver
) -> None:
    await kubelet.run_pod(POD)
    await kubelet.stop()
    kubelet.delete_pod("pod")
    await kubelet.start()
    await until(lambda: driver.preparer.prepared() == {})


async def test_a_kubelet_registers_a_running_driver_again(
    kubelet: EmbeddedKubelet, driver: ServedDriver, api: MemoryClaims
) -> None:
    assert api.deletions == [""]
    await kubelet.restart()
    await until(lambda: driver.published[-1:] == [True] and driver.published.count(True) > 1)
    assert api.deletions == ["", ""]


async def test_a_corrupted_checkpoint_prevents_the_start(kubelet: EmbeddedKubelet, driver: ServedDriver) -> None:
    await kubelet.run_pod(POD)
    await kubelet.stop()
    path = f"{kubelet.directory}/dra_manager_state"
    with open(path) as file:
        text = file.read()
    with open(path, "w") as file:
        file.write(text.replace("uid-a", "uid-b"))
    with pytest.raises(KubeletError, match="dra_manager_state: checkpoint is corrupted"):
        await kubelet.start()


async def test_a_restarted_driver_is_used_and_its_slices_stay(
    kubelet: EmbeddedKubelet, directory: str, api: MemoryClaims, behaviour: str
) -> None:
    preparer = FakePreparer()
    for _ in range(2):
        async with serving(ServedDriver(directory, version=version(behaviour), preparer=preparer)) as driver:
            await until(lambda: driver.service.status.publishing)
            await kubelet.run_pod(POD)
            kubelet.delete_pod("pod")
            await until(lambda: preparer.prepared() == {})
            driver.service.stop()
            assert driver.task is not None
            await driver.task
    assert preparer.calls == [("prepare", ("a",)), ("unprepare", ("a",))] * 2
    assert api.deletions == [""]


async def test_slices_are_deleted_when_the_driver_does_not_return(directory: str, api: MemoryClaims) -> None:
    async with EmbeddedKubelet(directory, claim_api=api, wipe_delay=0.2), serving(ServedDriver(directory)) as driver:
        await until(lambda: driver.service.status.publishing)
        driver.service.stop()
        await until(lambda: api.deletions[:2] == ["", DRIVER])


async def test_a_failed_deletion_of_slices_is_repeated(directory: str, api: MemoryClaims) -> None:
    api.failures = 1
    async with EmbeddedKubelet(directory, claim_api=api):
        await until(lambda: api.deletions == [""])


@only("1.34", "1.36")
async def test_a_driver_whose_connection_is_lost_registers_again(
    monkeypatch: pytest.MonkeyPatch, kubelet: EmbeddedKubelet, driver: ServedDriver
) -> None:
    monkeypatch.setattr(registration_policy, "MIN_CONNECTION", 0.0)
    monkeypatch.setattr(registration_policy, "CONNECTION_TIMEOUT", 0.2)
    assert kubelet.dra is not None
    await until(lambda: driver.service.status.connections > 0)
    await kubelet.dra.plugins.find(DRIVER).close()
    await until(lambda: not driver.service.status.publishing)
    await until(lambda: driver.service.status.publishing)
    await kubelet.run_pod(POD)


# Two instances


async def test_the_newest_of_two_instances_is_called(
    kubelet: EmbeddedKubelet, directory: str, behaviour: str, api: MemoryClaims
) -> None:
    first, second = (ServedDriver(directory, version=version(behaviour), instance=uid) for uid in UIDS)
    async with serving(first):
        await until(lambda: first.service.status.publishing)
        await kubelet.run_pod(POD)
        async with serving(second):
            await until(lambda: second.service.status.stage == "registered")
            first.service.stop()
            await until(lambda: second.service.status.publishing)
            api.allocate("b", DRIVER)
            await kubelet.run_pod(
                Pod("pod", containers=POD.containers, claims={"gpu": "b"}, container_claims=POD.container_claims)
            )
            assert second.preparer.calls == [("prepare", ("b",))]
            assert api.deletions == [""]


@only("1.37")
async def test_pods_start_without_a_gap_while_an_instance_replaces_another(
    kubelet: EmbeddedKubelet, directory: str, behaviour: str, api: MemoryClaims
) -> None:
    preparer, started = FakePreparer(), 0
    instances = [
        ServedDriver(directory, version=version(behaviour), instance=f"{number}{UIDS[0][1:]}", preparer=preparer)
        for number in range(2)
    ]

    async def start_pods() -> None:
        nonlocal started
        while True:
            name = f"claim-{started}"
            api.allocate(name, DRIVER)
            described = Pod("pod", containers={"main": {}}, claims={"gpu": name}, container_claims={"main": ["gpu"]})
            assert (await kubelet.run_pod(described)).containers["main"].cdi_devices
            kubelet.delete_pod("pod")
            started += 1
            await asyncio.sleep(0.01)

    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(serving(instances[0]))
        await until(lambda: instances[0].service.status.publishing)
        pods = asyncio.create_task(start_pods())
        for old, new in itertools.pairwise(instances):
            await stack.enter_async_context(serving(new))
            await until(lambda: new.service.status.stage == "registered")  # noqa: B023
            old.service.stop()
            await until(lambda: new.service.status.publishing)  # noqa: B023
            assert old.task is not None
            await old.task
        before = started
        await until(lambda: pods.done() or started > before + 5)
        assert not pods.done(), pods.exception()
        pods.cancel()
        await asyncio.wait([pods])
        await until(lambda: preparer.prepared() == {})
    assert api.deletions == [""]


async def test_an_endpoint_is_registered_once(
    kubelet: EmbeddedKubelet, driver: ServedDriver, behaviour: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A second name of the registration socket, as other drivers have left behind."""
    os.link(driver.registration, f"{driver.registration}.second")
    await until(lambda: "already registered for DRA driver plugin" in driver.service.status.problem)


# Health and the pod resources API


@only("1.36", "1.37")
async def test_the_health_of_devices_is_watched(kubelet: EmbeddedKubelet, directory: str, behaviour: str) -> None:
    healths = [DeviceHealth("a", "UNHEALTHY", "too hot")]
    async with serving(ServedDriver(directory, version=version(behaviour), health=lambda: healths)) as driver:
        assert kubelet.dra is not None
        health = kubelet.dra.health
        await until(lambda: health.status(DRIVER, "node-1", "a") == ("Unhealthy", "too hot"))
        healths[0] = DeviceHealth("a", "HEALTHY")
        driver.health_changed.notify_all()
        await until(lambda: health.status(DRIVER, "node-1", "a") == ("Healthy", ""))
        assert health.status(DRIVER, "node-1", "b") == ("Unknown", "")
        driver.service.stop()
        await until(lambda: health.status(DRIVER, "node-1", "a") == ("Unknown", ""))


@only("1.33", "1.34")
async def test_until_1_35_the_health_is_not_watched_by_default(kubelet: EmbeddedKubelet, driver: ServedDriver) -> None:
    await kubelet.run_pod(POD)
    assert driver.service.status.health_streams == 0


@only(*DRA_BEHAVIOURS)
async def test_the_pod_resources_api_lists_claims_since_1_34(
    kubelet: EmbeddedKubelet, driver: ServedDriver, behaviour: str
) -> None:
    await kubelet.run_pod(POD)
    holders = (await PodResources(kubelet.pod_resources_socket).list_holders()).claims
    if behaviour == "1.33":
        assert holders == ()
        return
    (holder,) = holders
    assert (holder.namespace, holder.pod, holder.container) == ("default", "pod", "main")
    assert (holder.driver, holder.pool, holder.device, holder.cdi_names) == (DRIVER, "node-1", "a", (CDI_A,))


async def test_a_kubelet_without_api_server_has_no_claims(directory: str) -> None:
    async with EmbeddedKubelet(directory) as kubelet:
        assert not os.path.exists(f"{directory}/plugins_registry")
        with pytest.raises(KubeletError, match="pod pod has claims, but the kubelet has no API server"):
            await kubelet.run_pod(POD)


@pytest.mark.parametrize(
    ("container_claims", "error"),
    [({"other": ["gpu"]}, "container other, which the pod does not have"), ({"main": ["x/r"]}, "claim x is not in")],
)
def test_a_pod_with_undefined_claims_is_rejected(container_claims: dict[str, list[str]], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Pod("pod", containers={"main": {}}, claims={"gpu": "a"}, container_claims=container_claims)
