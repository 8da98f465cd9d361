"""Verdicts on physical functions, which become unhealthy with all their virtual functions.

The driver asks the firmware for its heartbeat when `heartbeat/status` in debugfs is read, and answers 0, or -1 when
there was none (Documentation/ABI/testing/debugfs-driver-qat).
"""

from collections.abc import Iterable

from accelplane.devices import Device, Verdict
from accelplane.host import Host, HostError, Missing
from accelplane.plugins.qat.scan import Pf, debugfs, physical_function


def verdicts(host: Host, devices: Iterable[Device]) -> dict[str, Verdict]:
    """By the devices' units; in a virtual machine, which has no physical functions, there are none."""
    found: dict[str, Verdict] = {}
    for device in devices:
        pf = physical_function(host, device.id)
        if pf is not None:
            found[device.unit] = _verdict(host, pf)
    return found


def _verdict(host: Host, pf: Pf) -> Verdict:
    try:
        directory = debugfs(host, pf)
    except Missing:
        return Verdict("bad", f"no driver has the physical function {pf.address}")
    except HostError as error:
        return Verdict("unknown", str(error))
    try:
        if host.optional_text(f"{pf.path}/qat/state") == "down":  # Linux 6.0 or newer
            return Verdict("bad", f"{pf.address} is down (qat/state)")
        # The answer ends in a newline and a zero byte; stripping both would make others look like it.
        line = host.raw_text(f"{directory}/heartbeat/status").partition("\n")[0]
    except HostError as error:
        return Verdict("unknown", str(error))
    return Verdict("bad", f"{pf.address} has no heartbeat") if line == "-1" else Verdict("good")
