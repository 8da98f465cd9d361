"""Plugins and pods of the embedded kubelet's tests."""

from fake_plugin import FakePlugin, HandlerError

from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb
from accelplane.kubelet.embedded import EmbeddedKubelet, Pod

GADGET = "example.com/gadget"
GIZMO = "example.com/gizmo"
PREFERS = pb.DevicePluginOptions(get_preferred_allocation_available=True)


async def join(kubelet: EmbeddedKubelet, plugin: FakePlugin) -> FakePlugin:
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


def refuse(_: object) -> None:
    raise HandlerError("device a is on fire")
