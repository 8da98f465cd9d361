"""The GPU use of containers on the agent's page, from `accelplane clients`."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from clientservices import PLENTY, proc_directory, socket_path
from conftest import Start
from drmclients import BDF, i915, process
from kubelets import Kubelet
from prometheus_client.parser import text_string_to_metric_families
from trees import gpu_card, write
from waiting import until

from accelplane.gpuclients.service import ClientsService, serving
from accelplane.kubelet import checkpoint
from accelplane.node.agent import Agent
from accelplane.pages import metrics
from accelplane.pages.observer import Observer
from accelplane.plugins.gpu import GpuConfig, GpuPlugin

I915 = "gpu.intel.com/i915"

proc = pytest.fixture(proc_directory)
path = pytest.fixture(socket_path)


class Setup:
    """An agent with two GPUs, and processes of its pods."""

    def __init__(self, agent: Agent, kubelet: Kubelet, proc: Path, directory: str) -> None:
        self.agent = agent
        self.observer = Observer(agent)
        self.kubelet = kubelet
        self.proc = proc
        self.uids: set[str] = set()
        self._directory = f"{directory}/device-plugins"

    async def run_pod(self, name: str, pid: int, *files: str, container: str = "main") -> str:
        """Runs a pod with one GPU, whose process has these files. Returns its UID."""
        await self.kubelet.run_pod(name, {I915: 1})
        uid = ""

        def is_known() -> bool:
            nonlocal uid
            found = checkpoint.read_checkpoint(self._directory)
            new = {each.pod_uid for each in found.holdings} - self.uids if found else set[str]()
            uid = next(iter(new), "")
            return bool(uid)

        await until(is_known, 60)
        self.uids.add(uid)
        process(self.proc, pid, *files, pod=uid, container=f"{pid:064x}", name=container)
        return uid

    async def page(self) -> str:
        return metrics.MetricsPage().render(self.agent.status(), await self.observer.contents()).decode()

    async def busy(self) -> dict[tuple[str, ...], float]:
        """The busy seconds by pod, container, device and engine, without those that are 0."""
        return {
            tuple(labels[name] for name in ("namespace", "pod", "container", "device", "bdf", "engine")): value
            for labels, value in samples(await self.page(), "accelplane_container_gpu_busy_seconds_total")
            if value
        }


def samples(page: str, name: str) -> list[tuple[Mapping[str, str], float]]:
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    ]


@pytest.fixture
async def setup(
    start_agent: Start, kubelet: Kubelet, tmp_path: Path, path: str, directory: str
) -> AsyncIterator[Setup]:
    proc = tmp_path / "proc"
    for index in (0, 1):
        gpu_card(tmp_path, index)
    agent = await start_agent({"metrics_clients": path}, gpu=GpuPlugin(GpuConfig()))
    await kubelet.until(lambda resources: I915 in resources)
    proc.mkdir()
    instance = Setup(agent, kubelet, proc, directory)
    yield instance
    await instance.observer.close()


async def test_the_page_has_the_use_of_gpus_by_containers_under_their_names(
    setup: Setup, proc: Path, path: str
) -> None:
    await setup.run_pod("a", 10, i915(1, render=10**9, memory=4))
    await setup.run_pod("b", 11, i915(2, copy=2 * 10**9))
    process(proc, 12, i915(3, render=9 * 10**9))  # a pod without GPU
    async with serving(path, ClientsService(str(proc), limits=PLENTY, min_interval=0.0, walk_timeout=30.0)):
        assert await setup.busy() == {
            ("default", "a", "main", "card0", BDF, "render"): 1.0,
            ("default", "b", "main", "card0", BDF, "copy"): 2.0,
        }
        page = await setup.page()
    sizes = {
        (labels["pod"], labels["region"], labels["kind"]): value
        for labels, value in samples(page, "accelplane_container_gpu_memory_bytes")
    }
    assert sizes["a", "local0", "resident"] == 4096
    assert sizes["a", "local0", "total"] == 8192
    assert samples(page, "accelplane_clients_requests_total") == [({"outcome": "ok"}, 2.0)]


async def test_without_an_answer_the_page_has_no_use_and_counts_errors(
    setup: Setup, proc: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    await setup.run_pod("a", 10, i915(1, render=10**9))
    for count in (1.0, 2.0):
        page = await setup.page()
        assert samples(page, "accelplane_clients_requests_total") == [({"outcome": "error"}, count)]
        assert samples(page, "accelplane_container_gpu_busy_seconds_total") == []
        assert samples(page, "accelplane_container_devices") != []
    assert caplog.text.count("the GPU use of containers is missing") == 1
    async with serving(path, ClientsService(str(proc), limits=PLENTY, walk_timeout=30.0)):
        assert len(await setup.busy()) == 1


async def test_client_time_ends_the_idle_time_of_a_unit(setup: Setup, proc: Path, path: str) -> None:
    await setup.run_pod("a", 10, i915(1, render=10**9))
    service = ClientsService(str(proc), limits=PLENTY, min_interval=0.0, walk_timeout=30.0)

    async def idle() -> float | None:
        found = samples(await setup.page(), "accelplane_unit_idle_seconds")
        return next((value for labels, value in found if labels["unit"] == "card0"), None)

    async def grows() -> bool:
        return (await idle() or 0.0) > 0.5

    async with serving(path, service):
        # The card has no files that show its use: the time of its clients is the only signal.
        assert await idle() == pytest.approx(0.0, abs=0.2)
        await until(grows)
        write(proc / "10/fdinfo/5", i915(1, render=2 * 10**9))
        assert await idle() == pytest.approx(0.0, abs=0.2)
    # Without an answer nothing is known: the time goes on.
    await until(grows)


async def test_without_pods_that_hold_gpus_nothing_is_requested(setup: Setup) -> None:
    page = await setup.page()
    assert samples(page, "accelplane_clients_requests_total") == []


async def test_devices_of_other_drivers_are_omitted(setup: Setup, proc: Path, path: str) -> None:
    await setup.run_pod("a", 10, i915(1, render=10**9), i915(2, bdf="0000:00:0b.0", render=10**9))
    async with serving(path, ClientsService(str(proc), limits=PLENTY, walk_timeout=30.0)):
        assert {key[4] for key in await setup.busy()} == {BDF}


async def test_a_container_without_a_known_name_has_that_of_the_only_holder(
    setup: Setup, proc: Path, path: str
) -> None:
    await setup.run_pod("a", 10, i915(1, render=10**9))
    (proc / "10/mountinfo").unlink()
    async with serving(path, ClientsService(str(proc), limits=PLENTY, walk_timeout=30.0)):
        assert [key[1:3] for key in await setup.busy()] == [("a", "main")]
