"""Client of xpumd, the daemon that watches GPUs and tells when one's health changes.

Contract: proto/xpumd.proto. It streams; a message names the devices whose state it knows, others keep theirs.
"""

import asyncio
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NoReturn

import grpc.aio
from google.protobuf.message import DecodeError

from accelplane.host import pci_address
from accelplane.sidecars import xpumd_pb2 as pb
from accelplane.sidecars.channel import explained, open_channel

MAX_DEVICES = 4096
_BAD = pb.SEVERITY_LEVEL_WARNING
_SEVERITIES = {2: "warning", 3: "critical", 4: "failed"}
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


class Xpumd:
    """What xpumd said last, by PCI address: in `states` an empty text for a healthy device, else what ails it.

    `problem` says why nothing newer is known; it is empty while the stream flows.
    """

    def __init__(self, socket: str) -> None:
        self.states: dict[str, str] = {}
        self.problem = f"xpumd at {socket}: not connected"
        self._socket = socket
        self._channel = open_channel(socket)
        # Messages are decoded here: gRPC would hand out None for what is none, and print a traceback.
        self._watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            "/deviceinfo.DeviceInfo/WatchDeviceHealth"
        )

    async def follow(self, changed: Callable[[], None]) -> NoReturn:
        """Listens, and calls `changed` when a message brought news. Reconnects for ever; runs until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            # Waits for the connection, which the channel itself tries again with growing pauses.
            stream = self._watch(pb.WatchDeviceHealthRequest().SerializeToString(), wait_for_ready=True)
            try:
                async for data in stream:
                    news = states_of(pb.DeviceHealthResponse.FromString(data))
                    pause = _FIRST_PAUSE
                    if self._learn(news):
                        changed()
                self.problem = f"xpumd at {self._socket}: ended its stream"
            except grpc.aio.AioRpcError as error:
                self.problem = f"xpumd at {self._socket}: {explained(error)}"
            except DecodeError:
                self.problem = f"xpumd at {self._socket}: sent what is not a DeviceHealthResponse message"
            finally:
                stream.cancel()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def close(self) -> None:
        await self._channel.close()

    def _learn(self, news: Mapping[str, str]) -> bool:
        """Whether the message changed what is known, or that it is."""
        merged = {**self.states, **news}
        changed = bool(self.problem) or merged != self.states
        self.problem = ""
        # A peer that makes up addresses must neither fill the memory nor push out those known before.
        self.states = dict(islice(merged.items(), MAX_DEVICES))
        return changed


def states_of(message: pb.DeviceHealthResponse) -> dict[str, str]:
    """What a message says, by PCI address. Devices without a proper address are left out."""
    states: dict[str, str] = {}
    for device in message.devices:
        bdf = pci_address(device.info.pci.bdf.strip().lower())
        if bdf is not None:
            states[bdf] = "; ".join(_complaint(entry) for entry in device.health if entry.severity >= _BAD)[:500]
    return states


def _complaint(entry: pb.HealthStatus) -> str:
    severity = _SEVERITIES.get(entry.severity, f"severity {entry.severity}")
    text = " ".join((entry.reason or entry.message).split())[:200]
    name = entry.name[:60] or "health"
    return f"{name} {severity}: {text}" if text else f"{name} {severity}"
