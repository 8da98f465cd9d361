"""The health source of QAT: the heartbeat and the state of physical functions, which their virtual functions share.

When `heartbeat/status` in debugfs is read the driver queries the firmware and returns 0, or -1 if there is no heartbeat
(Documentation/ABI/testing/debugfs-driver-qat).
"""

from collections.abc import Callable, Sequence

from accelplane.devices import Device, HealthPolicy, Verdict
from accelplane.host import Host, HostError, Missing, pci_address
from accelplane.host.blocking import SerialThread
from accelplane.plugins.qat.scan import Pf, debugfs


class HeartbeatSource:
    """Verdicts by physical function. In a virtual machine, which has no physical functions, there are none."""

    # A device that comes back has been reset by its driver, and the next check is as far away as any delay.
    policy = HealthPolicy(interval=9.0, good_verdicts=1, recovery_delay=0.0)

    def __init__(self) -> None:
        self._thread = SerialThread()

    async def verdicts(self, host: Host, devices: Sequence[Device]) -> dict[str, Verdict]:
        """By unit. Reads in a thread: the firmware may respond slowly. No read starts while another one hangs."""
        addresses = {device.unit for device in devices if pci_address(device.unit)}
        return await self._thread.run(lambda: {address: _verdict(host, address) for address in addresses})

    async def run(self, host: Host, request_scan: Callable[[], None]) -> None:
        """Nothing to follow: the kernel reports no changes of these files."""


def _verdict(host: Host, address: str) -> Verdict:
    pf = Pf(address, f"/sys/bus/pci/devices/{address}")
    try:
        directory = debugfs(host, pf)
    except Missing:
        return Verdict("bad", f"physical function {address} has no driver")
    except HostError as error:
        return Verdict("unknown", str(error))
    try:
        if host.text(f"{pf.path}/qat/state") == "down":
            return Verdict("bad", f"{address} is down (qat/state)")
    except Missing:
        pass  # the file exists since Linux 6.0
    except HostError as error:
        return Verdict("unknown", str(error))
    try:
        # The response ends in a newline and a zero byte. If both were stripped, other responses would look like it.
        line = host.raw_text(f"{directory}/heartbeat/status").partition("\n")[0]
    except HostError as error:
        return Verdict("unknown", str(error))
    return Verdict("bad", f"{address} has no heartbeat") if line == "-1" else Verdict("good")
