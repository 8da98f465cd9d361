"""The update of a DaemonSet as one document, and what differs from the existing one."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from accelplane.kube.differences import differences
from accelplane.kube.ensure import digest_of
from accelplane.operator import update
from accelplane.operator.daemonsets import DaemonSet
from accelplane.operator.update import HASH_ANNOTATION

Object = dict[str, Any]


class Plan(NamedTuple):
    """`child` is the DaemonSet to ensure, `current` the existing one, `surplus` the names of others to delete."""

    child: DaemonSet
    current: Object | None
    surplus: tuple[str, ...]

    @property
    def document(self) -> Object:
        """The DaemonSet as it is written, with its hash."""
        annotations = {**self.child.metadata.annotations, HASH_ANNOTATION: digest_of(self.child.as_object())}
        metadata = msgspec.structs.replace(self.child.metadata, annotations=annotations)
        return msgspec.structs.replace(self.child, metadata=metadata).as_object()

    @property
    def differences(self) -> tuple[str, ...]:
        return tuple(map(str, differences(self.document, self.current))) if self.current is not None else ()

    @property
    def apply(self) -> Object | None:
        """The document to write, None if `current` matches it."""
        return self.document if self.current is None or self.differences else None


def plan(desired: DaemonSet, existing: Sequence[Object]) -> Plan:
    """The plan of `accelplane.operator.update`, with the existing DaemonSet that it selects."""
    made = update.plan(desired, existing)
    name = made.child.metadata.name
    selected = [
        each for each in existing if each["metadata"]["name"] == name and not each["metadata"].get("deletionTimestamp")
    ]
    return Plan(made.child, selected[0] if selected else None, made.surplus)
