"""How long namespaces have held devices."""

from collections import defaultdict
from collections.abc import Mapping

from .arithmetic import device_shares
from .model import Node

Key = tuple[str, str]


class Usage:
    """Device seconds by namespace and resource, from the snapshots of nodes at the times of their changes."""

    def __init__(self, started: float) -> None:
        self._updated = started
        self._seconds: defaultdict[Key, float] = defaultdict(float)
        self._held: defaultdict[Key, float] = defaultdict(float)
        # How many nodes contribute to a key: sums of fractions would seldom return to exactly 0.
        self._nodes: defaultdict[Key, int] = defaultdict(int)

    def update(self, old: Mapping[str, Node], new: Mapping[str, Node], now: float) -> None:
        """Counts the time of the former allocations until `now`, and stores the present ones."""
        self._advance(now)
        for name in old.keys() | new.keys():
            before, after = old.get(name), new.get(name)
            if before is not after:
                self._change(before, -1)
                self._change(after, 1)

    def seconds(self, now: float) -> Mapping[Key, float]:
        """The device seconds until `now`."""
        self._advance(now)
        return dict(self._seconds)

    def _advance(self, now: float) -> None:
        # The clock may be set back.
        passed = max(0.0, now - self._updated)
        self._updated = now
        for key, counts in self._held.items():
            self._seconds[key] += counts * passed

    def _change(self, node: Node | None, sign: int) -> None:
        if node is None:
            return
        for key, share in device_shares(node).items():
            self._held[key] += sign * share
            self._nodes[key] += sign
            if not self._nodes[key]:
                del self._held[key], self._nodes[key]
