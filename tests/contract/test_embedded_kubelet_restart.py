"""The embedded kubelet after a restart, and requests that crash a real kubelet."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from embeddedkubelets import GADGET, PREFERS, counts, join, request_pod
from fake_plugin import FakePlugin, HandlerError, listing

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.checkpoint import read_checkpoint
from accelplane.kubelet.embedded import AdmissionError, EmbeddedKubelet, NoSuchPod


@pytest.fixture
async def kubelet(directory: str) -> AsyncIterator[EmbeddedKubelet]:
    async with EmbeddedKubelet(directory, connect_timeout=1.0, call_timeout=2.0, seed=1) as running:
        yield running


async def test_after_a_restart_pods_keep_their_devices_and_plugins_must_register_again(
    kubelet: EmbeddedKubelet,
) -> None:
    plugin = await join(kubelet, FakePlugin(kubelet.directory))
    running = await kubelet.run_pod(request_pod(2))
    await kubelet.restart()
    assert not os.path.exists(plugin.path)
    assert counts(kubelet) == (0, 0)
    with pytest.raises(AdmissionError, match="no healthy devices present"):
        await kubelet.run_pod(request_pod(1, name="early"))
    assert await kubelet.start_container("pod", "main") == running.containers["main"]
    await plugin.abort()
    plugin = await join(kubelet, FakePlugin(kubelet.directory))
    with pytest.raises(AdmissionError, match="Requested: 2, Available: 1"):
        await kubelet.run_pod(request_pod(2, name="late"))
    assert kubelet.resources()[GADGET].in_use == running.containers["main"].device_ids[GADGET]
    await plugin.abort()


async def test_a_plugin_that_registers_as_soon_as_the_socket_of_the_kubelet_appears_is_registered_at_once(
    directory: str,
) -> None:
    kubelet = EmbeddedKubelet(directory, connect_timeout=1.0)
    for _restart in range(3):
        start = asyncio.create_task(kubelet.start())
        async with asyncio.timeout(10):
            while not os.path.exists(f"{kubelet.plugin_directory}/kubelet.sock"):  # noqa: ASYNC110 - at once
                await asyncio.sleep(0)
        async with FakePlugin(directory) as plugin:
            await plugin.register()  # once: it raises an error if nothing answers
            await kubelet.until(lambda k: GADGET in k.resources())
        await start
        await kubelet.stop()
        os.unlink(f"{kubelet.plugin_directory}/kubelet.sock")


async def test_a_readmitted_pod_keeps_its_devices_without_an_allocate_call(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await join(kubelet, plugin)
        running = await kubelet.run_pod(request_pod(1))
        assert await kubelet.run_pod(request_pod(1)) == running
        assert len(plugin.ids("Allocate")) == 1
        (device_id,) = running.containers["main"].device_ids[GADGET]
        await plugin.send(listing(*((key, "Unhealthy" if key == device_id else "Healthy") for key in "abc")))
        await kubelet.until(lambda k: counts(k) == (3, 2))
        with pytest.raises(AdmissionError, match="previously allocated devices are no longer healthy"):
            await kubelet.run_pod(request_pod(1))
        assert kubelet.pods() == ()


async def test_a_readmitted_pod_cannot_request_more(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await join(kubelet, plugin)
        await kubelet.run_pod(request_pod(1))
        with pytest.raises(AdmissionError, match=f'changed request for resource "{GADGET}" from 1 to 2'):
            await kubelet.run_pod(request_pod(2))


async def test_devices_of_ended_pods_are_free_at_the_next_admission(directory: str) -> None:
    async with EmbeddedKubelet(directory) as kubelet, FakePlugin(directory) as plugin:
        await join(kubelet, plugin)
        await kubelet.run_pod(request_pod(3))
    kept = read_checkpoint(os.path.join(directory, "device-plugins"))
    assert kept
    (holding,) = kept.holdings
    assert holding.ids == ("a", "b", "c")
    async with EmbeddedKubelet(directory) as kubelet, FakePlugin(directory) as plugin:
        await join(kubelet, plugin)
        assert kubelet.resources()[GADGET].in_use == ("a", "b", "c")
        await kubelet.run_pod(request_pod(1))
        assert len(kubelet.resources()[GADGET].in_use) == 1


async def test_after_a_lost_checkpoint_running_pods_have_no_devices_until_they_are_restarted(
    kubelet: EmbeddedKubelet,
) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await join(kubelet, plugin)
        await kubelet.run_pod(request_pod(1))
        await kubelet.stop()
        Path(kubelet.plugin_directory, "kubelet_internal_checkpoint").write_text("not a checkpoint")
        await kubelet.start()
        await plugin.abort()
        await join(kubelet, plugin)
        assert kubelet.resources()[GADGET].in_use == ()
        container = await kubelet.start_container("pod", "main")
        assert kubelet.resources()[GADGET].in_use == container.device_ids[GADGET]
        assert len(plugin.ids("Allocate")) == 2
        await plugin.abort()


async def test_a_pod_is_rejected_if_the_checkpoint_cannot_be_written(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await join(kubelet, plugin)
        blocker = Path(kubelet.plugin_directory, "kubelet_internal_checkpoint")
        blocker.unlink()
        blocker.mkdir()
        with pytest.raises(AdmissionError, match=r"UnexpectedAdmissionError.*kubelet_internal_checkpoint"):
            await kubelet.run_pod(request_pod(1))
        assert kubelet.resources()[GADGET].in_use == ()


# Crashes of the real kubelet


async def test_an_allocate_response_for_an_unlisted_id_would_crash(kubelet: EmbeddedKubelet) -> None:
    called, answer = asyncio.Event(), asyncio.Event()

    async def wait(request: pb.AllocateRequest) -> pb.AllocateResponse:
        called.set()
        await answer.wait()
        return plugin.answer(request)

    async with FakePlugin(kubelet.directory, devices=listing("a"), Allocate=wait) as plugin:
        await join(kubelet, plugin)
        admission = asyncio.create_task(kubelet.run_pod(request_pod(1)))
        await called.wait()
        await plugin.send(listing("b"))
        await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["b"])
        answer.set()
        await admission
    assert kubelet.would_crash == (
        f"{GADGET}: Allocate was answered for pod default/pod, container main, but a is not listed",
    )


@pytest.mark.parametrize(
    ("devices", "refused"),
    [(listing("b", ("a", "Unhealthy")), False), (listing("a"), False), (listing("b"), True)],
    ids=["listed as Unhealthy", "listed again", "refused"],
)
async def test_allocate_does_not_crash_if_the_id_is_listed_or_the_call_is_rejected(
    kubelet: EmbeddedKubelet, devices: pb.ListAndWatchResponse, refused: bool
) -> None:
    called, answer = asyncio.Event(), asyncio.Event()

    async def wait(request: pb.AllocateRequest) -> pb.AllocateResponse:
        called.set()
        await answer.wait()
        if refused:
            raise HandlerError("the device is gone")
        return plugin.answer(request)

    async with FakePlugin(kubelet.directory, devices=listing("a"), Allocate=wait) as plugin:
        await join(kubelet, plugin)
        admission = asyncio.create_task(kubelet.run_pod(request_pod(1)))
        await called.wait()
        await plugin.send(listing("z"))
        await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["z"])
        await plugin.send(devices)
        await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == sorted(one.ID for one in devices.devices))
        answer.set()
        await asyncio.wait((admission,))
        assert (admission.exception() is not None) == refused
    assert kubelet.would_crash == ()


async def test_removing_an_id_during_get_preferred_allocation_would_crash_at_the_allocate_response(
    kubelet: EmbeddedKubelet,
) -> None:
    async def prefer(_: object) -> pb.PreferredAllocationResponse:
        await plugin.send(listing("b"))
        await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["b"])
        response = pb.PreferredAllocationResponse()
        response.container_responses.add(deviceIDs=["a"])
        return response

    handlers = {"GetPreferredAllocation": prefer}
    async with FakePlugin(kubelet.directory, options=PREFERS, devices=listing("a", "b"), **handlers) as plugin:
        await join(kubelet, plugin)
        await kubelet.run_pod(request_pod(1))
    assert len(kubelet.would_crash) == 1


async def run_holder_of_a(kubelet: EmbeddedKubelet, plugin: FakePlugin, nodes: tuple[int, ...] = (0,)) -> None:
    """A pod that holds `a`, whose device is then followed by a list of the test's."""
    await plugin.send(listing(("a", "Healthy", nodes)))
    await join(kubelet, plugin)
    await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["a"])
    await kubelet.run_pod(request_pod(1))


async def restart(kubelet: EmbeddedKubelet, plugin: FakePlugin) -> None:
    """The plugin registers again after the kubelet's restart."""
    await kubelet.restart()
    await plugin.abort()
    await plugin.serve()
    await join(kubelet, plugin)


CRASHES = [
    ((0,), ("b", "Healthy", [0]), True),
    ((), ("b", "Healthy", [0]), True),
    ((0,), ("b", "Healthy", [1]), True),
    ((0,), ("b", "Healthy"), False),
]


@pytest.mark.parametrize("policy", ["none", "best-effort", "restricted", "single-numa-node"])
@pytest.mark.parametrize(("held_nodes", "other", "crashes"), CRASHES)
async def test_restart_while_a_pod_holds_an_unlisted_id_would_crash_under_a_policy_with_hints(
    directory: str, policy: str, held_nodes: tuple[int, ...], other: tuple[str, str], crashes: bool
) -> None:
    async with (
        EmbeddedKubelet(directory, topology_policy=policy) as kubelet,
        FakePlugin(directory) as plugin,
    ):
        await run_holder_of_a(kubelet, plugin, held_nodes)
        await plugin.send(listing(other))
        await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["b"])
        assert kubelet.would_crash == ()
        await restart(kubelet, plugin)
        expected = f"{GADGET}: renewing the topology hints of pod default/pod, container main, but a is not listed"
        assert kubelet.would_crash == ((expected,) if crashes and policy != "none" else ())


async def test_a_restart_does_not_crash_while_the_allocated_id_is_listed_as_unhealthy(directory: str) -> None:
    async with (
        EmbeddedKubelet(directory, topology_policy="restricted") as kubelet,
        FakePlugin(directory) as plugin,
    ):
        await run_holder_of_a(kubelet, plugin)
        await plugin.send(listing(("a", "Unhealthy", [0]), ("b", "Healthy", [0])))
        await restart(kubelet, plugin)
        kubelet.delete_pod("pod")
        await plugin.send(listing(("b", "Healthy", [0])))
        await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["b"])
        await restart(kubelet, plugin)
        assert kubelet.would_crash == ()


async def test_resize_of_a_pod_that_holds_an_unlisted_id_would_crash(directory: str) -> None:
    async with (
        EmbeddedKubelet(directory, topology_policy="restricted") as kubelet,
        FakePlugin(directory) as plugin,
    ):
        await run_holder_of_a(kubelet, plugin)
        await kubelet.resize_pod("pod")
        await plugin.send(listing(("a", "Unhealthy", [0]), ("b", "Healthy", [0])))
        await kubelet.until(lambda k: counts(k) == (2, 1))
        with pytest.raises(AdmissionError, match="previously allocated devices are no longer healthy"):
            await kubelet.resize_pod("pod")
        assert kubelet.would_crash == ()
        await plugin.send(listing(("b", "Healthy", [0])))
        await kubelet.until(lambda k: counts(k) == (1, 1))
        with pytest.raises(AdmissionError):
            await kubelet.resize_pod("pod")
        assert len(kubelet.would_crash) == 1
        assert [pod.name for pod in kubelet.pods()] == ["pod"]
        with pytest.raises(NoSuchPod):
            await kubelet.resize_pod("other")


@pytest.mark.parametrize(("policy", "ends"), [("best-effort", False), ("restricted", True), ("single-numa-node", True)])
async def test_restart_ends_pods_whose_device_has_lost_its_numa_nodes(directory: str, policy: str, ends: bool) -> None:
    async with (
        EmbeddedKubelet(directory, topology_policy=policy) as kubelet,
        FakePlugin(directory) as plugin,
    ):
        await run_holder_of_a(kubelet, plugin)
        await plugin.send(listing(("a", "Unhealthy"), ("b", "Healthy", [0])))
        await restart(kubelet, plugin)
        assert (kubelet.pods() == ()) == ends
        assert kubelet.would_crash == ()
