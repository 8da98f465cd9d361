"""The devices that containers hold. No effects, no plugins."""

from collections.abc import Iterable, Iterator

from accelplane.kubelet.checkpoint import Holding
from accelplane.kubelet.embedded.model import Pod, RunningContainer


class Allocations:
    """The holdings of all containers, each found by pod uid, container and resource."""

    def __init__(self, holdings: Iterable[Holding] = ()) -> None:
        self._holdings = {(one.pod_uid, one.container, one.resource): one for one in holdings}

    def __iter__(self) -> Iterator[Holding]:
        return iter(self._holdings.values())

    def find(self, uid: str, container: str, resource: str) -> Holding | None:
        return self._holdings.get((uid, container, resource))

    def record(self, holding: Holding) -> None:
        self._holdings[holding.pod_uid, holding.container, holding.resource] = holding

    def forget(self, uid: str) -> None:
        """Frees the devices of a pod."""
        self._holdings = {key: holding for key, holding in self._holdings.items() if holding.pod_uid != uid}

    def forget_all_but(self, uids: Iterable[str]) -> None:
        """Frees the devices of all other pods."""
        alive = frozenset(uids)
        self._holdings = {key: holding for key, holding in self._holdings.items() if holding.pod_uid in alive}

    def in_use(self, resource: str) -> frozenset[str]:
        return frozenset(key for holding in self if holding.resource == resource for key in holding.ids)

    def reusable(self, uid: str, pod: Pod, resource: str) -> frozenset[str]:
        """The IDs that the pod's init containers hold and its other containers do not hold yet."""
        return self._ids(uid, pod.init_containers, resource) - self._ids(uid, pod.containers, resource)

    def container(self, uid: str, container: str) -> RunningContainer:
        """The container runtime's input for a container."""
        held = [each for key, each in sorted(self._holdings.items()) if key[:2] == (uid, container)]
        return RunningContainer.of((each.answer for each in held), {each.resource: each.ids for each in held})

    def _ids(self, uid: str, containers: Iterable[str], resource: str) -> frozenset[str]:
        holdings = (self.find(uid, container, resource) for container in containers)
        return frozenset(key for holding in holdings if holding for key in holding.ids)
