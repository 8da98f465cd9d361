"""Ioctls of processes elsewhere: a socket at which they come to the emulated kernel.

The other side (`simulate.seccomp`) has the process that calls, and lends its memory: while the kernel works on a call
it asks for pieces of it and puts others there. One call at a time on a connection; each message is a length of four
bytes and MessagePack.
"""

import errno
import os
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

import msgspec

from accelplane.simulate.kernel.fpga import Memory
from accelplane.simulate.kernel.kernel import Kernel

_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 29


class Call(msgspec.Struct, frozen=True, tag_field="do", tag="ioctl"):
    """An ioctl on the node below `/dev` of that name; the answer is `Value` or `Failure`.

    Before it come `Read` and `Write`, as often as the kernel needs the caller's memory.
    """

    node: str
    request: int
    argument: int


class Known(msgspec.Struct, frozen=True, tag_field="do", tag="known"):
    """Asks whether a node of that name answers ioctls; the answer is `Value` 1 or 0."""

    node: str


class Read(msgspec.Struct, frozen=True, tag_field="do", tag="read"):
    """Asks for the caller's memory; the answer is `Data`, or `Failure`."""

    address: int
    length: int


class Write(msgspec.Struct, frozen=True, tag_field="do", tag="write"):
    """Puts something into the caller's memory; the answer is `Data`, which is empty, or `Failure`."""

    address: int
    data: bytes


class Data(msgspec.Struct, frozen=True, tag_field="do", tag="data"):
    """Memory."""

    data: bytes = b""


class Value(msgspec.Struct, frozen=True, tag_field="do", tag="value"):
    """What the ioctl returned."""

    value: int


class Failure(msgspec.Struct, frozen=True, tag_field="do", tag="failure"):
    """The errno."""

    errno: int


Message = Call | Known | Read | Write | Data | Value | Failure
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def send(connection: socket.socket, message: Message) -> None:
    """Raises `OSError`."""
    data = msgspec.msgpack.encode(message)
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Message:
    """Raises `EOFError` when the other side is gone, `OSError`, `msgspec.DecodeError`."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > _LONGEST:
        raise OSError(errno.EMSGSIZE, f"a message of {length} bytes")
    return _decoder.decode(_exactly(connection, length))


def call(connection: socket.socket, request: Call | Known, memory: Memory) -> int:
    """Has the emulated kernel answer. Raises `OSError`, with its errno or because it is gone."""
    send(connection, request)
    while True:
        try:
            message = receive(connection)
        except EOFError:
            raise OSError(errno.ENODEV, "the emulated kernel is gone") from None
        match message:
            case Value(value=value):
                return value
            case Failure(errno=number):
                raise OSError(number, os.strerror(number))
            case Read(address=address, length=length):
                try:
                    answer = Data(memory.read(address, length))
                except OSError as error:
                    answer = Failure(error.errno or errno.EFAULT)
                send(connection, answer)
            case Write(address=address, data=data):
                try:
                    memory.write(address, data)
                    answer = Data()
                except OSError as error:
                    answer = Failure(error.errno or errno.EFAULT)
                send(connection, answer)
            case other:
                raise OSError(errno.EPROTO, f"{type(other).__name__} is no answer")


@contextmanager
def answered(kernel: Kernel, path: str) -> Generator[None, None, None]:
    """Ioctls are answered at the socket `path` until left. Raises `OSError`."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    with socket.socket(socket.AF_UNIX) as listener:
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
    with connection, suppress(EOFError, OSError, msgspec.DecodeError):
        while True:
            match receive(connection):
                case Known(node=node):
                    send(connection, Value(int(kernel.has_node(node))))
                case Call(node=node, request=request, argument=argument):
                    try:
                        answer = Value(kernel.ioctl(node, request, argument, _Lent(connection)))
                    except OSError as error:
                        answer = Failure(error.errno or errno.EIO)
                    send(connection, answer)
                case _:
                    return


class _Lent:
    """The caller's memory, at the other end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def read(self, address: int, length: int) -> bytes:
        data = self._ask(Read(address, length))
        if len(data) != length:
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return data

    def write(self, address: int, data: bytes) -> None:
        self._ask(Write(address, data))

    def _ask(self, message: Read | Write) -> bytes:
        send(self._connection, message)
        match receive(self._connection):
            case Data(data=data):
                return data
            case Failure(errno=number):
                raise OSError(number, os.strerror(number))
            case other:
                raise OSError(errno.EPROTO, f"{type(other).__name__} is no memory")


def _exactly(connection: socket.socket, length: int) -> bytes:
    """Raises `EOFError`."""
    pieces: list[bytes] = []
    while length:
        piece = connection.recv(min(length, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)
