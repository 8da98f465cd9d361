"""Ioctls of other processes, which the emulated kernel receives on a socket.

The client (`simulate.seccomp`) supervises the calling process, and sends a descriptor of its memory with each ioctl.
A connection carries one call, in one MessagePack message. The answer is the return value of the call, or the negative
errno, as of a system call.
"""

import errno
import os
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

import msgspec

from accelplane.simulate.kernel.kernel import Kernel

_LONGEST = 4096


class Call(msgspec.Struct, frozen=True, tag_field="do", tag="ioctl"):
    """An ioctl on the node below `/dev` of that name; sent with a descriptor of `/proc/<pid>/mem` of the caller."""

    node: str
    request: int
    argument: int


class HasNode(msgspec.Struct, frozen=True, tag_field="do", tag="known"):
    """Requests whether a node supports ioctls; the result is 1 or 0."""

    node: str


_decoder: msgspec.msgpack.Decoder[Call | HasNode] = msgspec.msgpack.Decoder(Call | HasNode)


class ProcessMemory:
    """The memory of a process, behind a descriptor of its `/proc/<pid>/mem`. Both methods raise `OSError` EFAULT."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def read(self, address: int, length: int) -> bytes:
        pieces = bytearray()
        while len(pieces) < length:
            try:
                piece = os.pread(self.descriptor, length - len(pieces), address + len(pieces))
            except (OSError, OverflowError):
                piece = b""
            if not piece:
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
            pieces += piece
        return bytes(pieces)

    def write(self, address: int, data: bytes) -> None:
        try:
            os.pwrite(self.descriptor, data, address)
        except (OSError, OverflowError):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT)) from None


def connect(path: str) -> socket.socket:
    """Connects to the emulated kernel at the socket `path`. Raises `OSError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def call(path: str, request: Call | HasNode, memory: ProcessMemory) -> int:
    """Sends a call to the emulated kernel at the socket. Raises `OSError` with its errno, or if it has exited."""
    with connect(path) as connection:
        socket.send_fds(connection, [msgspec.msgpack.encode(request)], [memory.descriptor])
        data = connection.recv(_LONGEST)
    if not data:
        raise OSError(errno.ENODEV, "the emulated kernel has exited")
    answer = msgspec.msgpack.decode(data, type=int)
    if answer < 0:
        raise OSError(-answer, os.strerror(-answer))
    return answer


@contextmanager
def serve_ioctls(kernel: Kernel, path: str) -> Generator[None, None, None]:
    """Serves ioctls at the socket `path`. Raises `OSError`."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
        thread = threading.Thread(target=_accept, args=(kernel, listener), daemon=True)
        thread.start()
        try:
            yield
        finally:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            os.unlink(path)


def _accept(kernel: Kernel, listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_serve, args=(kernel, connection), daemon=True).start()


def _serve(kernel: Kernel, connection: socket.socket) -> None:
    with connection, suppress(OSError, msgspec.DecodeError):
        data, descriptors, _flags, _address = socket.recv_fds(connection, _LONGEST, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            match _decoder.decode(data):
                case HasNode(node=node):
                    answer = int(kernel.has_node(node))
                case Call(node=node, request=request, argument=argument):
                    try:
                        answer = kernel.ioctl(node, request, argument, ProcessMemory(*descriptors))
                    except OSError as error:
                        answer = -(error.errno or errno.EIO)
            connection.send(msgspec.msgpack.encode(answer))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
