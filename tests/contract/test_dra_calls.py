"""Calls of the kubelet to a DRA driver: claims, and the health of devices."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from draservices import DRIVER, ServedDriver, claim, prepare, serving, unprepare, watch
from http2 import PREFACE, setting
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thoroughness import examples
from waiting import until

from accelplane import rpc
from accelplane.dra.model import ClaimError, DeviceHealth, PreparedDevice
from accelplane.kubelet import dra_v1_pb2 as pb


@pytest.fixture
async def channel(driver: ServedDriver) -> AsyncIterator[rpc.Channel]:
    async with rpc.Channel(driver.endpoint) as channel:
        yield channel


# Prepare and unprepare


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
async def test_prepare_answers_with_the_devices_of_each_claim(channel: rpc.Channel, version: str) -> None:
    found = await prepare(channel, claim("a"), claim("b"), version=version)
    assert found.keys() == {"uid-a", "uid-b"}
    (device,) = found["uid-a"].devices
    assert (list(device.request_names), device.pool_name, device.device_name) == (["gpu"], "node-1", "a")
    assert list(device.cdi_device_ids) == [f"k8s.{DRIVER}/claim=uid-a-a"]
    assert not device.HasField("share_id")


@pytest.mark.parametrize(("version", "share_id"), [("v1", "5b1c"), ("v1beta1", "")])
async def test_share_ids_exist_in_v1_only(
    driver: ServedDriver, channel: rpc.Channel, version: str, share_id: str
) -> None:
    driver.preparer.results["a"] = [PreparedDevice(("gpu/fast", "gpu/slow"), "node-1", "a", ("x/y=z",), "5b1c")]
    (device,) = (await prepare(channel, claim("a"), version=version))["uid-a"].devices
    assert (device.share_id, list(device.request_names)) == (share_id, ["gpu"])


async def test_one_failed_claim_of_five_leaves_the_others(driver: ServedDriver, channel: rpc.Channel) -> None:
    driver.preparer.results["c"] = ClaimError("device c is gone\n" + "x" * 400)
    found = await prepare(channel, *map(claim, "abcde"))
    assert {uid: bool(entry.error) for uid, entry in found.items()} == {f"uid-{name}": name == "c" for name in "abcde"}
    assert found["uid-c"].error.startswith("device c is gone xxx")
    assert len(found["uid-c"].error) == 300
    assert [(reason, about.uid) for reason, _, about in driver.events if about] == [("PrepareFailed", "uid-c")]
    assert driver.service.counters.prepared == 4
    assert driver.service.counters.prepare_failures == 1


async def test_unknown_claims_are_unprepared(driver: ServedDriver, channel: rpc.Channel) -> None:
    driver.preparer.results["b"] = ClaimError("device b: unbind failed")
    assert await unprepare(channel, claim("a"), claim("b")) == {"uid-a": "", "uid-b": "device b: unbind failed"}


async def test_an_exception_of_the_preparer_fails_each_claim(driver: ServedDriver, channel: rpc.Channel) -> None:
    driver.preparer.results["a"] = OSError(5, "Input/output error")
    found = await prepare(channel, claim("a"), claim("b"))
    assert {entry.error for entry in found.values()} == {"internal error: OSError: [Errno 5] Input/output error"}


async def test_a_lost_connection_does_not_interrupt_a_preparation(driver: ServedDriver) -> None:
    driver.preparer.proceed.clear()
    async with rpc.Channel(driver.endpoint) as channel:
        call = asyncio.create_task(prepare(channel, claim("a")))
        await until(lambda: driver.preparer.calls != [])
    with pytest.raises(rpc.RpcError):
        await call
    driver.preparer.proceed.set()
    await until(lambda: driver.preparer.prepared() == {"a": ("default/a",)})


@pytest.mark.parametrize(
    ("claims", "errors"),
    [
        ([claim("a", uid="../../etc")], {"../../etc": "invalid UID of the claim"}),
        ([claim("a/b")], {"uid-a/b": "invalid UID"}),
        ([claim("a/b", uid="u")], {"u": "invalid namespace or name"}),
        ([claim("a", namespace="")], {"uid-a": "invalid namespace or name"}),
        ([claim("a", uid="u"), claim("b", uid="u")], {"u": "two claims with this UID, a and b"}),
    ],
)
async def test_invalid_claims_fail_by_themselves(
    driver: ServedDriver, channel: rpc.Channel, claims: Sequence[object], errors: dict[str, str]
) -> None:
    found = await prepare(channel, *claims, claim("good"))  # type: ignore[arg-type]
    assert found.keys() == {*errors, "uid-good"}
    for uid, error in errors.items():
        assert error in found[uid].error
    assert driver.preparer.calls == [("prepare", ("good",))]


async def test_a_claim_that_is_named_twice_is_prepared_once(driver: ServedDriver, channel: rpc.Channel) -> None:
    found = await prepare(channel, claim("a"), claim("a"))
    assert len(found["uid-a"].devices) == 1
    assert driver.preparer.calls == [("prepare", ("a",))]


@pytest.mark.parametrize(
    ("claims", "error"),
    [
        ([claim("a", uid="u")] * 1001, "found 1001 claims, expected at most 1000"),
        ([claim("a"), type(claim("a"))(namespace="default", name="b")], "a claim without UID"),
    ],
)
async def test_invalid_requests_are_rejected(
    driver: ServedDriver, channel: rpc.Channel, claims: Sequence[object], error: str
) -> None:
    with pytest.raises(rpc.RpcError, match=error) as rejection:
        await prepare(channel, *claims)  # type: ignore[arg-type]
    assert rejection.value.code == "INVALID_ARGUMENT"
    assert driver.preparer.calls == []


# Health


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("version", "service", "limit", "interval"),
    [
        ((1, 34), "v1alpha1", 0, 10),
        (None, "v1alpha1", 0, 10),
        ((1, 35), "v1alpha1", 300, 120),
        ((1, 37), "v1", 300, 120),
    ],
)
async def test_health_is_complete_at_once_at_changes_and_repeated(
    kubelet_dir: str, version: tuple[int, int] | None, service: str, limit: int, interval: int
) -> None:
    healths = [DeviceHealth("a", "HEALTHY"), DeviceHealth("b", "UNHEALTHY", "too hot")]
    async with serving(ServedDriver(kubelet_dir, version=version, health=lambda: tuple(healths))) as driver:
        await driver.waits_for_registration()
        async with rpc.Channel(driver.endpoint) as channel:
            messages = watch(channel, service)
            first, second = (await anext(messages)).devices
            assert (first.device.pool_name, first.device.device_name, first.health) == ("node-1", "a", 1)
            assert (second.health, second.message, second.health_check_timeout_seconds) == (2, "too hot", limit)
            assert first.last_updated_time > 0
            assert driver.service.status.health_streams == 1
            healths[1] = DeviceHealth("b", "HEALTHY")
            driver.health_changed.notify_all()
            assert [each.health for each in (await anext(messages)).devices] == [1, 1]
            loop = asyncio.get_running_loop()
            start = loop.time()
            await anext(messages)
            assert interval - 5 <= loop.time() - start <= interval + 5
            await messages.aclose()
        await until(lambda: driver.service.status.health_streams == 0)


# Hostile peers

HYPOTHESIS = settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXTS = st.one_of(st.sampled_from(["a", "default", "", "..", "/", "a/b", "A", "-", "x" * 300]), st.text(max_size=20))
CLAIMS = st.builds(pb.Claim, namespace=TEXTS, uid=TEXTS, name=TEXTS)


@HYPOTHESIS
@given(claims=st.lists(CLAIMS, max_size=6))
async def test_any_claims_get_an_answer_for_each_uid(
    driver: ServedDriver, channel: rpc.Channel, claims: Sequence[pb.Claim]
) -> None:
    driver.preparer.calls.clear()
    uids = {claim.uid for claim in claims}
    if "" in uids:
        with pytest.raises(rpc.RpcError, match="a claim without UID"):
            await prepare(channel, *claims)
        return
    found = await prepare(channel, *claims)
    assert found.keys() == uids
    for entry in found.values():
        assert bool(entry.error) != bool(entry.devices)
        assert len(entry.error) <= 300
        assert "\n" not in entry.error
    for _, names in driver.preparer.calls:
        assert all(name.isascii() and "/" not in name for name in names)


@HYPOTHESIS
@given(
    data=st.binary(max_size=300),
    greeting=st.sampled_from([b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", PREFACE + setting()]),
    socket_name=st.sampled_from(["registration", "endpoint"]),
)
async def test_any_bytes_leave_the_sockets_usable(
    driver: ServedDriver, channel: rpc.Channel, data: bytes, greeting: bytes, socket_name: str
) -> None:
    _, writer = await asyncio.open_unix_connection(getattr(driver, socket_name))
    try:
        writer.write(greeting + data)
        await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
    assert (await driver.get_info()).name == DRIVER
    assert (await prepare(channel, claim("a")))["uid-a"].devices
