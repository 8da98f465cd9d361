"""Runs commands that use the API server: flags, logging and exit codes.

The exit code is 1 for a fatal error, with one line on standard error or in the log, and 2 for invalid flags. The client
modules are imported only after the flags have been parsed, because they are large.
"""

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence

from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Flag, Value, parse_or_exit, with_defaults

log = logging.getLogger(__name__)

Values = Mapping[str, Value]

_MAX_SHUTDOWN_DELAY = 60


def run_in_cluster(
    program: str,
    flags: Sequence[Flag],
    words: Sequence[str] | None,
    work: Callable[[Values], Coroutine[None, None, None]],
    *,
    lenient: bool,
    translate: Callable[[Values], Values] = lambda given: given,
) -> int:
    """Runs `work` with the values of all flags. Returns the exit code.

    With `lenient`, arguments that are not flags are ignored. `translate` replaces flags of other names. `work` may
    raise `ValueError` with the name of an invalid flag, `OSError`, `ApiError` and `CertificateError`.
    """
    signals.end_at_once()
    given = parse_or_exit(program, flags, words, lenient=lenient)
    if importlib.util.find_spec("prometheus_client") is None:
        sys.stderr.write(
            f"{program}: Python package prometheus-client not found; run pip install prometheus-client cryptography, "
            "or use the image of this program\n"
        )
        return 1
    from accelplane.apiserver import ApiError  # noqa: PLC0415
    from accelplane.http.servingtls import CertificateError  # noqa: PLC0415

    try:
        given = translate(given)
        logflags.start(given, program.replace(" ", "-"))
        asyncio.run(work(with_defaults(flags, given, os.environ)))
    except ValueError as error:
        sys.stderr.write(f"{program}: {error}\n")
        return 1
    except (ApiError, CertificateError, OSError) as error:
        log.critical("%s", logflags.message_of(error))
        return 1
    return 0


def port_of(values: Values) -> int:
    """The flag `-port`. Raises `ValueError`."""
    port = int(values["port"])
    if not 0 <= port <= 65535:
        raise ValueError(f"-port: {port}: expected 0 to 65535")
    return port


def shutdown_delay_of(values: Values) -> float:
    """The flag `-shutdown-delay` in seconds. Raises `ValueError`."""
    delay = float(values["shutdown-delay"])
    if not 0 <= delay <= _MAX_SHUTDOWN_DELAY:
        raise ValueError(f"-shutdown-delay: {delay:g}: expected 0 to {_MAX_SHUTDOWN_DELAY} seconds")
    return delay


def address_of(values: Values, flag: str) -> str:
    """The address of a flag as host:port or :port, 0 if it is disabled. Raises `ValueError`."""
    from accelplane.http.listening import split_address  # noqa: PLC0415

    address = str(values[flag])
    if address != "0":
        try:
            split_address(address)
        except ValueError as error:
            raise ValueError(f"-{flag}: {error}, or 0 to disable it") from None
    return address


def check_name(source: str, name: str) -> str:
    """Returns the name of an object from a flag or a variable. Raises `ValueError`."""
    from accelplane.kube.names import is_dns_subdomain  # noqa: PLC0415

    if not is_dns_subdomain(name):
        raise ValueError(f"{source}: {name!a}: expected a name of a-z, 0-9, - and .")
    return name
