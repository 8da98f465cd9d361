"""The embedded kubelet: start and stop, registration and lists of plugins."""

import asyncio
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from embeddedkubelets import GADGET, GIZMO, PREFERS, counts, join, request_pod
from fake_plugin import FakePlugin, HandlerError, listing

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.embedded import AdmissionError, EmbeddedKubelet, KubeletError


@pytest.fixture
async def kubelet(directory: str) -> AsyncIterator[EmbeddedKubelet]:
    async with EmbeddedKubelet(directory, connect_timeout=1.0, call_timeout=2.0, seed=1) as running:
        yield running


# Start and stop


async def test_a_start_creates_the_directories_and_deletes_only_sockets(directory: str) -> None:
    plugins = Path(directory, "device-plugins")
    plugins.mkdir()
    (plugins / "notes.txt").write_text("kept")
    (plugins / "sub").mkdir()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(plugins / "old.sock"))
    async with EmbeddedKubelet(directory):
        assert sorted(os.listdir(plugins)) == ["kubelet.sock", "notes.txt", "sub"]
        assert stat.S_IMODE(os.stat(os.path.join(directory, "pod-resources")).st_mode) == 0o750


async def test_a_stopped_kubelet_leaves_sockets_without_a_listener(directory: str) -> None:
    async with EmbeddedKubelet(directory):
        pass
    path = os.path.join(directory, "device-plugins", "kubelet.sock")
    with socket.socket(socket.AF_UNIX) as client, pytest.raises(ConnectionRefusedError):
        client.connect(path)
    assert sorted(os.listdir(directory)) == ["device-plugins", "pod-resources"]


async def test_a_directory_that_a_kubelet_serves_is_rejected(kubelet: EmbeddedKubelet) -> None:
    with pytest.raises(KubeletError, match=f"another kubelet.*{os.getpid()}"):
        await EmbeddedKubelet(kubelet.directory).start()
    with pytest.raises(KubeletError, match="is already running"):
        await kubelet.start()


async def test_a_directory_with_a_long_path_is_rejected_with_the_limit(directory: str) -> None:
    with pytest.raises(KubeletError, match="at most 107"):
        await EmbeddedKubelet(os.path.join(directory, "x" * 90)).start()


async def test_a_directory_that_cannot_be_created_is_reported(directory: str) -> None:
    blocker = Path(directory, "file")
    blocker.write_text("")
    with pytest.raises(KubeletError, match=r"cannot start a kubelet: .*file/device-plugins: Not a directory"):
        await EmbeddedKubelet(blocker).start()


def test_an_unknown_policy_and_invalid_node_counts_are_rejected() -> None:
    with pytest.raises(ValueError, match="expected one of none, best-effort, restricted, single-numa-node"):
        EmbeddedKubelet("/nowhere", topology_policy="strict")
    with pytest.raises(ValueError, match="1 to 8"):
        EmbeddedKubelet("/nowhere", numa_nodes=9)
    with pytest.raises(ValueError, match="unknown behaviour"):
        EmbeddedKubelet("/nowhere", behaviour="1.36")


async def test_a_stopped_kubelet_runs_no_pods(directory: str) -> None:
    with pytest.raises(KubeletError, match="is not running"):
        await EmbeddedKubelet(directory).run_pod(request_pod(1))


# Registration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": "v1"}, 'requested API version "v1" is not supported by kubelet. Supported version is ["v1beta1"]'),
        ({"resource": "gadget"}, 'the ResourceName "gadget" is invalid'),
        ({"resource": "example.com/a/b"}, 'the ResourceName "example.com/a/b" is invalid'),
        ({"resource": "kubernetes.io/gadget"}, "is invalid"),
        ({"resource": "requests.example.com/gadget"}, "is invalid"),
        ({"resource": "Example.com/gadget"}, "is invalid"),
        ({"resource": f"example.com/{'x' * 64}"}, "is invalid"),
        ({"endpoint": "absent.sock"}, "failed to dial device plugin: context deadline exceeded"),
        ({"endpoint": "x" * 200}, "at most 107"),
    ],
)
async def test_an_invalid_registration_is_rejected_and_recorded(
    directory: str, fields: dict[str, str], message: str
) -> None:
    async with EmbeddedKubelet(directory, connect_timeout=0.1) as kubelet, FakePlugin(directory) as plugin:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await plugin.register(**fields)
        assert caught.value.code().name == "UNKNOWN"
        assert message in (caught.value.details() or "")
        (record,) = kubelet.registrations
        assert (record.accepted, record.outcome) == (False, caught.value.details())
        assert kubelet.resources() == {}


async def test_options_of_the_call_override_the_announced_ones(kubelet: EmbeddedKubelet) -> None:
    answered = pb.DevicePluginOptions(pre_start_required=True)
    async with FakePlugin(kubelet.directory, options=PREFERS, GetDevicePluginOptions=lambda _: answered) as plugin:
        await plugin.register()
        (record,) = kubelet.registrations
        assert (record.resource, record.endpoint, record.outcome) == (GADGET, "gadget.sock", "accepted")
        assert record.announced.get_preferred_allocation_available
        assert record.options == (True, False)


async def test_a_plugin_whose_options_call_fails_is_rejected(kubelet: EmbeddedKubelet) -> None:
    def refuse(_: object) -> None:
        raise HandlerError("no")

    async with FakePlugin(kubelet.directory, GetDevicePluginOptions=refuse) as plugin:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await plugin.register()
    assert caught.value.details() == "failed to get device plugin options: rpc error: code = Unknown desc = no"


async def test_an_absolute_endpoint_is_still_below_the_directory(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await plugin.register(endpoint="/gadget.sock")
    assert kubelet.registrations[-1].accepted


async def test_a_directory_name_with_characters_escaped_in_urls_is_supported(directory: str) -> None:
    async with EmbeddedKubelet(os.path.join(directory, "a b%c#d?e")) as kubelet:
        plugin = FakePlugin(kubelet.directory)
        await asyncio.to_thread(os.makedirs, plugin.directory, exist_ok=True)
        # The fake writes plain addresses; through a link it needs no escapes.
        os.symlink(kubelet.directory, os.path.join(directory, "k"))
        async with FakePlugin(os.path.join(directory, "k")) as plugin:
            await plugin.register()
            await kubelet.until(lambda k: GADGET in k.resources())


# Lists


async def test_every_list_replaces_the_previous_one(kubelet: EmbeddedKubelet) -> None:
    plugin = await join(
        kubelet, FakePlugin(kubelet.directory, devices=listing("a", ("b", "Sick"), ("c", "Healthy", [1])))
    )
    assert counts(kubelet) == (3, 2)
    assert kubelet.resources()[GADGET].devices == {"a": ("Healthy", ()), "b": ("Unhealthy", ()), "c": ("Healthy", (1,))}
    await plugin.send(listing("c", "d"))
    await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["c", "d"])
    await plugin.send(listing())
    await kubelet.until(lambda k: counts(k) == (0, 0))
    await plugin.abort()


async def test_a_timeout_error_has_the_state(kubelet: EmbeddedKubelet) -> None:
    plugin = await join(kubelet, FakePlugin(kubelet.directory, devices=listing(("a", "Healthy", [0]))))
    await kubelet.run_pod(request_pod(1, name="holder"))
    with pytest.raises(
        TimeoutError, match=r"gadget: capacity 1, allocatable 1\n  a  Healthy  NUMA 0  held by main of d"
    ):
        await kubelet.until(lambda _: False, timeout=0.01)
    await plugin.abort()


@pytest.mark.parametrize("last_words", [None, b"\xff\xff garbage", listing(*(f"{n:0200}" for n in range(22_000)))])
async def test_an_ended_or_invalid_stream_makes_all_devices_unhealthy_and_keeps_the_capacity(
    kubelet: EmbeddedKubelet, last_words: pb.ListAndWatchResponse | bytes | None
) -> None:
    plugin = await join(kubelet, FakePlugin(kubelet.directory))
    await plugin.send(last_words)
    await kubelet.until(lambda k: counts(k) == (3, 0))
    assert {device.health for device in kubelet.resources()[GADGET].devices.values()} == {"Unhealthy"}
    await plugin.abort()


async def test_the_devices_of_a_disconnected_plugin_are_removed_after_the_grace_period(directory: str) -> None:
    async with EmbeddedKubelet(directory, endpoint_grace=0.05) as kubelet:
        plugin = await join(kubelet, FakePlugin(directory))
        await plugin.abort()
        await kubelet.until(lambda k: counts(k) == (0, 0))
        with pytest.raises(AdmissionError) as caught:
            await kubelet.run_pod(request_pod(1))
        assert caught.value.reason == f"OutOf{GADGET}"
        plugin = await join(kubelet, FakePlugin(directory))
        assert counts(kubelet) == (3, 3)
        await plugin.abort()


async def test_a_plugin_that_returns_within_the_grace_period_keeps_its_devices(directory: str) -> None:
    async with EmbeddedKubelet(directory, endpoint_grace=0.2) as kubelet:
        plugin = await join(kubelet, FakePlugin(directory))
        await plugin.abort()
        await kubelet.until(lambda k: counts(k) == (3, 0))
        plugin = await join(kubelet, FakePlugin(directory))
        await kubelet.until(lambda k: counts(k) == (3, 3))
        other = await join(kubelet, FakePlugin(directory, GIZMO, "gizmo.sock"))
        await other.abort()
        await kubelet.until(lambda k: counts(k, GIZMO) == (0, 0))
        assert counts(kubelet) == (3, 3)
        await plugin.abort()


async def test_the_newest_registration_of_a_name_wins(directory: str) -> None:
    async with EmbeddedKubelet(directory) as kubelet:
        old = await join(kubelet, FakePlugin(directory, devices=listing("old")))
        new = await join(kubelet, FakePlugin(directory, endpoint="new.sock", devices=listing("new")))
        await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["new"])
        await kubelet.run_pod(request_pod(1))
        assert (old.ids("Allocate"), new.ids("Allocate")) == ([], [["new"]])
        await old.abort()
        other = await join(kubelet, FakePlugin(directory, GIZMO, "gizmo.sock"))
        assert list(kubelet.resources()[GADGET].devices) == ["new"]
        assert counts(kubelet) == (1, 1)
        await other.abort()
        await new.abort()


async def test_the_last_list_of_any_plugin_of_a_resource_counts(directory: str) -> None:
    async with EmbeddedKubelet(directory) as kubelet:
        old = await join(kubelet, FakePlugin(directory, devices=listing("old")))
        new = await join(kubelet, FakePlugin(directory, endpoint="new.sock", devices=listing("new")))
        await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["new"])
        await old.send(listing())
        await kubelet.until(lambda k: counts(k) == (0, 0))
        await old.abort()
        await new.abort()
