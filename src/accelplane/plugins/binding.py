"""Binds PCI functions to the driver through which containers use them.

A failed attempt is not repeated at every scan: unbinding and binding cause uevents, and these the next scan. A failure
that is known before anything is written causes none, and is checked at every scan.
"""

import errno
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from accelplane.host import Host, HostError
from accelplane.host.drivers import BindError, bind, bind_problem, driver_of

RETRY_AFTER = 60.0


class _Attempt(NamedTuple):
    retry_at: float
    problem: str


class Binder:
    """Binds functions; `problems` is why a function, by its PCI address, could not be bound."""

    def __init__(
        self,
        driver: str,
        *,
        new_id: bool = True,
        ids: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """With `new_id`, IDs are written to the driver's `new_id` for functions whose driver_override is not writable.

        `ids`, texts such as `8086 4941`, are written there at the start.
        """
        self.problems: dict[str, str] = {}
        self._binds = False
        self._driver = driver
        self._new_id = new_id
        self._clock = clock
        self._attempts: dict[str, _Attempt] = {}
        self._new_ids = ids

    def bind(self, host: Host, addresses: Iterable[str]) -> None:
        """Binds the functions to the driver; writes nothing for those that are bound to it."""
        self._binds = True
        self._add_ids(host)
        now = self._clock()
        attempts: dict[str, _Attempt] = {}
        for address in addresses:
            if driver_of(host, address) == self._driver:
                continue
            attempt = self._attempts.get(address)
            if attempt is None or now >= attempt.retry_at:
                attempt = self._attempt(host, address, now)
            attempts[address] = attempt
        self._attempts = attempts
        self.problems = {address: attempt.problem for address, attempt in attempts.items() if attempt.problem}

    def problem(self, host: Host, address: str) -> str:
        """Why the function could not be bound, empty if it could.

        If `bind` was never called, as by `accelplane inspect`: why it would fail before it writes anything.
        """
        if not self._binds:
            return bind_problem(host, address, self._driver)
        return self.problems.get(address, "")

    def _attempt(self, host: Host, address: str, now: float) -> _Attempt:
        try:
            bind(host, address, self._driver, new_id=self._new_id)
        except BindError as error:
            return _Attempt(now + RETRY_AFTER if error.attempted else now, str(error))
        return _Attempt(now + RETRY_AFTER, "")

    def _add_ids(self, host: Host) -> None:
        """Writes the ids that are not written yet to the driver's `new_id`, if it is loaded."""
        remaining: list[str] = []
        for number in self._new_ids:
            try:
                host.write(f"/sys/bus/pci/drivers/{self._driver}/new_id", number)
            except HostError as error:
                if error.errno != errno.EEXIST:
                    host.note(f"{error}; load the module of {self._driver}")
                    remaining.append(number)
        self._new_ids = remaining
