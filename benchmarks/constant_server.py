"""A grpcio server that answers `Allocate` with constant bytes, as a baseline.

`python -m benchmarks.constant_server SOCKET HEX` serves until its standard input is closed.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from accelplane.kubelet.sockets import address


def main() -> None:
    path, answer = sys.argv[1], bytes.fromhex(sys.argv[2])
    # Without decoding, only the time of gRPC itself remains.
    methods = {"Allocate": grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer)}
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods),))
    server.add_insecure_port(address(path))
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop(None).wait()


@contextlib.contextmanager
def serving(path: str, answer: bytes) -> Iterator[None]:
    """Runs the server in a separate process."""
    command = [sys.executable, "-m", "benchmarks.constant_server", path, answer.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise RuntimeError("constant server: did not start")
        yield
        process.communicate()  # closes its standard input


if __name__ == "__main__":
    main()
