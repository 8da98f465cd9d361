"""A kubelet's device manager for tests on a `VirtualTimeLoop`."""

import asyncio
import os
from pathlib import Path

from accelplane import rpc
from accelplane.kubelet import checkpoint, messages
from accelplane.kubelet import deviceplugin_v1beta1_pb2 as pb

LIST_AND_WATCH, ALLOCATE = "/v1beta1.DevicePlugin/ListAndWatch", "/v1beta1.DevicePlugin/Allocate"
_DEADLINE = 40.0
# Within this time after an Allocate call, a container that nothing names may still start.
RECORDING = 120.0


class ScriptedKubelet:
    """A device manager: registration, lists, Allocate, and a checkpoint that it writes at each list.

    `crashes` are events that would crash a real kubelet (docs/kubelet-defects.md).
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.lists: dict[str, dict[str, bool]] = {}
        self.allocated: dict[str, set[str]] = {}
        self._allocated_at: dict[tuple[str, str], float] = {}
        self.crashes: list[str] = []
        self.records = True  # whether it writes its checkpoint
        self.answers_register = True  # else it neither answers nor opens a stream
        self.registrations = 0
        self.ends_streams = 0  # the number of streams that end after their first list, while Register is unanswered
        self._unanswered: list[tuple[str, str]] = []
        self._streams: set[asyncio.Task[None]] = set()
        self._server: rpc.RpcServer | None = None
        self._listed = asyncio.Event()
        self._stopped: set[str] = set()

    async def start(self) -> None:
        """Deletes all sockets, then creates its own, as a kubelet does."""
        for name in os.listdir(self.directory):
            if name.endswith(".sock"):
                os.unlink(os.path.join(self.directory, name))
        self._server = rpc.RpcServer({messages.REGISTER: rpc.unary(pb.RegisterRequest, pb.Empty, self._register)})
        await self._server.start(os.path.join(self.directory, "kubelet.sock"))

    async def stop(self) -> None:
        for stream in self._streams:
            stream.cancel()
        if self._streams:
            await asyncio.wait(self._streams)
        if self._server is not None:
            await self._server.stop()
        self._server = None
        self._listed.clear()
        self.lists.clear()
        self._stopped.clear()

    async def allocate(self, resource: str, id_: str) -> None:
        """Allocates one ID to a container, which holds it until `release`."""
        call = (resource, id_)
        self._unanswered.append(call)
        request = pb.AllocateRequest(container_requests=[pb.ContainerAllocateRequest(devices_ids=[id_])])
        try:
            async with rpc.Channel(self._socket(resource)) as plugin:
                await plugin.call(ALLOCATE, request, pb.AllocateResponse, deadline=_DEADLINE)
        except rpc.RpcError:
            return
        finally:
            self._unanswered.remove(call)
        if id_ not in self.lists.get(resource, {id_: True}):
            self.crashes.append(f"Allocate of {id_} was answered after it had left the list")
        self.allocated.setdefault(resource, set()).add(id_)
        self._allocated_at[call] = asyncio.get_running_loop().time()
        self._write_checkpoint()

    def release(self, resource: str, id_: str) -> None:
        """The container ends."""
        self.allocated[resource].discard(id_)
        self._write_checkpoint()

    def _socket(self, resource: str) -> str:
        return os.path.join(self.directory, resource.replace("/", "-") + ".sock")

    async def _register(self, request: pb.RegisterRequest) -> pb.Empty:
        self.registrations += 1
        if not self.answers_register:
            await asyncio.Event().wait()
        stream = asyncio.create_task(self._watch(request.resource_name))
        self._streams.add(stream)
        stream.add_done_callback(self._streams.discard)
        if self.ends_streams:
            self.ends_streams -= 1
            await self._listed.wait()
            stream.cancel()
            await asyncio.wait((stream,))
        return pb.Empty()

    async def _watch(self, resource: str) -> None:
        try:
            async with rpc.Channel(self._socket(resource)) as plugin:
                async for message in plugin.stream(LIST_AND_WATCH, pb.Empty(), pb.ListAndWatchResponse):
                    self._record_devices(
                        resource, {device.ID: device.health == "Healthy" for device in message.devices}
                    )
        except rpc.RpcError:
            pass
        finally:
            if resource in self.lists:
                self.lists[resource] = dict.fromkeys(self.lists[resource], False)
                self._stopped.add(resource)

    def list_at_rest(self, resource: str) -> dict[str, bool]:
        """The list after five minutes, when the kubelet has removed the devices of a stopped plugin."""
        return {} if resource in self._stopped else self.lists.get(resource, {})

    def may_start(self, resource: str, now: float) -> set[str]:
        """IDs of recent Allocate calls, whose containers may still start as far as a plugin knows."""
        return {id_ for (name, id_), at in self._allocated_at.items() if name == resource and now - at < RECORDING}

    def _record_devices(self, resource: str, devices: dict[str, bool]) -> None:
        missing = self.allocated.get(resource, set()) - devices.keys()
        if missing:
            self.crashes.append(f"{sorted(missing)} left the list of {resource} while a container holds it")
        self.lists[resource] = devices
        self._stopped.discard(resource)
        self._listed.set()
        self._write_checkpoint()

    def spoil_checkpoint(self) -> None:
        """Makes the checkpoint unreadable until it is written again."""
        Path(self.directory, checkpoint.FILE_NAME).write_text("not JSON")

    def _write_checkpoint(self) -> None:
        if not self.records:
            return
        holdings = tuple(
            checkpoint.Holding(f"pod-{id_}", "main", resource, {-1: (id_,)}, b"")
            for resource, ids in self.allocated.items()
            for id_ in sorted(ids)
        )
        healthy = {name: tuple(id_ for id_, well in ids.items() if well) for name, ids in self.lists.items()}
        checkpoint.write_checkpoint(self.directory, checkpoint.Checkpoint(holdings, healthy))
