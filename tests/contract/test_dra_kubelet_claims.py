"""Kubelet, service and preparer of a DRA driver together, with the GPUs of a tree."""

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from draclaims import World, kill
from draservices import ServedDriver, serving
from memoryclaims import MemoryClaims
from trees import gpu_card
from waiting import until

from accelplane.dra.preparer import Preparer
from accelplane.kubelet.embedded import AllocatedClaim, EmbeddedKubelet, Pod, PodStartError
from accelplane.plugins.gpu import GpuPlugin

GPU = "gpu.intel.com"


class NodeWithClaims:
    """A node with two GPUs and a kubelet. Claims have one GPU each, and are reserved for the pods a and b."""

    def __init__(self, directory: str, behaviour: str) -> None:
        root = Path(directory)
        for index in (0, 1):
            gpu_card(root, index)
        self.world = World(root, GpuPlugin())
        self.behaviour = behaviour
        self.api = MemoryClaims()
        self.kubelet_dir = root / "var/lib/kubelet"
        self.kubelet = EmbeddedKubelet(
            self.kubelet_dir, behaviour=behaviour, claim_api=self.api, unprepare_interval=0.2
        )

    def claim(self, uid: str, device: int = 0) -> str:
        """The name of a new claim."""
        reference = self.world.claim(uid, self.world.device(device))
        self.api.claims["shop", reference.name] = AllocatedClaim(
            namespace="shop", name=reference.name, uid=uid, drivers=(GPU,), reserved_for=("a", "b")
        )
        return reference.name

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncGenerator[tuple[ServedDriver, Preparer]]:
        """The driver in a process that is killed at the end."""
        preparer = await self.world.start()
        version = (1, int(self.behaviour.split(".")[1]))
        served = ServedDriver(str(self.kubelet_dir), version=version, claims=preparer, driver=GPU)
        async with serving(served) as driver:
            await until(lambda: driver.service.status.publishing)
            yield driver, preparer
        kill(preparer)

    async def run(self, pod: str, claim: str) -> tuple[str, ...]:
        """The CDI devices of a pod's container."""
        described = Pod(pod, "shop", {"main": {}}, claims={"gpu": claim}, container_claims={"main": ["gpu/r0"]})
        return (await self.kubelet.run_pod(described)).containers["main"].cdi_devices

    async def end(self, pod: str) -> None:
        """Ends a pod, and waits until its claims are free."""
        uid = next(each.uid for each in self.kubelet.pods() if each.name == pod)
        self.kubelet.delete_pod(pod, "shop")
        dra = self.kubelet.dra
        assert dra is not None
        await until(lambda: not dra.claims.of_pod(uid))

    def defined(self, uid: str, cdi_devices: tuple[str, ...]) -> bool:
        """Whether the runtime finds all of the CDI devices of a claim."""
        file = self.world.cdi_file(uid) or {}
        return all(name.partition("=")[2] in file for name in cdi_devices)


@pytest.fixture(params=["1.34", "1.37"])
def node(directory: str, request: pytest.FixtureRequest) -> NodeWithClaims:
    return NodeWithClaims(directory, request.param)


async def test_a_pod_gets_the_gpu_of_its_claim_and_leaves_nothing(node: NodeWithClaims) -> None:
    async with node.kubelet, node.agent():
        found = await node.run("a", node.claim("a1"))
        assert found == tuple(f"k8s.{GPU}/claim={name}" for name in (f"a1-{node.world.device()}", "a1-r0"))
        assert node.defined("a1", found)
        await node.end("a")
        assert node.world.cdi_file("a1") is None
        assert node.world.journal() == {}


async def test_a_kubelet_restart_with_a_second_pod_changes_no_file(node: NodeWithClaims) -> None:
    async with node.kubelet, node.agent() as (driver, _):
        claim = node.claim("a1")
        first = await node.run("a", claim)
        files = [*node.world.directory.rglob("*.json"), *node.world.cdi_dir.iterdir()]
        before = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files]
        registrations = len(driver.published)
        await node.kubelet.restart()
        await until(lambda: len(driver.published) > registrations and driver.published[-1])
        assert await node.run("b", claim) == first
        assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in files] == before
        await node.end("a")
        assert node.defined("a1", first)
        await node.end("b")
        assert node.world.journal() == {}


async def test_a_pod_that_ends_while_the_agent_is_away_is_cleaned_up_later(node: NodeWithClaims) -> None:
    async with node.kubelet:
        async with node.agent():
            await node.run("a", node.claim("a1"))
        node.kubelet.delete_pod("a", "shop")
        async with node.agent():
            await until(lambda: node.world.journal() == {})
            assert await node.run("b", node.claim("b2"))


async def test_a_restarted_agent_keeps_what_containers_use(node: NodeWithClaims) -> None:
    async with node.kubelet:
        claim = node.claim("a1")
        async with node.agent():
            first = await node.run("a", claim)
        for file in node.world.cdi_dir.glob("*.json"):
            file.unlink()
        async with node.agent() as (_, preparer):
            assert node.defined("a1", first)
            assert preparer.prepared() == {"0000:03:00.0": (f"shop/{claim}",)}
            assert await node.run("b", claim) == first


async def test_a_gpu_that_a_claim_holds_is_refused_to_another_claim(node: NodeWithClaims) -> None:
    async with node.kubelet, node.agent():
        first = node.claim("a1")
        await node.run("a", first)
        second = node.claim("b2")
        with pytest.raises(PodStartError, match=f"is still held by claim shop/{first}, waiting for its pod to end"):
            await node.run("b", second)
        await node.end("a")
        assert await node.run("b", second)


async def test_a_device_that_is_gone_is_named(node: NodeWithClaims) -> None:
    async with node.kubelet, node.agent():
        claim, device = node.claim("a1"), node.world.device()
        node.world.names.pop(device)
        with pytest.raises(PodStartError, match=f"ResourceClaim {claim}: .*{device}.*no longer on this node"):
            await node.run("a", claim)
