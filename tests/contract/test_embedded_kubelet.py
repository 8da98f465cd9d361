"""The embedded kubelet with valid and misbehaving plugins."""

import asyncio
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc.aio
import pytest
from fake_plugin import FakePlugin, HandlerError, listing

from accelplane.devices import DeviceNode, Mount
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.checkpoint import read_checkpoint
from accelplane.kubelet.embedded import (
    AdmissionError,
    ContainerStartError,
    EmbeddedKubelet,
    KubeletError,
    NoSuchPod,
    Pod,
)

GADGET = "example.com/gadget"
GIZMO = "example.com/gizmo"
PREFERS = pb.DevicePluginOptions(get_preferred_allocation_available=True)
PRE_STARTS = pb.DevicePluginOptions(pre_start_required=True)


@pytest.fixture
def directory() -> Iterator[str]:
    """A kubelet directory with short socket paths."""
    path = tempfile.mkdtemp(prefix="ak")
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def kubelet(directory: str) -> AsyncIterator[EmbeddedKubelet]:
    async with EmbeddedKubelet(directory, connect_timeout=1.0, call_timeout=2.0, seed=1) as running:
        yield running


async def joined(kubelet: EmbeddedKubelet, plugin: FakePlugin) -> FakePlugin:
    """Starts and registers the plugin, and waits for its list."""
    if not plugin.serving:
        await plugin.serve()
    await plugin.register()
    await kubelet.until(lambda k: plugin.resource in k.resources() and bool(k.resources()[plugin.resource].devices))
    return plugin


def request_pod(count: int, resource: str = GADGET, *, name: str = "pod") -> Pod:
    return Pod(name, containers={"main": {resource: count}})


def counts(kubelet: EmbeddedKubelet, resource: str = GADGET) -> tuple[int, int]:
    status = kubelet.resources()[resource]
    return status.capacity, status.allocatable


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
    plugin = await joined(
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
    plugin = await joined(kubelet, FakePlugin(kubelet.directory, devices=listing(("a", "Healthy", [0]))))
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
    plugin = await joined(kubelet, FakePlugin(kubelet.directory))
    await plugin.send(last_words)
    await kubelet.until(lambda k: counts(k) == (3, 0))
    assert {device.health for device in kubelet.resources()[GADGET].devices.values()} == {"Unhealthy"}
    await plugin.abort()


async def test_the_devices_of_a_disconnected_plugin_are_removed_after_the_grace_period(directory: str) -> None:
    async with EmbeddedKubelet(directory, endpoint_grace=0.05) as kubelet:
        plugin = await joined(kubelet, FakePlugin(directory))
        await plugin.abort()
        await kubelet.until(lambda k: counts(k) == (0, 0))
        with pytest.raises(AdmissionError) as caught:
            await kubelet.run_pod(request_pod(1))
        assert caught.value.reason == f"OutOf{GADGET}"
        plugin = await joined(kubelet, FakePlugin(directory))
        assert counts(kubelet) == (3, 3)
        await plugin.abort()


async def test_a_plugin_that_returns_within_the_grace_period_keeps_its_devices(directory: str) -> None:
    async with EmbeddedKubelet(directory, endpoint_grace=0.2) as kubelet:
        plugin = await joined(kubelet, FakePlugin(directory))
        await plugin.abort()
        await kubelet.until(lambda k: counts(k) == (3, 0))
        plugin = await joined(kubelet, FakePlugin(directory))
        await kubelet.until(lambda k: counts(k) == (3, 3))
        other = await joined(kubelet, FakePlugin(directory, GIZMO, "gizmo.sock"))
        await other.abort()
        await kubelet.until(lambda k: counts(k, GIZMO) == (0, 0))
        assert counts(kubelet) == (3, 3)
        await plugin.abort()


async def test_the_newest_registration_of_a_name_wins(directory: str) -> None:
    async with EmbeddedKubelet(directory, drops_successor=False) as kubelet:
        old = await joined(kubelet, FakePlugin(directory, devices=listing("old")))
        new = await joined(kubelet, FakePlugin(directory, endpoint="new.sock", devices=listing("new")))
        await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["new"])
        await kubelet.run_pod(request_pod(1))
        assert (old.ids("Allocate"), new.ids("Allocate")) == ([], [["new"]])
        await old.send(listing("ghost"))
        await old.abort()
        other = await joined(kubelet, FakePlugin(directory, GIZMO, "gizmo.sock"))
        assert list(kubelet.resources()[GADGET].devices) == ["new"]
        assert counts(kubelet) == (1, 1)
        await other.abort()
        await new.abort()


async def test_older_kubelets_disconnect_the_new_plugin_at_the_end_of_the_old_stream(
    kubelet: EmbeddedKubelet,
) -> None:
    old = await joined(kubelet, FakePlugin(kubelet.directory, devices=listing("old")))
    new = await joined(kubelet, FakePlugin(kubelet.directory, endpoint="new.sock", devices=listing("new")))
    await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["new"])
    await old.abort()
    await kubelet.until(lambda k: counts(k) == (1, 0))
    await new.register()
    await kubelet.until(lambda k: counts(k) == (1, 1))
    await new.abort()


# Pods


async def test_a_container_gets_the_allocate_responses_of_the_plugins(kubelet: EmbeddedKubelet) -> None:
    def answer(_: object) -> pb.AllocateResponse:
        response = pb.AllocateResponse()
        one = response.container_responses.add(envs={"WHO": "gadget"}, annotations={"note": "gadget"})
        one.devices.add(host_path="/dev/g0", container_path="/dev/g", permissions="rw")
        one.devices.add(host_path="/dev/g1", container_path="/dev/g", permissions="rwm")
        one.mounts.add(host_path="/etc/gadget", container_path="/etc/g", read_only=True)
        one.cdi_devices.add(name="example.com/gadget=a")
        one.cdi_devices.add(name="example.com/gadget=a")
        return response

    def other(_: object) -> pb.AllocateResponse:
        response = pb.AllocateResponse()
        one = response.container_responses.add(envs={"WHO": "gizmo", "MORE": "1"}, annotations={"note": "gizmo"})
        one.devices.add(host_path="/dev/z", container_path="/dev/g", permissions="r")
        one.mounts.add(host_path="/etc/gizmo", container_path="/etc/g")
        one.cdi_devices.add(name="example.com/gadget=a")
        return response

    plugins = [
        await joined(kubelet, FakePlugin(kubelet.directory, devices=listing("a"), Allocate=answer)),
        await joined(kubelet, FakePlugin(kubelet.directory, GIZMO, "gizmo.sock", devices=listing("z"), Allocate=other)),
    ]
    running = await kubelet.run_pod(Pod("pod", containers={"main": {GIZMO: 1, GADGET: 1}, "idle": {}}))
    main = running.containers["main"]
    assert main.devices == (DeviceNode("/dev/g0", "/dev/g", "rw"),)
    assert main.mounts == (Mount("/etc/gadget", "/etc/g", read_only=True),)
    assert main.envs == {"WHO": "gadget", "MORE": "1"}
    assert main.annotations == {"note": "gadget"}
    assert main.cdi_devices == ("example.com/gadget=a",)
    assert main.device_ids == {GADGET: ("a",), GIZMO: ("z",)}
    assert running.containers["idle"].device_ids == {}
    assert kubelet.pods() == (running,)
    assert kubelet.resources()[GADGET].in_use == ("a",)
    for plugin in plugins:
        await plugin.abort()


async def test_each_container_is_one_call_and_no_device_is_allocated_twice(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory, devices=listing("a", "b", "c", ("d", "Unhealthy"))) as plugin:
        await joined(kubelet, plugin)
        await kubelet.run_pod(Pod("pod", containers={"one": {GADGET: 1}, "two": {GADGET: 2}}))
        assert sorted(key for ids in plugin.ids("Allocate") for key in ids) == ["a", "b", "c"]
        assert [len(ids) for ids in plugin.ids("Allocate")] == [1, 2]


async def test_ids_come_in_random_order(kubelet: EmbeddedKubelet) -> None:
    names = [f"d{n}" for n in range(20)]
    async with FakePlugin(kubelet.directory, devices=listing(*names)) as plugin:
        await joined(kubelet, plugin)
        await kubelet.run_pod(request_pod(20))
        (request,) = plugin.requests["Allocate"]
        ids = list(request.container_requests[0].devices_ids)
        assert sorted(ids) == sorted(names)
        assert ids != names


async def test_deleted_pods_free_their_devices(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await joined(kubelet, plugin)
        await kubelet.run_pod(request_pod(3, name="one"))
        with pytest.raises(AdmissionError) as caught:
            await kubelet.run_pod(request_pod(1, name="two"))
        assert caught.value.reason == "UnexpectedAdmissionError"
        assert caught.value.message == (
            f"Allocate failed due to requested number of devices unavailable for {GADGET}. "
            "Requested: 1, Available: 0, which is unexpected"
        )
        kubelet.delete_pod("one")
        await kubelet.run_pod(request_pod(1, name="two"))
        with pytest.raises(NoSuchPod, match="default/one"):
            kubelet.delete_pod("one")


def test_pods_with_invalid_requests_cannot_be_created() -> None:
    with pytest.raises(ValueError, match="expected a count of 0 or more"):
        Pod("pod", containers={"main": {GADGET: -1}})
    with pytest.raises(ValueError, match="two containers are named main"):
        Pod("pod", containers={"main": {}}, init_containers={"main": {}})


async def slow(_: object) -> None:
    await asyncio.Event().wait()


def refuse(_: object) -> None:
    raise HandlerError("device a is on fire")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refuse, "rpc error: code = Unknown desc = device a is on fire"),
        (lambda _: pb.AllocateResponse(), "no containers return in allocation response"),
        (lambda _: b"\xff\xff garbage", "code = Internal desc = grpc: failed to unmarshal"),
        (lambda _: pb.AllocateResponse(container_responses=[{"envs": {"X": "x" * 5_000_000}}]), "ResourceExhausted"),
        (slow, "code = DeadlineExceeded"),
    ],
)
async def test_a_failed_allocation_fails_the_pod_and_frees_its_devices(
    directory: str, answer: object, message: str
) -> None:
    async with (
        EmbeddedKubelet(directory, call_timeout=0.2) as kubelet,
        FakePlugin(directory, "example.com/a", "a.sock") as good,
        FakePlugin(directory, "example.com/z", "z.sock", Allocate=answer) as bad,
    ):
        await joined(kubelet, good)
        await joined(kubelet, bad)
        with pytest.raises(AdmissionError) as caught:
            await kubelet.run_pod(Pod("pod", containers={"main": {"example.com/a": 1, "example.com/z": 1}}))
        assert caught.value.reason == "UnexpectedAdmissionError"
        assert caught.value.message.startswith("Allocate failed due to ")
        assert message in caught.value.message
        assert good.ids("Allocate") != []
        assert kubelet.pods() == ()
        assert kubelet.resources()["example.com/a"].in_use == ()


async def test_a_plugin_that_dies_during_allocation_fails_the_pod(kubelet: EmbeddedKubelet) -> None:
    called = asyncio.Event()

    async def hang(_: object) -> None:
        called.set()
        await asyncio.Event().wait()

    plugin = await joined(kubelet, FakePlugin(kubelet.directory, Allocate=hang))
    admission = asyncio.create_task(kubelet.run_pod(request_pod(1)))
    await called.wait()
    await plugin.abort()
    with pytest.raises(AdmissionError, match="UnexpectedAdmissionError: Allocate failed due to rpc error"):
        await admission


async def test_a_kubelet_that_is_killed_during_allocation_fails_the_pod(kubelet: EmbeddedKubelet) -> None:
    called = asyncio.Event()

    async def hang(_: object) -> None:
        called.set()
        await asyncio.Event().wait()

    plugin = await joined(kubelet, FakePlugin(kubelet.directory, Allocate=hang))
    admission = asyncio.create_task(kubelet.run_pod(request_pod(1)))
    await called.wait()
    await kubelet.stop()
    with pytest.raises(AdmissionError, match="the client connection is closing"):
        await admission
    await plugin.abort()


async def test_a_disconnected_plugin_fails_new_pods_and_running_pods_continue(kubelet: EmbeddedKubelet) -> None:
    plugin = await joined(kubelet, FakePlugin(kubelet.directory))
    running = await kubelet.run_pod(request_pod(1, name="old"))
    await plugin.abort()
    await kubelet.until(lambda k: counts(k) == (3, 0))
    with pytest.raises(AdmissionError, match="no healthy devices present"):
        await kubelet.run_pod(request_pod(1, name="new"))
    assert kubelet.pods() == (running,)
    assert await kubelet.start_container("old", "main") == running.containers["main"]


async def test_init_containers_pass_their_devices_on(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await joined(kubelet, plugin)
        running = await kubelet.run_pod(
            Pod("pod", init_containers={"i1": {GADGET: 2}, "i2": {GADGET: 1}}, containers={"main": {GADGET: 3}})
        )
        first, second, main = (running.containers[name].device_ids[GADGET] for name in ("i1", "i2", "main"))
        assert set(second) < set(first) < set(main)


# Preferred allocation


async def plugin_with_preference(kubelet: EmbeddedKubelet, *answer: str) -> FakePlugin:
    def prefer(_: object) -> pb.PreferredAllocationResponse:
        response = pb.PreferredAllocationResponse()
        response.container_responses.add(deviceIDs=answer)
        response.container_responses.add(deviceIDs=["b"])
        return response

    return await joined(
        kubelet,
        FakePlugin(kubelet.directory, options=PREFERS, devices=listing("a", "b", "c"), GetPreferredAllocation=prefer),
    )


@pytest.mark.parametrize(
    ("answer", "size", "allocated"),
    [
        (["c"], 1, ["c"]),
        (["c", "a"], 2, ["a", "c"]),
        (["x", "c"], 1, ["c"]),
        (["c", "c", "c", "b"], 2, ["b", "c"]),
        (["b", "a", "c"], 3, ["a", "b", "c"]),
    ],
)
async def test_the_plugin_chooses_among_what_it_was_offered(
    kubelet: EmbeddedKubelet, answer: list[str], size: int, allocated: list[str]
) -> None:
    plugin = await plugin_with_preference(kubelet, *answer)
    await kubelet.run_pod(request_pod(size))
    assert plugin.ids("Allocate") == [allocated]
    (request,) = plugin.requests["GetPreferredAllocation"]
    (container,) = request.container_requests
    assert sorted(container.available_deviceIDs) == ["a", "b", "c"]
    assert (list(container.must_include_deviceIDs), container.allocation_size) == ([], size)
    await plugin.abort()


async def test_an_incomplete_choice_is_completed(kubelet: EmbeddedKubelet) -> None:
    plugin = await plugin_with_preference(kubelet, "b")
    await kubelet.run_pod(request_pod(2))
    ((first, second),) = plugin.ids("Allocate")
    assert "b" in (first, second)
    await plugin.abort()


async def test_devices_of_init_containers_must_be_included(kubelet: EmbeddedKubelet) -> None:
    plugin = await plugin_with_preference(kubelet, "c")
    await kubelet.run_pod(Pod("pod", init_containers={"init": {GADGET: 1}}, containers={"main": {GADGET: 2}}))
    second = plugin.requests["GetPreferredAllocation"][1].container_requests[0]
    assert list(second.must_include_deviceIDs) == ["c"]
    assert sorted(second.available_deviceIDs) == ["a", "b", "c"]
    assert second.allocation_size == 2
    await plugin.abort()


async def test_preferred_allocation_is_called_only_with_the_option_and_its_error_fails_the_pod(directory: str) -> None:
    async with EmbeddedKubelet(directory) as kubelet:
        async with FakePlugin(directory, GetPreferredAllocation=refuse) as plugin:
            await joined(kubelet, plugin)
            await kubelet.run_pod(request_pod(1))
            assert "GetPreferredAllocation" not in plugin.requests
        kubelet.delete_pod("pod")
        await kubelet.until(lambda k: counts(k) == (3, 0))
        async with FakePlugin(directory, options=PREFERS, GetPreferredAllocation=refuse) as plugin:
            await plugin.register()
            await kubelet.until(lambda k: counts(k) == (3, 3))
            with pytest.raises(
                AdmissionError, match=r"GetPreferredAllocation rpc failed with err: rpc error: .*on fire"
            ):
                await kubelet.run_pod(request_pod(1))


# Topology


async def test_devices_come_from_the_nodes_that_the_topology_manager_chose(directory: str) -> None:
    devices = listing(*((f"d{n}", "Healthy", [n % 2]) for n in range(6)), "stray")
    async with (
        EmbeddedKubelet(directory, topology_policy="single-numa-node") as kubelet,
        FakePlugin(directory, options=PREFERS, devices=devices) as plugin,
    ):
        await joined(kubelet, plugin)
        await kubelet.run_pod(request_pod(2, name="first"))
        offered = plugin.requests["GetPreferredAllocation"][0].container_requests[0]
        assert sorted(offered.available_deviceIDs) == ["d0", "d2", "d4"]
        await kubelet.run_pod(request_pod(3, name="second"))
        assert plugin.ids("Allocate")[1] == ["d1", "d3", "d5"]
        assert len(plugin.requests["GetPreferredAllocation"]) == 1, "all aligned ones were needed: nothing to choose"
        with pytest.raises(AdmissionError) as caught:
            await kubelet.run_pod(request_pod(4, name="third"))
        assert (caught.value.reason, caught.value.message) == (
            "TopologyAffinityError",
            "Resources cannot be allocated with Topology locality",
        )


async def test_best_effort_takes_aligned_devices_first_and_others_after(directory: str) -> None:
    devices = listing(("d0", "Healthy", [0]), ("d1", "Healthy", [1]), ("d2", "Healthy", [1]), "stray")
    async with (
        EmbeddedKubelet(directory, topology_policy="best-effort") as kubelet,
        FakePlugin(directory, options=PREFERS, devices=devices) as plugin,
    ):
        await joined(kubelet, plugin)
        await kubelet.run_pod(request_pod(2, name="one"))
        assert plugin.ids("Allocate") == [["d1", "d2"]]
        await kubelet.run_pod(request_pod(2, name="two"))
        assert plugin.ids("Allocate")[1] == ["d0", "stray"]


async def test_devices_on_missing_numa_nodes_are_rejected_under_a_strict_policy(directory: str) -> None:
    devices = listing(("d", "Healthy", [2**62]))
    async with (
        EmbeddedKubelet(directory, topology_policy="restricted") as kubelet,
        FakePlugin(directory, devices=devices) as plugin,
    ):
        await joined(kubelet, plugin)
        with pytest.raises(AdmissionError, match="TopologyAffinityError"):
            await kubelet.run_pod(request_pod(1))


# Containers starting


async def test_pre_start_is_called_before_each_start_if_required(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory, options=PRE_STARTS) as plugin:
        await joined(kubelet, plugin)
        running = await kubelet.run_pod(request_pod(3))
        assert await kubelet.start_container("pod", "main") == running.containers["main"]
        assert plugin.ids("PreStartContainer") == [["a", "b", "c"]] * 2
        assert len(plugin.ids("Allocate")) == 1
        with pytest.raises(NoSuchPod, match="no container other"):
            await kubelet.start_container("pod", "other")


async def test_a_failed_pre_start_can_be_retried(kubelet: EmbeddedKubelet) -> None:
    tries: list[object] = []

    def fail_once(request: object) -> pb.PreStartContainerResponse:
        tries.append(request)
        if len(tries) == 1:
            raise HandlerError("still cold")
        return pb.PreStartContainerResponse()

    async with FakePlugin(kubelet.directory, options=PRE_STARTS, PreStartContainer=fail_once) as plugin:
        await joined(kubelet, plugin)
        with pytest.raises(ContainerStartError, match=r"PreStartContainer rpc failed with err: .*still cold"):
            await kubelet.run_pod(request_pod(1))
        assert (await kubelet.start_container("pod", "main")).device_ids[GADGET]
    await kubelet.until(lambda k: counts(k) == (3, 0))
    with pytest.raises(ContainerStartError, match="has been stopped"):
        await kubelet.start_container("pod", "main")


# Restart


async def test_after_a_restart_pods_keep_their_devices_and_plugins_must_register_again(
    kubelet: EmbeddedKubelet,
) -> None:
    plugin = await joined(kubelet, FakePlugin(kubelet.directory))
    running = await kubelet.run_pod(request_pod(2))
    await kubelet.restart()
    assert not os.path.exists(plugin.path)
    assert counts(kubelet) == (0, 0)
    with pytest.raises(AdmissionError, match="no healthy devices present"):
        await kubelet.run_pod(request_pod(1, name="early"))
    assert await kubelet.start_container("pod", "main") == running.containers["main"]
    await plugin.abort()
    plugin = await joined(kubelet, FakePlugin(kubelet.directory))
    with pytest.raises(AdmissionError, match="Requested: 2, Available: 1"):
        await kubelet.run_pod(request_pod(2, name="late"))
    assert kubelet.resources()[GADGET].in_use == running.containers["main"].device_ids[GADGET]
    await plugin.abort()


async def test_a_readmitted_pod_keeps_its_devices_without_an_allocate_call(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await joined(kubelet, plugin)
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
        await joined(kubelet, plugin)
        await kubelet.run_pod(request_pod(1))
        with pytest.raises(AdmissionError, match=f'changed request for resource "{GADGET}" from 1 to 2'):
            await kubelet.run_pod(request_pod(2))


async def test_devices_of_ended_pods_are_free_at_the_next_admission(directory: str) -> None:
    async with EmbeddedKubelet(directory) as kubelet, FakePlugin(directory) as plugin:
        await joined(kubelet, plugin)
        await kubelet.run_pod(request_pod(3))
    kept = read_checkpoint(os.path.join(directory, "device-plugins"))
    assert kept
    (holding,) = kept.holdings
    assert holding.ids == ("a", "b", "c")
    async with EmbeddedKubelet(directory) as kubelet, FakePlugin(directory) as plugin:
        await joined(kubelet, plugin)
        assert kubelet.resources()[GADGET].in_use == ("a", "b", "c")
        await kubelet.run_pod(request_pod(1))
        assert len(kubelet.resources()[GADGET].in_use) == 1


async def test_after_a_lost_checkpoint_running_pods_have_no_devices_until_they_are_restarted(
    kubelet: EmbeddedKubelet,
) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await joined(kubelet, plugin)
        await kubelet.run_pod(request_pod(1))
        await kubelet.stop()
        Path(kubelet.plugin_directory, "kubelet_internal_checkpoint").write_text("not a checkpoint")
        await kubelet.start()
        await plugin.abort()
        await joined(kubelet, plugin)
        assert kubelet.resources()[GADGET].in_use == ()
        container = await kubelet.start_container("pod", "main")
        assert kubelet.resources()[GADGET].in_use == container.device_ids[GADGET]
        assert len(plugin.ids("Allocate")) == 2
        await plugin.abort()


async def test_a_pod_is_rejected_if_the_checkpoint_cannot_be_written(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await joined(kubelet, plugin)
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
        await joined(kubelet, plugin)
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
        await joined(kubelet, plugin)
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
        await joined(kubelet, plugin)
        await kubelet.run_pod(request_pod(1))
    assert len(kubelet.would_crash) == 1


async def run_holder_of_a(kubelet: EmbeddedKubelet, plugin: FakePlugin, nodes: tuple[int, ...] = (0,)) -> None:
    """A pod that holds `a`, whose device is then followed by a list of the test's."""
    await plugin.send(listing(("a", "Healthy", nodes)))
    await joined(kubelet, plugin)
    await kubelet.until(lambda k: list(k.resources()[GADGET].devices) == ["a"])
    await kubelet.run_pod(request_pod(1))


async def restart(kubelet: EmbeddedKubelet, plugin: FakePlugin) -> None:
    """The plugin registers again after the kubelet's restart."""
    await kubelet.restart()
    await plugin.abort()
    await plugin.serve()
    await joined(kubelet, plugin)


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
