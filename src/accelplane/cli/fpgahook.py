"""`intel-fpga-crihook` and `accelplane-fpga-hook`: the OCI hook that programs FPGAs before a container starts.

The runtime writes the container's state to standard input. The exit status is 0 or 1; on failure `kubectl describe pod`
shows the line on standard error. The hook runs on the host, once for each region device of a container, while the
runtime waits, so imports are minimal.
"""

import os
import sys
import time
from collections.abc import Mapping, Sequence

from accelplane.cli import signals
from accelplane.fpga import FpgaError
from accelplane.fpga.hook import read_request, run
from accelplane.fpga.program import DEFAULT_RETRY, time_limit
from accelplane.fpga.request import STATE_LIMIT
from accelplane.host import Host, HostError

PROGRAM = "intel-fpga-crihook"
MAX_TIMEOUT = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    signals.end_as_usual()
    words = sys.argv[1:] if arguments is None else arguments
    given = _parse(words)
    seconds = float(given.get("timeout", DEFAULT_RETRY.timeout))
    host = Host(str(given.get("root", "/")))
    try:
        if not 0 < seconds <= MAX_TIMEOUT:
            raise FpgaError(f"-timeout: found {seconds:g}, expected more than 0 and at most {MAX_TIMEOUT:g} seconds")
        begun = time.monotonic()
        with time_limit(seconds, "reading the container's state from standard input"):
            state = _state()
        request = read_request(state, require_mode=bool(given.get("require-annotation")))
        left = max(0.1, round(seconds - (time.monotonic() - begun), 1))
        run(host, request, retry=DEFAULT_RETRY._replace(timeout=left))
    except (FpgaError, HostError, MemoryError) as error:
        print(f"{PROGRAM}: {str(error) or 'not enough memory'}", file=sys.stderr)
        return 1
    finally:
        for note in host.notes:
            print(f"{PROGRAM}: {note}", file=sys.stderr)
    return 0


def _state() -> bytes:
    """Reads standard input. Not from `sys.stdin`, which is None if it is closed. Raises `FpgaError`."""
    try:
        os.set_blocking(0, True)  # the parent process may have made it non-blocking
        with open(0, "rb", closefd=False) as file:
            return file.read(STATE_LIMIT + 1)
    except OSError as error:
        raise FpgaError(f"the container's state: standard input: {error.strerror}") from None


def _parse(words: Sequence[str]) -> Mapping[str, str | int | float | bool]:
    if not words:
        return {}
    from accelplane.cli.goflags import Flag, parse_or_exit  # noqa: PLC0415 - CRI-O passes no arguments with hooks.d

    flags = (
        Flag("ports", "", "in the configuration of runtimes, where the hook reads it: ports allocated to the "
             "container, separated by commas, or any"),
        Flag("require-annotation", False, "fail unless the container has the annotation of the device plugin's "
             "region mode"),
        Flag("root", "/", "find sysfs, devfs, locks and the bitstream store under this directory"),
        Flag("timeout", DEFAULT_RETRY.timeout, "total time limit in seconds"),
    )  # fmt: skip
    return parse_or_exit(PROGRAM, flags, words)


if __name__ == "__main__":
    sys.exit(main())
