"""The embedded kubelet: pods, preferred allocation, topology and the start of containers."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from embeddedkubelets import GADGET, GIZMO, PREFERS, counts, join, refuse, request_pod
from fake_plugin import FakePlugin, HandlerError, listing

from accelplane.devices import DeviceNode, Mount
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.embedded import AdmissionError, ContainerStartError, EmbeddedKubelet, NoSuchPod, Pod

PRE_STARTS = pb.DevicePluginOptions(pre_start_required=True)


@pytest.fixture
async def kubelet(directory: str) -> AsyncIterator[EmbeddedKubelet]:
    async with EmbeddedKubelet(directory, connect_timeout=1.0, call_timeout=2.0, seed=1) as running:
        yield running


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
        await join(kubelet, FakePlugin(kubelet.directory, devices=listing("a"), Allocate=answer)),
        await join(kubelet, FakePlugin(kubelet.directory, GIZMO, "gizmo.sock", devices=listing("z"), Allocate=other)),
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
        await join(kubelet, plugin)
        await kubelet.run_pod(Pod("pod", containers={"one": {GADGET: 1}, "two": {GADGET: 2}}))
        assert sorted(key for ids in plugin.ids("Allocate") for key in ids) == ["a", "b", "c"]
        assert [len(ids) for ids in plugin.ids("Allocate")] == [1, 2]


async def test_ids_come_in_random_order(kubelet: EmbeddedKubelet) -> None:
    names = [f"d{n}" for n in range(20)]
    async with FakePlugin(kubelet.directory, devices=listing(*names)) as plugin:
        await join(kubelet, plugin)
        await kubelet.run_pod(request_pod(20))
        (request,) = plugin.requests["Allocate"]
        ids = list(request.container_requests[0].devices_ids)
        assert sorted(ids) == sorted(names)
        assert ids != names


async def test_deleted_pods_free_their_devices(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await join(kubelet, plugin)
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
        await join(kubelet, good)
        await join(kubelet, bad)
        with pytest.raises(AdmissionError) as caught:
            await kubelet.run_pod(Pod("pod", containers={"main": {"example.com/a": 1, "example.com/z": 1}}))
        assert caught.value.reason == "UnexpectedAdmissionError"
        assert caught.value.message.startswith("Allocate failed due to ")
        assert message in caught.value.message
        assert good.ids("Allocate") != []
        assert kubelet.pods() == ()
        assert kubelet.resources()["example.com/a"].in_use == ()


async def begin_admission(kubelet: EmbeddedKubelet) -> tuple[FakePlugin, asyncio.Task[object]]:
    """A plugin whose Allocate call hangs, and the admission of the pod that waits for it."""
    called = asyncio.Event()

    async def hang(_: object) -> None:
        called.set()
        await asyncio.Event().wait()

    plugin = await join(kubelet, FakePlugin(kubelet.directory, Allocate=hang))
    admission = asyncio.create_task(kubelet.run_pod(request_pod(1)))
    await called.wait()
    return plugin, admission


async def test_a_plugin_that_dies_during_allocation_fails_the_pod(kubelet: EmbeddedKubelet) -> None:
    plugin, admission = await begin_admission(kubelet)
    await plugin.abort()
    with pytest.raises(AdmissionError, match="UnexpectedAdmissionError: Allocate failed due to rpc error"):
        await admission


async def test_a_kubelet_that_is_killed_during_allocation_fails_the_pod(kubelet: EmbeddedKubelet) -> None:
    plugin, admission = await begin_admission(kubelet)
    await kubelet.stop()
    with pytest.raises(AdmissionError, match="the client connection is closing"):
        await admission
    await plugin.abort()


async def test_a_disconnected_plugin_fails_new_pods_and_running_pods_continue(kubelet: EmbeddedKubelet) -> None:
    plugin = await join(kubelet, FakePlugin(kubelet.directory))
    running = await kubelet.run_pod(request_pod(1, name="old"))
    await plugin.abort()
    await kubelet.until(lambda k: counts(k) == (3, 0))
    with pytest.raises(AdmissionError, match="no healthy devices present"):
        await kubelet.run_pod(request_pod(1, name="new"))
    assert kubelet.pods() == (running,)
    assert await kubelet.start_container("old", "main") == running.containers["main"]


async def test_init_containers_pass_their_devices_on(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory) as plugin:
        await join(kubelet, plugin)
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

    return await join(
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
            await join(kubelet, plugin)
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
        await join(kubelet, plugin)
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
        await join(kubelet, plugin)
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
        await join(kubelet, plugin)
        with pytest.raises(AdmissionError, match="TopologyAffinityError"):
            await kubelet.run_pod(request_pod(1))


# Containers starting


async def test_pre_start_is_called_before_each_start_if_required(kubelet: EmbeddedKubelet) -> None:
    async with FakePlugin(kubelet.directory, options=PRE_STARTS) as plugin:
        await join(kubelet, plugin)
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
        await join(kubelet, plugin)
        with pytest.raises(ContainerStartError, match=r"PreStartContainer rpc failed with err: .*still cold"):
            await kubelet.run_pod(request_pod(1))
        assert (await kubelet.start_container("pod", "main")).device_ids[GADGET]
    await kubelet.until(lambda k: counts(k) == (3, 0))
    with pytest.raises(ContainerStartError, match="has been stopped"):
        await kubelet.start_container("pod", "main")
