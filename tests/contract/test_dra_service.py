"""The service of a DRA driver as the kubelet and other programs see it."""

import asyncio
import os
import socket
from typing import Self

import pytest
from draservices import DRIVER, ServedDriver, claim, prepare, serving, unprepare, watch
from waiting import until

from accelplane import rpc
from accelplane.kubelet import pluginregistration_v1_pb2 as pb

UID = "3f0c2e0e-93a2-4f2f-a1c5-0d1f7a4c2b11"
OTHER_UID = "7b8d0a1f-2f0a-4b6e-9d8f-9a0b1c2d3e4f"


# Registration


async def test_get_info_names_the_driver_its_socket_and_the_versions_newest_first(driver: ServedDriver) -> None:
    for _ in range(2):  # each start of a kubelet asks again
        info = await driver.get_info()
        assert (info.type, info.name, info.endpoint) == ("DRAPlugin", DRIVER, driver.endpoint)
        assert list(info.supported_versions) == [
            *("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
        ]


async def test_slices_are_published_only_after_the_kubelet_has_confirmed(kubelet_dir: str) -> None:
    async with serving(ServedDriver(kubelet_dir)) as driver:
        await driver.waits_for_registration()
        await driver.get_info()
        assert (driver.published, driver.service.status.stage) == ([], "serving")
        await driver.registered()
        assert (driver.published, driver.service.status.stage) == ([True], "registered")


async def test_each_further_registration_is_reported(driver: ServedDriver) -> None:
    await driver.notify()
    assert driver.published == [True, True]


async def test_sockets_are_private_and_no_temporary_name_remains(driver: ServedDriver, kubelet_dir: str) -> None:
    for path in (driver.registration, driver.endpoint):
        assert os.stat(path).st_mode & 0o777 == 0o600
    assert os.listdir(f"{kubelet_dir}/plugins_registry") == [f"{DRIVER}-reg.sock"]
    assert sorted(os.listdir(f"{kubelet_dir}/plugins/{DRIVER}")) == ["dra.sock", "publish.lock"]


async def test_the_driver_waits_for_the_kubelets_directory(directory: str) -> None:
    async with serving(ServedDriver(directory)) as driver:
        await until(lambda: "plugins_registry does not exist" in driver.service.status.problem)
        assert not os.path.exists(f"{directory}/plugins")
        os.mkdir(f"{directory}/plugins_registry")
        driver.service.wake.notify_all()
        await driver.registered()
        assert driver.service.status.problem == ""


@pytest.mark.parametrize("socket_name", ["registration", "endpoint"])
async def test_a_removed_socket_is_created_again(driver: ServedDriver, socket_name: str) -> None:
    path: str = getattr(driver, socket_name)
    os.unlink(path)
    driver.service.wake.notify_all()
    await until(lambda: os.path.exists(path))
    assert (await driver.get_info()).name == DRIVER


@pytest.mark.virtual_time
@pytest.mark.parametrize("version", [None, (1, 33), (1, 35)])
async def test_rejected_registration_creates_the_socket_again(
    kubelet_dir: str, version: tuple[int, int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(ServedDriver(kubelet_dir, version=version)) as driver:
        await driver.waits_for_registration()
        first = os.stat(driver.registration).st_ino
        await driver.notify("endpoint is registered\nalready")
        assert "rejected the registration: endpoint is registered already" in driver.service.status.problem
        assert driver.published == []
        await until(lambda: os.stat(driver.registration).st_ino != first, 60)
        await driver.registered()
        assert driver.service.status.problem == ""


@pytest.mark.virtual_time
async def test_since_1_36_the_kubelet_repeats_a_rejected_registration_itself(
    kubelet_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(ServedDriver(kubelet_dir, version=(1, 36))) as driver:
        await driver.waits_for_registration()
        first = os.stat(driver.registration).st_ino
        for _ in range(3):
            await driver.notify("no")
            await asyncio.sleep(60)
        assert os.stat(driver.registration).st_ino == first
        assert [record.message for record in caplog.records if "rejected" in record.message] == [
            f"{DRIVER}: the kubelet has rejected the registration: no"
        ]
        assert driver.events == [("RegistrationRejected", "the kubelet has rejected the registration: no", None)]


async def test_a_rejection_after_a_registration_ends_publishing(driver: ServedDriver) -> None:
    await driver.notify("no")
    await until(lambda: driver.published == [True, False])


@pytest.mark.virtual_time
async def test_a_directory_that_is_not_usable_is_reported_and_tried_again(kubelet_dir: str) -> None:
    path = f"{kubelet_dir}/plugins"
    with open(path, "w"):
        pass
    async with serving(ServedDriver(kubelet_dir)) as driver:
        await until(lambda: driver.service.status.problem != "")
        assert (
            f"{driver.endpoint} and the lock beside it: Not a directory; check the mode"
            in driver.service.status.problem
        )
        os.unlink(path)
        await until(lambda: os.path.exists(driver.registration), 60)
        await driver.registered()


@pytest.mark.virtual_time
async def test_without_a_usable_lock_nothing_is_published(kubelet_dir: str) -> None:
    async with serving(ServedDriver(kubelet_dir)) as driver:
        await driver.waits_for_registration()
        lock = f"{kubelet_dir}/plugins/{DRIVER}/publish.lock"
        os.mkdir(lock)
        await driver.notify()
        await until(lambda: "Is a directory" in driver.service.status.problem)
        assert driver.published == []
        os.rmdir(lock)
        await until(lambda: driver.published == [True], 60)


# Connections


@pytest.mark.virtual_time
async def test_watched_directories_are_checked_seldom_except_for_what_causes_no_event(kubelet_dir: str) -> None:
    driver = ServedDriver(kubelet_dir, check_interval=3600.0)
    async with serving(driver):
        await driver.registered()
        assert await driver.service._reconcile() == 3600
        async with serving(ServedDriver(kubelet_dir, instance=UID)) as other:
            await other.waits_for_registration()
            assert await driver.service._reconcile() == 30
        assert await driver.service._reconcile() == 3600
        os.mkdir(f"{kubelet_dir}/plugins_registry/subdirectory")
        assert await driver.service._reconcile() == 30


async def test_a_lost_connection_creates_the_registration_socket_again(driver: ServedDriver) -> None:
    first = os.stat(driver.registration).st_ino
    async with rpc.Channel(driver.endpoint) as channel:
        await prepare(channel, claim("a"))
        await asyncio.sleep(2)
    await until(lambda: driver.published == [True, False])
    await asyncio.sleep(4)
    assert os.stat(driver.registration).st_ino == first
    await asyncio.sleep(2)
    second = os.stat(driver.registration).st_ino
    assert second != first
    await asyncio.sleep(20)  # not again within 30 s
    assert os.stat(driver.registration).st_ino == second
    await driver.registered()
    assert driver.published == [True, False, True]


@pytest.mark.virtual_time
async def test_a_connection_that_returns_needs_no_new_registration(driver: ServedDriver) -> None:
    first = os.stat(driver.registration).st_ino
    async with rpc.Channel(driver.endpoint) as channel:
        await prepare(channel, claim("a"))
        await asyncio.sleep(2)
    await until(lambda: driver.published == [True, False])
    async with rpc.Channel(driver.endpoint) as channel:
        await prepare(channel, claim("a"))
        await until(lambda: driver.published == [True, False, True])
        await asyncio.sleep(60)
        assert os.stat(driver.registration).st_ino == first


@pytest.mark.virtual_time
async def test_kubelet_1_33_connects_only_for_calls(kubelet_dir: str) -> None:
    async with serving(ServedDriver(kubelet_dir, version=(1, 33))) as driver:
        await driver.registered()
        first = os.stat(driver.registration).st_ino
        async with rpc.Channel(driver.endpoint) as channel:
            await prepare(channel, claim("a"), version="v1beta1")
            await asyncio.sleep(2)
        await asyncio.sleep(600)
        assert os.stat(driver.registration).st_ino == first
        assert driver.published == [True]


# Other programs


class ForeignDriver:
    """A DRA driver of another vendor: it answers GetInfo."""

    def __init__(self, path: str, name: str = DRIVER) -> None:
        self.path = path
        self._info = pb.PluginInfo(type="DRAPlugin", name=name, endpoint="/run/other/dra.sock")
        self._server = rpc.RpcServer(
            {"/pluginregistration.Registration/GetInfo": rpc.unary(pb.InfoRequest, pb.PluginInfo, self._get_info)}
        )

    async def _get_info(self, _request: pb.InfoRequest) -> pb.PluginInfo:
        return self._info

    async def __aenter__(self) -> Self:
        await self._server.start(self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()


async def test_a_foreign_driver_of_the_same_name_prevents_registration_until_it_is_gone(kubelet_dir: str) -> None:
    foreign = f"{kubelet_dir}/plugins_registry/whatever.sock"
    async with serving(ServedDriver(kubelet_dir)) as driver:
        async with ForeignDriver(foreign):
            await until(lambda: driver.service.status.problem != "")
            problem = driver.service.status.problem
            assert f"process {os.getpid()} is registered as {DRIVER}" in problem
            assert foreign in problem
            assert "/run/other/dra.sock" in problem
            assert not os.path.exists(driver.registration)
            assert driver.events == [("DriverNameInUse", problem, None)]
        driver.service.wake.notify_all()
        await driver.registered()


async def test_a_foreign_driver_that_starts_later_ends_the_registration(driver: ServedDriver, kubelet_dir: str) -> None:
    async with ForeignDriver(f"{kubelet_dir}/plugins_registry/{DRIVER}-{UID}-reg.sock"):
        driver.service.wake.notify_all()
        await until(lambda: driver.published == [True, False])
        assert not os.path.exists(driver.registration)
        async with rpc.Channel(driver.endpoint) as channel:  # running pods still end
            assert await unprepare(channel, claim("a")) == {"uid-a": ""}


async def test_drivers_with_other_names_and_files_do_not_matter(kubelet_dir: str) -> None:
    registry = f"{kubelet_dir}/plugins_registry"
    os.mkdir(f"{registry}/subdirectory")
    with open(f"{registry}/file.sock", "w"):
        pass
    async with (
        ForeignDriver(f"{registry}/subdirectory/other.sock", "other.example.com"),
        ForeignDriver(f"{registry}/.hidden.sock"),
        serving(ServedDriver(kubelet_dir)) as driver,
    ):
        await driver.registered()


async def test_a_socket_that_does_not_answer_is_asked_again(kubelet_dir: str) -> None:
    path = f"{kubelet_dir}/plugins_registry/slow.sock"
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(path)
    async with serving(ServedDriver(kubelet_dir)) as driver:
        await driver.registered()
        bound.close()
        os.unlink(path)
        async with ForeignDriver(path):  # without a notification
            await until(lambda: driver.published == [True, False])


async def test_the_second_process_with_the_same_socket_waits(driver: ServedDriver, kubelet_dir: str) -> None:
    async with serving(ServedDriver(kubelet_dir)) as second:
        await until(lambda: f"in use by process {os.getpid()}" in second.service.status.problem)
        assert driver.service.status.stage == "registered"
        driver.service.stop()
        assert driver.task is not None
        await driver.task
        await second.registered()


async def test_sockets_of_ended_instances_are_removed_and_those_of_others_stay(kubelet_dir: str) -> None:
    registry, directory = f"{kubelet_dir}/plugins_registry", f"{kubelet_dir}/plugins/{DRIVER}"
    os.makedirs(directory)
    ended = [f"{registry}/{DRIVER}-{UID}-reg.sock", f"{directory}/dra-{UID}.sock"]
    others = [f"{registry}/{DRIVER}-of-another-reg.sock", f"{registry}/other.example.com-reg.sock"]
    for path in (*ended, *others, f"{registry}/{DRIVER}-reg.sock"):
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(path)
        bound.close()
    async with serving(ServedDriver(kubelet_dir)) as driver:
        await until(lambda: not any(map(os.path.exists, ended)))
        await until(lambda: driver.service.status.stage == "serving")
        await driver.registered()
        assert all(map(os.path.exists, others))


# Two instances


async def test_only_one_of_two_instances_publishes_until_the_first_stops(kubelet_dir: str) -> None:
    async with serving(ServedDriver(kubelet_dir, instance=UID)) as first:
        await first.registered()
        async with serving(ServedDriver(kubelet_dir, instance=OTHER_UID)) as second:
            await second.waits_for_registration()
            await second.notify()
            await until(lambda: second.service.status.stage == "registered")
            assert list(second.service.status.other_instances) == [first.endpoint]
            assert not second.service.status.publishing
            first.service.stop()
            await until(lambda: second.published == [True])
            assert first.published == [True, False]
            assert not os.path.exists(first.registration)


@pytest.mark.virtual_time
async def test_the_health_is_sent_again_after_another_instance_has_stopped(kubelet_dir: str) -> None:
    async with (
        serving(ServedDriver(kubelet_dir, instance=OTHER_UID)) as second,
        serving(ServedDriver(kubelet_dir, instance=UID)) as first,
    ):
        await first.waits_for_registration()
        await second.registered()
        second.service.wake.notify_all()
        await until(lambda: len(second.service.status.other_instances) == 1)
        async with rpc.Channel(second.endpoint) as channel:
            messages = watch(channel)
            await anext(messages)
            first.service.stop()
            second.service.wake.notify_all()
            async with asyncio.timeout(35):  # the usual interval is 120 s
                for _ in range(6):
                    await anext(messages)
            await messages.aclose()


# Shutdown


@pytest.mark.virtual_time
async def test_a_stopping_driver_finishes_calls_before_its_registration_ends(driver: ServedDriver) -> None:
    driver.preparer.proceed.clear()
    async with rpc.Channel(driver.endpoint) as channel:
        call = asyncio.create_task(prepare(channel, claim("a")))
        await until(lambda: driver.preparer.calls != [])
        driver.service.stop()
        await until(lambda: driver.published == [True, False])
        await asyncio.sleep(3)
        assert os.path.exists(driver.registration)  # the kubelet cancels calls when it is removed
        driver.preparer.proceed.set()
        assert (await call)["uid-a"].devices[0].device_name == "a"
    assert driver.task is not None
    await driver.task
    assert driver.service.status.stage == "stopped"
    assert not os.path.exists(driver.registration)
    assert not os.path.exists(driver.endpoint)


@pytest.mark.virtual_time
async def test_a_stopping_driver_waits_for_calls_for_25_seconds(driver: ServedDriver) -> None:
    driver.preparer.proceed.clear()
    loop = asyncio.get_running_loop()
    async with rpc.Channel(driver.endpoint) as channel:
        call = asyncio.create_task(prepare(channel, claim("a")))
        await until(lambda: driver.preparer.calls != [])
        call.cancel()  # the kubelet no longer waits, the work goes on
        start = loop.time()
        driver.service.stop()
        assert driver.task is not None
        await asyncio.wait([driver.task])
        assert 25 <= loop.time() - start < 26
    driver.preparer.proceed.set()
