"""Gives virtual functions to the driver that containers use them through.

An attempt is not made again with every scan: taking a function from its driver and giving it back tells everybody,
this plugin included, so that it would never come to rest. What was known to fail beforehand makes no such noise.
"""

import errno
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from accelplane.host import Host, HostError
from accelplane.host.drivers import BindError, bind, bind_problem, driver_of
from accelplane.plugins.qat.config import QatConfig
from accelplane.plugins.qat.models import BY_VF_DRIVER, VENDOR

RETRY_AFTER = 60.0


class _Attempt(NamedTuple):
    rests_until: float
    problem: str


class Binder:
    """Binds, and remembers in `problems` why a function, by its PCI address, could not be bound."""

    def __init__(self, config: QatConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.problems: dict[str, str] = {}
        self._binds = False
        self._config = config
        self._clock = clock
        self._attempts: dict[str, _Attempt] = {}
        self._ids = [number for driver in config.vf_drivers for number in BY_VF_DRIVER[driver].vf_ids]
        self._untold = self._ids if config.new_id == "always" else []

    def bind(self, host: Host, addresses: Iterable[str]) -> None:
        """Gives the functions to the driver; those that have it already stay untouched."""
        self._binds = True
        self._tell_ids(host)
        driver = self._config.dpdk_driver
        now = self._clock()
        attempts: dict[str, _Attempt] = {}
        for address in addresses:
            if driver_of(host, address) == driver:
                continue
            attempt = self._attempts.get(address)
            if attempt is None or now >= attempt.rests_until:
                attempt = self._attempt(host, address, driver, now)
            attempts[address] = attempt
        self._attempts = attempts
        self.problems = {address: attempt.problem for address, attempt in attempts.items() if attempt.problem}

    def problem(self, host: Host, address: str) -> str:
        """Why the function could not be bound; of a binder that never binds, why it could not. Empty when it could.

        So whoever only looks at a node is told what stands against it, too.
        """
        if not self._binds:
            return bind_problem(host, address, self._config.dpdk_driver)
        return self.problems.get(address, "")

    def _attempt(self, host: Host, address: str, driver: str, now: float) -> _Attempt:
        try:
            bind(host, address, driver, new_id=self._config.new_id != "never")
        except BindError as error:
            return _Attempt(now + RETRY_AFTER if error.attempted else now, str(error))
        return _Attempt(now + RETRY_AFTER, "")

    def _tell_ids(self, host: Host) -> None:
        """Tells the driver the ids that it does not know yet, as far as it is loaded."""
        untold: list[str] = []
        for number in self._untold:
            try:
                host.write(f"/sys/bus/pci/drivers/{self._config.dpdk_driver}/new_id", f"{VENDOR} {number}")
            except HostError as error:
                if error.errno != errno.EEXIST:
                    host.note(f"{error}; is the module of {self._config.dpdk_driver} loaded?")
                    untold.append(number)
        self._untold = untold
