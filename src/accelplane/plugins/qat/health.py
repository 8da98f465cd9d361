"""The health source of QAT: the heartbeat and the state of physical functions, which their virtual functions share.

When `heartbeat/status` in debugfs is read the driver queries the firmware and returns 0, or -1 if there is no heartbeat
(Documentation/ABI/testing/debugfs-driver-qat).
"""

from collections.abc import Collection, Sequence

from accelplane.devices import Device, HealthPolicy, Verdict
from accelplane.host import Host, HostError, Missing, pci_address
from accelplane.plugins.qat.scan import Pf, debugfs


class HeartbeatSource:
    """Verdicts by physical function. In a virtual machine, which has no physical functions, there are none.

    Below a root other than `/`, the directories that a read has opened are kept for the next one, because opening them
    component by component takes most of the time. Files are not: an open file in debugfs prevents rmmod of the driver.
    """

    # A device that comes back has been reset by its driver, and the next check is as far away as any delay.
    policy = HealthPolicy(interval=9.0, good_verdicts=1, recovery_delay=0.0)

    def __init__(self) -> None:
        self._opened: Host | None = None  # of `all_good`, which one thread calls

    def reopen(self) -> None:
        """Opens the directories anew at the next read: something has changed, and links may lead elsewhere."""
        self._opened = None

    async def verdicts(self, host: Host, devices: Sequence[Device]) -> dict[str, Verdict]:
        """By unit. Reads in a thread: the firmware may respond slowly."""
        addresses = {device.unit for device in devices if pci_address(device.unit)}
        return await host.run(lambda host: {address: _verdict(host, address) for address in addresses})

    def all_good(self, host: Host, devices: Sequence[Device]) -> bool:
        """Whether all physical functions are good. Blocks until the firmware has responded."""
        addresses = {device.unit for device in devices if pci_address(device.unit)}
        return all(verdict.answer == "good" for verdict in self._read(host, addresses).values())

    def _read(self, host: Host, addresses: Collection[str]) -> dict[str, Verdict]:
        opened = self._opened if host.root != "/" else None
        if opened is not None:
            verdicts = {address: _verdict(opened, address) for address in addresses}
            if all(verdict.answer == "good" for verdict in verdicts.values()):
                return verdicts
        self._opened = host  # a directory may have been removed and created again
        return {address: _verdict(host, address) for address in addresses}


def _verdict(host: Host, address: str) -> Verdict:
    pf = Pf(address, f"/sys/bus/pci/devices/{address}")
    try:
        directory = debugfs(host, pf)
    except Missing:
        return Verdict("bad", f"physical function {address} has no driver", "driver")
    except HostError as error:
        return Verdict("unknown", str(error))
    try:
        if host.optional_text(f"{pf.path}/qat/state") == "down":  # the file exists since Linux 6.0
            return Verdict("bad", f"{address} is down (qat/state)", "firmware")
        # The response ends in a newline and a zero byte. If both were stripped, other responses would look like it.
        line = host.raw_text(f"{directory}/heartbeat/status").partition("\n")[0]
    except HostError as error:
        return Verdict("unknown", str(error))
    return Verdict("bad", f"{address} has no heartbeat", "heartbeat") if line == "-1" else Verdict("good")
