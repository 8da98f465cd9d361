"""What the units of a family have to know of their DRA driver."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from accelplane.devices import Unit


class DriverView(Protocol):
    """The driver of one family. `prepared`, `bound` and `cleanup` are as in `ClaimPreparer`."""

    def prepared(self) -> Mapping[str, Sequence[str]]: ...
    def held(self) -> Collection[str]:
        """The units that claims hold, by the journal as it is now. Blocks. Raises `JournalError`."""
        ...

    def bound(self) -> Mapping[str, Unit]: ...
    def cleanup(self) -> Mapping[str, str]: ...

    async def idle(self) -> None:
        """Waits for the end of all calls about claims."""
        ...

    def published(self) -> Collection[str] | None:
        """The units that slices of this node name, None while it is not known."""
        ...


class _NoDriver:
    """While a family needs no driver, or cannot have one: what claims hold and slices name is not known."""

    def prepared(self) -> Mapping[str, Sequence[str]]:
        return {}

    def held(self) -> Collection[str]:
        return ()

    def bound(self) -> Mapping[str, Unit]:
        return {}

    def cleanup(self) -> Mapping[str, str]:
        return {}

    async def idle(self) -> None:
        pass

    def published(self) -> Collection[str] | None:
        return None


NO_DRIVER = _NoDriver()
