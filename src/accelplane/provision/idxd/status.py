"""The error codes of the idxd driver in `cmd_status`.

Facts: the kernel's include/uapi/linux/idxd.h.
"""

from accelplane.host import Host, HostError

_IOMMU = (
    "the IOMMU must be on and in scalable mode (intel_iommu=on,sm_on on the kernel's command line, and VT-d on in the"
    " firmware)"
)
_MEANINGS = {
    0x80000010: "the device is enabled",
    0x80000020: "the device is not enabled",
    0x80000021: "the queue is enabled",
    0x80020000: "it could not be registered for DMA",
    0x80030000: "the queue has no group",
    0x80040000: "the queue has no name",
    0x80050000: f"a shared queue needs shared virtual memory: {_IOMMU}",
    0x80060000: "the shared queue has no threshold",
    0x80070000: "the queue's portals could not be mapped",
    0x80080000: "the queue's resources could not be allocated",
    0x80090000: "the queue's counter could not be allocated",
    0x800A0000: "the queue's DMA channel could not be registered",
    0x800B0000: "the queue's character device could not be made",
    0x800C0000: f"shared queues are not supported here: {_IOMMU}",
    0x800D0000: "no queue is configured",
    0x800E0000: "the queue has no size",
    0x800F0000: "the queue lacks the privileged mode",
    0x80100000: "the queue's interrupt could not be allocated",
    0x80110000: f"queues for user space need shared virtual addressing: {_IOMMU}",
    0x80120000: "the event log could not be set up",
    0x80200000: "the queue has no driver_name, or that of another driver",
}


def command_error(path: str, host: Host, _error: HostError) -> str:
    """The error in `cmd_status` of the device in the directory `path`, empty if there is none."""
    try:
        text = host.text(f"{path}/cmd_status")
    except HostError as error:
        return f"cmd_status cannot be read: {error}"
    try:
        code = int(text, 0)
    except ValueError:
        return f"cmd_status {text[:80]!a}"
    return f"cmd_status {code:#x}: {_MEANINGS.get(code, 'unknown')}" if code else ""
