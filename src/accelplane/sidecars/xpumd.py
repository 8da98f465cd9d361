"""Client of xpumd, the daemon that watches GPUs and tells when one's health changes.

Contract: proto/xpumd.proto. It streams; a message names the devices whose state it knows, others keep theirs.
"""

import asyncio
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NoReturn

from accelplane import rpc
from accelplane.host import pci_address
from accelplane.sidecars import xpumd_pb2 as pb

MAX_DEVICES = 4096
_MAX_MESSAGE = 1024 * 1024
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
        self._channel = rpc.Channel(socket, max_message=_MAX_MESSAGE)

    async def follow(self, changed: Callable[[], None]) -> NoReturn:
        """Listens, and calls `changed` when a message brought news. Reconnects for ever; runs until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            try:
                async for message in self._channel.stream(
                    "/deviceinfo.DeviceInfo/WatchDeviceHealth", pb.WatchDeviceHealthRequest(), pb.DeviceHealthResponse
                ):
                    pause = _FIRST_PAUSE
                    if self._learn(states_of(message)):
                        changed()
                self.problem = f"xpumd at {self._socket}: ended its stream"
            except rpc.RpcError as error:
                self.problem = f"xpumd at {self._socket}: {' '.join(str(error).split())[:300]}"
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        self._channel.close()

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
