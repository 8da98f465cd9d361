"""The health that the driver xe itself reports in files of the PCI device, on the newest kernels.

`gpu_health` is `ok`, `warning` or `critical`. Only `critical` makes a card unhealthy; a warning is a metric, and pages
show it. `survivability_mode` exists, and is not empty, while the firmware has to be flashed before the GPU can be used.
"""

from collections.abc import Iterable, Mapping

from accelplane.devices import Verdict
from accelplane.host import Host, HostError

_VERDICTS: Mapping[str, Verdict] = {
    "ok": Verdict("good"),
    "warning": Verdict("good", "the driver reports gpu_health warning; see the kernel log", "driver"),
    "critical": Verdict("bad", "the driver reports gpu_health critical; see the kernel log", "driver"),
}
_SHOWN = 40


def reports_health(host: Host, drm: str, card: str) -> bool:
    """Whether the driver of the card has one of the files. `drm` is the directory of all cards."""
    return host.exists(f"{drm}/{card}/device/gpu_health") or bool(survivability_mode(host, f"{drm}/{card}/device"))


def survivability_mode(host: Host, device: str) -> str:
    """Why the GPU in this directory cannot be used until its firmware is flashed, empty if it can."""
    mode = host.text_or_empty(f"{device}/survivability_mode")
    return f"survivability mode {mode.splitlines()[0][:_SHOWN]!a}: flash the firmware of the GPU" if mode else ""


def verdicts(host: Host, drm: str, cards: Iterable[str]) -> dict[str, Verdict]:
    """The verdicts of the cards whose drivers report one. Blocks as long as the files do."""
    found: dict[str, Verdict] = {}
    for card in cards:
        device = f"{drm}/{card}/device"
        if problem := survivability_mode(host, device):
            found[card] = Verdict("bad", problem, "firmware")
            continue
        try:
            health = host.optional_text(f"{device}/gpu_health")
        except HostError as error:
            found[card] = Verdict("unknown", str(error))
        else:
            if verdict := _VERDICTS.get(health or ""):
                found[card] = verdict
    return found
