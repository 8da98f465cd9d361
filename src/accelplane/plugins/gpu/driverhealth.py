"""The health that the driver itself reports: the file `gpu_health` of xe, on the newest kernels.

Its words are `ok`, `warning` and `critical`. Only `critical` makes a card unhealthy; a warning is a metric.
"""

from collections.abc import Iterable

from accelplane.devices import Verdict
from accelplane.host import Host, HostError

_CRITICAL = Verdict("bad", "the driver reports gpu_health critical; see the kernel log", "driver")
_GOOD = Verdict("good")
_WORDS = ("ok", "warning")


def reports_health(host: Host, drm: str, card: str) -> bool:
    """Whether the driver of the card has the file. `drm` is the directory of all cards."""
    return host.exists(_path(drm, card))


def verdicts(host: Host, drm: str, cards: Iterable[str]) -> dict[str, Verdict]:
    """The verdicts of the cards whose drivers report one. Blocks as long as the files do."""
    found: dict[str, Verdict] = {}
    for card in cards:
        try:
            word = host.text(_path(drm, card))
        except HostError:
            continue
        if word == "critical":
            found[card] = _CRITICAL
        elif word in _WORDS:
            found[card] = _GOOD
    return found


def _path(drm: str, card: str) -> str:
    return f"{drm}/{card}/device/gpu_health"
