"""The GPU plugin with `-resource-manager`: allocated devices, with real sockets for all clients and servers."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from conftest import Run
from kubelets import Kubelet, embedded_only
from podservers import I915, MASK, Object, Servers, gpu_pod, lists, pod_servers
from processes import run_main
from tls_peer import document
from trees import gpu_card
from waiting import until

from accelplane.cli import node
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.embedded import EmbeddedKubelet, Pod, RunningContainer
from accelplane.node.agent import Agent
from accelplane.node.settings import Settings
from accelplane.plugins import Plugin
from accelplane.plugins.gpu import GpuConfig, GpuPlugin

pytestmark = pytest.mark.memory

COMPOSITE = [{"name": "ZE_FLAT_DEVICE_HIERARCHY", "value": "COMPOSITE"}]


class Setup:
    """A node with cards of two tiles, its kubelet, and the pods that its API lists."""

    def __init__(self, kubelet: EmbeddedKubelet, servers: Servers, pods: list[Object]) -> None:
        self.kubelet = kubelet
        self.servers = servers
        self.pods = pods

    async def run(self, pod: Object) -> dict[str, RunningContainer]:
        """Lists a pod and admits it."""
        self.pods.append(pod)
        return await self.admit(pod)

    async def admit(self, pod: Object) -> dict[str, RunningContainer]:
        containers = {
            each["name"]: {I915: int(each["resources"]["requests"][I915])} for each in pod["spec"]["containers"]
        }
        admitted = await self.kubelet.run_pod(Pod(pod["metadata"]["name"], containers=containers))
        return dict(admitted.containers)

    async def call(self, method: str, request: Any, response: Any) -> Any:
        """Calls the plugin at its socket."""
        async with grpc.aio.insecure_channel(
            f"unix:{self.kubelet.plugin_directory}/gpu.intel.com-i915.sock"
        ) as channel:
            answer = channel.unary_unary(
                f"/v1beta1.DevicePlugin/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=response.FromString,
            )
            return await answer(request)


@contextlib.asynccontextmanager
async def setup(directory: str, tmp_path: Path, *, api_pods: Sequence[Object] | None = None) -> AsyncGenerator[Setup]:
    """Pods are listed by the kubelet or, if `api_pods` is given, by the API server alone."""
    root = tmp_path / "root"
    for index in range(3):
        gpu_card(root, index)
        for tile in range(2):
            (root / f"sys/class/drm/card{index}/gt/gt{tile}").mkdir(parents=True)
    pods: list[Object] = list(api_pods or ())
    forbidden = document({}, "403 Forbidden")
    of_kubelet = lists(lambda: pods) if api_pods is None else forbidden
    settings = Settings(root=str(root), kubelet_dir=directory, cdi_dir=f"{directory}/cdi")
    plugin = GpuPlugin(GpuConfig(resource_manager=True, shared_dev_num=4, enable_monitoring=True))
    async with (
        EmbeddedKubelet(directory, seed=1) as kubelet,
        pod_servers(tmp_path, of_kubelet, lists(lambda: pods)) as servers,
    ):
        reader = servers.reader(kubelet.pod_resources_socket)
        agent = Agent(settings, {"gpu": plugin}, pods=lambda _settings: reader)
        task = asyncio.create_task(agent.run())
        try:
            await kubelet.until(lambda found: found.resources().get(I915) is not None)
            await kubelet.until(lambda found: found.resources()[I915].allocatable == 12)
            yield Setup(kubelet, servers, pods)
        finally:
            agent.stop()
            async with asyncio.timeout(10):
                await task


def cards(container: RunningContainer) -> list[str]:
    return [id_.partition("-")[0] for id_ in container.device_ids[I915]]


async def test_a_pod_gets_the_cards_and_tiles_of_its_annotations(directory: str, tmp_path: Path) -> None:
    async with setup(directory, tmp_path) as context:
        pod = gpu_pod("a", 2, gas_container_cards="card2,card1", gas_container_tiles="card2:gt1,card1:gt0+gt1")
        (container,) = (await context.run(pod)).values()
        assert sorted(cards(container)) == ["card1", "card2"]
        assert container.envs == {MASK: "1,2,3"}
        assert container.cdi_devices == ()
        assert {node.host_path for node in container.devices} == {
            f"/dev/dri/{name}" for name in ("card1", "card2", "renderD129", "renderD130")
        }
        assert {mount.host_path for mount in container.mounts} == {
            f"/dev/dri/by-path/pci-0000:0{slot}:00.0-{kind}" for slot in (4, 5) for kind in ("card", "render")
        }
        assert context.servers.api.requests == []


async def test_containers_get_their_parts_in_order(directory: str, tmp_path: Path) -> None:
    async with setup(directory, tmp_path) as context:
        parts = {"gas_container_cards": "card2|card1", "gas_container_tiles": "card2:gt1|card1:gt1"}
        found = await context.run(gpu_pod("a", 1, 1, env=COMPOSITE, **parts))
        assert [cards(container) for container in found.values()] == [["card2"], ["card1"]]
        assert [container.envs for container in found.values()] == [{MASK: "0.1"}, {MASK: "0.1"}]


async def test_the_first_scheduled_of_two_pending_pods_is_served_first(directory: str, tmp_path: Path) -> None:
    async with setup(directory, tmp_path) as context:
        first, second = (
            gpu_pod(name, gas_container_cards=card, gas_ts=timestamp)
            for name, card, timestamp in (("z", "card2", "1000"), ("a", "card1", "1001"))
        )
        context.pods += [first, second]
        for pod, card in ((first, "card2"), (second, "card1")):
            (container,) = (await context.admit(pod)).values()
            assert cards(container) == [card]


async def test_the_api_server_serves_where_the_kubelet_does_not(directory: str, tmp_path: Path) -> None:
    async with setup(directory, tmp_path, api_pods=()) as context:
        (container,) = (await context.run(gpu_pod("a", gas_container_cards="card2"))).values()
        assert cards(container) == ["card2"]
        assert context.servers.paths[0] == ["/pods"]


async def test_the_plugin_waits_one_second_for_a_late_annotation(directory: str, tmp_path: Path) -> None:
    async with setup(directory, tmp_path) as context:
        pod = gpu_pod("a")
        request_count = len(context.servers.kubelet.requests)
        context.pods.append(pod)
        admission = asyncio.create_task(context.admit(pod))
        await until(lambda: len(context.servers.kubelet.requests) > request_count)
        pod["metadata"]["annotations"]["gas-container-cards"] = "card2"
        (container,) = (await admission).values()
        assert cards(container) == ["card2"]


@pytest.mark.parametrize("listed_pod", [True, False])
async def test_a_pod_without_annotations_gets_any_cards_by_the_default_method(
    directory: str, tmp_path: Path, listed_pod: bool
) -> None:
    async with setup(directory, tmp_path) as context:
        pod = gpu_pod("a")
        found = await (context.run(pod) if listed_pod else context.admit(pod))
        (container,) = found.values()
        assert len(container.device_ids[I915]) == 1
        assert container.envs == {}
        assert len(container.cdi_devices) == 1


async def test_more_devices_than_annotated_cards_are_added_by_the_kubelet(directory: str, tmp_path: Path) -> None:
    async with setup(directory, tmp_path) as context:
        (container,) = (await context.run(gpu_pod("a", 3, gas_container_cards="card2,card9"))).values()
        assert "card2" in cards(container)
        assert len(container.device_ids[I915]) == 3
        assert container.cdi_devices == ()


async def test_the_monitoring_resource_needs_no_pod(directory: str, tmp_path: Path) -> None:
    async with setup(directory, tmp_path) as context:
        request_count = len(context.servers.kubelet.requests)
        monitoring = "gpu.intel.com/i915_monitoring"
        await context.kubelet.until(lambda kubelet: monitoring in kubelet.resources())
        found = await context.kubelet.run_pod(Pod("m", containers={"main": {monitoring: 1}}))
        assert len(found.containers["main"].devices) == 6
        assert len(context.servers.kubelet.requests) == request_count


async def test_calls_for_several_containers_get_the_default_method(directory: str, tmp_path: Path) -> None:
    async with setup(directory, tmp_path) as context:
        request_count = len(context.servers.kubelet.requests)
        preferred = pb.ContainerPreferredAllocationRequest(available_deviceIDs=["card0-0"], allocation_size=1)
        request = pb.PreferredAllocationRequest(container_requests=[preferred, preferred])
        answer = await context.call("GetPreferredAllocation", request, pb.PreferredAllocationResponse)
        assert [list(each.deviceIDs) for each in answer.container_responses] == [[], []]
        container = pb.ContainerAllocateRequest(devices_ids=["card0-0"])
        request = pb.AllocateRequest(container_requests=[container, container])
        answer = await context.call("Allocate", request, pb.AllocateResponse)
        assert [len(each.cdi_devices) for each in answer.container_responses] == [1, 1]
        assert len(context.servers.kubelet.requests) == request_count


# Processes.

IMPORTED = {"PYTHONPROFILEIMPORTTIME": "1"}
NOT_WITHOUT_THE_FLAG = (
    "accelplane.node.pods", "accelplane.plugins.gpu.fractional", "accelplane.plugins.gpu.podallocator",
    "accelplane.plugins.gpu.tiles", "accelplane.apiserver", "accelplane.http",
)  # fmt: skip


@embedded_only("the process is under test")
async def test_the_module_is_not_imported_without_the_flag(run: Run, kubelet: Kubelet, tmp_path: Path) -> None:
    gpu_card(tmp_path / "tree", 0)
    process = run("intel_gpu_device_plugin", "-shared-dev-num=4", env=IMPORTED)
    await kubelet.until(lambda resources: I915 in resources)
    await kubelet.run_pod("pod", {I915: 1})
    log = process.log()
    assert "accelplane.plugins.gpu.plugin" in log
    assert [name for name in NOT_WITHOUT_THE_FLAG if name in log] == []
    assert await process.terminate() == 0


def test_with_the_flag_the_plugin_does_not_start_outside_of_a_cluster(tmp_path: Path) -> None:
    words = ["-resource-manager", "-shared-dev-num=2", f"-root={tmp_path}", f"-kubelet-dir={tmp_path}"]
    result = run_main(lambda arguments: node.dropin("intel_gpu_device_plugin", GpuPlugin, "gpu", arguments), *words)
    assert result.returncode == 1
    assert "NODE_NAME is not set" in result.stderr


async def test_the_configuration_file_switches_it_on_and_off(directory: str, tmp_path: Path) -> None:
    root, config = tmp_path / "root", tmp_path / "config.yaml"
    for index in range(2):
        gpu_card(root, index)
    pods: list[Object] = []
    settings = Settings(root=str(root), kubelet_dir=directory, cdi_dir=f"{directory}/cdi")

    def plugins() -> Mapping[str, Plugin[Any]]:
        return {"gpu": GpuPlugin(GpuConfig(shared_dev_num=4, resource_manager=config.read_text() == "on"))}

    config.write_text("off")
    forbidden = document({}, "403 Forbidden")
    async with (
        EmbeddedKubelet(directory, seed=1) as kubelet,
        pod_servers(tmp_path, lists(lambda: pods), forbidden) as servers,
    ):
        context = Setup(kubelet, servers, pods)
        reader = servers.reader(kubelet.pod_resources_socket)
        agent = Agent(
            settings,
            plugins(),
            config_file=str(config),
            reload=lambda: (settings, plugins()),
            pods=lambda _settings: reader,
        )
        task = asyncio.create_task(agent.run())
        await kubelet.until(lambda found: I915 in found.resources())
        for number, mode in enumerate(("off", "on", "off")):
            config.write_text(mode)
            await until(lambda mode=mode: (agent.runners["gpu"].context.pod_allocator is not None) == (mode == "on"))
            request_count = len(servers.kubelet.requests)
            pod = gpu_pod(f"pod{number}", gas_container_cards="card1")
            (container,) = (await context.run(pod)).values()
            assert bool(container.cdi_devices) == (mode == "off")
            assert (len(servers.kubelet.requests) > request_count) == (mode == "on")
            pods.clear()
        agent.stop()
        await task


@embedded_only("the process is under test")
async def test_a_configuration_that_needs_a_cluster_is_rejected_outside_of_one(
    run: Run, kubelet: Kubelet, tmp_path: Path
) -> None:
    gpu_card(tmp_path / "tree", 0)
    config = tmp_path / "etc/config.yaml"
    config.parent.mkdir()
    config.write_text("plugins: {gpu: {shared-dev-num: 2}}")
    process = run("accelplane", "node", "--plugins=gpu", f"--config={config}")
    await kubelet.until(lambda resources: I915 in resources)
    config.write_text("plugins: {gpu: {shared-dev-num: 3, resource-manager: true}}")
    await process.wait_for_log("new configuration rejected")
    assert "NODE_NAME is not set" in process.log()
    assert kubelet.resources()[I915] == (2, 2)
