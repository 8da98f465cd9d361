"""Client of xpumd, the daemon that monitors GPUs and streams changes of their health.

Contract: proto/xpumd.proto. A device that a message does not name keeps its state.
"""

import asyncio
from collections.abc import Callable, Mapping
from itertools import islice
from typing import NoReturn

from accelplane import rpc
from accelplane.gpuservices import xpumd_pb2 as pb
from accelplane.host import pci_address

MAX_DEVICES = 4096
_MAX_MESSAGE = 1024 * 1024
_BAD = pb.SEVERITY_LEVEL_WARNING
_SEVERITIES = {2: "warning", 3: "critical", 4: "failed"}
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0


class Xpumd:
    """The last states by PCI address: `states` has an empty text for a healthy device, else a description.

    `problem` is why the states are outdated, empty while the stream is open.
    """

    def __init__(self, socket: str) -> None:
        self.states: dict[str, str] = {}
        self.problem = f"xpumd at {socket}: not connected"
        self._socket = socket

    async def run(self, changed: Callable[[], None]) -> NoReturn:
        """Watches and calls `changed` after each change. Reconnects with exponential backoff until cancelled."""
        channel = rpc.Channel(self._socket, max_message=_MAX_MESSAGE)
        method, request = "/deviceinfo.DeviceInfo/WatchDeviceHealth", pb.WatchDeviceHealthRequest()
        pause = _FIRST_PAUSE
        try:
            while True:
                try:
                    async for message in channel.stream(method, request, pb.DeviceHealthResponse):
                        pause = _FIRST_PAUSE
                        if self._merge(states_of(message)):
                            changed()
                    problem = "ended its stream"
                except rpc.RpcError as error:
                    problem = " ".join(str(error).split())[:300]
                connected, self.problem = not self.problem, f"xpumd at {self._socket}: {problem}"
                if connected:
                    changed()
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        finally:
            channel.close()
            self.problem = f"xpumd at {self._socket}: not connected"

    def _merge(self, update: Mapping[str, str]) -> bool:
        """Whether the message changed a state, or was the first of a stream."""
        merged = {**self.states, **update}
        changed = bool(self.problem) or merged != self.states
        self.problem = ""
        # A peer that invents addresses must neither exhaust the memory nor replace known devices.
        self.states = dict(islice(merged.items(), MAX_DEVICES))
        return changed


def states_of(message: pb.DeviceHealthResponse) -> dict[str, str]:
    """The states in a message by PCI address. Devices without a valid address are skipped."""
    states: dict[str, str] = {}
    for device in message.devices:
        bdf = pci_address(device.info.pci.bdf.strip().lower())
        if bdf is not None:
            states[bdf] = "; ".join(_description(entry) for entry in device.health if entry.severity >= _BAD)[:500]
    return states


def _description(entry: pb.HealthStatus) -> str:
    severity = _SEVERITIES.get(entry.severity, f"severity {entry.severity}")
    text = " ".join((entry.reason or entry.message).split())[:200]
    name = entry.name[:60] or "health"
    return f"{name} {severity}: {text}" if text else f"{name} {severity}"
