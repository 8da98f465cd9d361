"""Ioctls of processes elsewhere: a socket at which they come to the emulated kernel.

The other side (`simulate.seccomp`) has the process that calls, and sends a descriptor of its memory with each ioctl.
One call at a time on a connection; each packet is one message in MessagePack.
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
    """An ioctl on the node below `/dev` of that name; `/proc/<pid>/mem` of the caller comes with it."""

    node: str
    request: int
    argument: int


class Known(msgspec.Struct, frozen=True, tag_field="do", tag="known"):
    """Asks whether a node of that name answers ioctls; the answer is 1 or 0."""

    node: str


class Answer(msgspec.Struct, frozen=True):
    """What the call returned, and the errno or 0."""

    value: int = 0
    errno: int = 0


_decoder: msgspec.msgpack.Decoder[Call | Known] = msgspec.msgpack.Decoder(Call | Known)


class ProcessMemory:
    """The memory of a process, behind a descriptor of its `/proc/<pid>/mem`. Both methods raise `OSError` EFAULT."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def read(self, address: int, length: int) -> bytes:
        """That many bytes."""
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
        """Puts them there."""
        try:
            os.pwrite(self.descriptor, data, address)
        except (OSError, OverflowError):
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT)) from None


def connected(path: str) -> socket.socket:
    """A connection to the emulated kernel at that socket. Raises `OSError`."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def call(path: str, request: Call | Known, memory: ProcessMemory) -> int:
    """Has the emulated kernel at the socket answer. Raises `OSError`, with its errno or because it is gone."""
    with connected(path) as connection:
        socket.send_fds(connection, [msgspec.msgpack.encode(request)], [memory.descriptor])
        data = connection.recv(_LONGEST)
    if not data:
        raise OSError(errno.ENODEV, "the emulated kernel is gone")
    answer = msgspec.msgpack.decode(data, type=Answer)
    if answer.errno:
        raise OSError(answer.errno, os.strerror(answer.errno))
    return answer.value


@contextmanager
def answered(kernel: Kernel, path: str) -> Generator[None, None, None]:
    """Ioctls are answered at the socket `path` until left. Raises `OSError`."""
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
                case Known(node=node):
                    answer = Answer(int(kernel.has_node(node)))
                case Call(node=node, request=request, argument=argument):
                    try:
                        answer = Answer(kernel.ioctl(node, request, argument, ProcessMemory(*descriptors)))
                    except OSError as error:
                        answer = Answer(errno=error.errno or errno.EIO)
            connection.send(msgspec.msgpack.encode(answer))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
