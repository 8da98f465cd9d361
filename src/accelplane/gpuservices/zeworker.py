"""The worker process of the Level-Zero service: all native code runs here, so that it cannot end or block the service.

Started as `python -m accelplane.gpuservices.zeworker MODE VERBOSITY`; MODE is `sysman` or `core`, which the first
request `init` initializes. Requests and responses are lines of ASCII text on standard input and output:

    init | health BDF | temperature BDF | memory BDF | indices        a request
    = CODE VALUE...                                                   its response, the ze_result_t and values
    ! TEXT                                                            `init` is not possible at all
    LEVEL TEXT                                                        a message for the log, before a response

Only the standard library is imported. The process ends with its standard input, and when its parent ends.
"""

import ctypes
import faulthandler
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO

from accelplane.gpuservices import zeapi, zereadings

_PR_SET_PDEATHSIG = 1
_MAX_LOG_TEXT = 2000


class Worker:
    """Serves requests until their end. `output` is where responses go, `load` loads the API."""

    def __init__(self, mode: str, verbosity: int, output: BinaryIO, load: Callable[[], zeapi.Api] = zeapi.Api) -> None:
        self._mode = mode
        self._load = load
        self._verbosity = verbosity
        self._output = output
        self._api: zeapi.Api | None = None
        self._sysman: zereadings.Sysman | None = None

    def serve(self, requests: BinaryIO) -> None:
        for line in requests:
            self._write(self._response(*line.decode("ascii").split()))

    def _response(self, request: str, bdf: str = "") -> str:
        if request == "init":
            return self._initialize()
        if self._api is None or self._sysman is None:
            raise ValueError(f"request {request}, expected init first")
        values: Sequence[object]
        match request:
            case "health":
                health = self._sysman.health(bdf)
                values = (health.code, int(health.memory), int(health.bus))
            case "temperature":
                values = self._sysman.temperatures(bdf)
            case "memory":
                values = self._sysman.memory_amount(bdf)
            case "indices":
                code, found = zereadings.indices(self._api, self._log)
                values = (code, *found)
            case _:
                raise ValueError(f"unknown request {request}")
        return " ".join(("=", *map(str, values)))

    def _initialize(self) -> str:
        try:
            self._api = self._load()
        except OSError as error:
            return f"! {_line(str(error))}; install the Level-Zero loader"
        self._sysman = zereadings.Sysman(self._api, self._log)
        function = "zeInit" if self._mode == "core" else "zesInit"
        if not self._api.has(function):
            return f"! {zeapi.LIBRARY} has no function {function}; install Level-Zero 1.9 or newer"
        try:
            self._api.call(function, 0)
        except zeapi.ZeError as error:
            return f"= {error.code}"
        if self._mode == "sysman":
            self._sysman.prepare()
        return "= 0"

    def _log(self, level: int, text: str) -> None:
        if level <= self._verbosity:
            self._write(f"{level} {_line(text)}")

    def _write(self, line: str) -> None:
        self._output.write(line.encode("ascii", "backslashreplace") + b"\n")
        self._output.flush()


def _line(text: str) -> str:
    return " ".join(text.split())[:_MAX_LOG_TEXT]


def main(arguments: Sequence[str]) -> int:
    mode, verbosity = arguments
    # Signals to the process group are for the service, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(all_threads=False)
    # Native code may print to standard output.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    Worker(mode, int(verbosity), output).serve(sys.stdin.buffer)
    # Destructors of native libraries could hang or crash.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
