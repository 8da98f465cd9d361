"""Bitstream files of both formats as one value. The extension selects the format: `.gbs` or `.aocx`.

    with open_bitstream("/tmp/nlb0.gbs") as bitstream:
        bitstream.accelerator       # d8424dc4a4a3c413f89e433683f9040b
        bitstream.read()            # for the hardware

The file stays open, so the file that was checked is programmed and installed even if it is replaced.
"""

import contextlib
import os
import stat
from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import NamedTuple

from accelplane.descriptors import closing
from accelplane.fpga import FpgaError, gbs
from accelplane.host import HostError

EXTENSIONS = (".gbs", ".aocx")


class Bitstream(NamedTuple):
    """An open bitstream file. Ids are canonical, and empty if the file has none.

    `accelerator` is the port's AFU id after programming; `unique` is the id in requests and in the store: the same, or
    the hash of an OpenCL design. `size` and `read` return the bitstream for the hardware, as an array, whose address is
    known; both raise `FpgaError`. `descriptor` is the file itself.
    """

    path: str
    extension: str
    interface: str
    accelerator: str
    unique: str
    texts: Mapping[str, str]
    programmable: bool
    descriptor: int
    size: Callable[[], int]
    read: Callable[[], "array[int]"]


@contextlib.contextmanager
def open_bitstream(path: str, open_file: Callable[[str, int], int] = os.open) -> Generator[Bitstream]:
    """Opens the file with `open_file`, which may be a host's `open`. Raises `FpgaError`."""
    extension = os.path.splitext(path)[1]
    if extension not in EXTENSIONS:
        raise FpgaError(f"{path}: extension {extension!a}, expected {' or '.join(EXTENSIONS)}")
    try:
        # O_NONBLOCK: a FIFO must not block.
        descriptor = open_file(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except (OSError, ValueError, HostError) as error:
        raise FpgaError(f"{path}: {error.strerror if isinstance(error, OSError) else error}") from None
    with closing(descriptor):
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise FpgaError(f"{path}: not a regular file")
        yield (_gbs if extension == ".gbs" else _aocx)(path, descriptor, status.st_size)


def extra(bitstream: Bitstream) -> dict[str, str]:
    """Returns details for users. Raises `FpgaError`."""
    return {**bitstream.texts, **({"Size": str(bitstream.size())} if bitstream.programmable else {})}


def _gbs(name: str, descriptor: int, file_size: int) -> Bitstream:
    header = gbs.parse(_read(name, descriptor, 0, min(file_size, gbs.HEAD_LIMIT)).tobytes(), name)
    size = file_size - header.offset
    _check_size(name, size)
    return Bitstream(
        name, ".gbs", header.interface, header.accelerator, header.accelerator, {}, programmable=True,
        descriptor=descriptor, size=lambda: size, read=lambda: _read(name, descriptor, header.offset, size),
    )  # fmt: skip


def _aocx(name: str, descriptor: int, file_size: int) -> Bitstream:
    from accelplane.fpga import aocx, elf  # noqa: PLC0415 - most bitstreams are GBS files

    try:
        texts, packed = aocx.parse(elf.Window(descriptor, 0, file_size))
    except elf.ElfError as error:
        raise FpgaError(f"{name}: {error}") from None

    def pieces() -> Iterator[bytes]:
        if packed is None:
            raise FpgaError(f"{name}: no section .acl.fpga.bin, expected an FPGA design")
        try:
            yield from aocx.unpack(packed)
        except elf.ElfError as error:
            raise FpgaError(f"{name}: {error}") from None

    inner = f"{name} (.acl.gbs.gz)"
    header = gbs.Gbs("", "", 0)
    if packed is not None:
        head = bytearray()
        for piece in pieces():
            head += piece
            if len(head) > gbs.HEAD_LIMIT:
                break
        header = gbs.parse(bytes(head), inner)
        _check_size(inner, len(head) - header.offset)

    def size() -> int:
        return sum(map(len, pieces())) - header.offset

    def read() -> "array[int]":
        data = array("B")
        try:
            for piece in pieces():
                data.frombytes(piece)
        except MemoryError:
            raise FpgaError(f"{inner}: not enough memory after {len(data)} bytes") from None
        del data[: header.offset]
        return data

    return Bitstream(
        name, ".aocx", header.interface, header.accelerator, texts["Hash"], texts,
        programmable=packed is not None, descriptor=descriptor, size=size, read=read,
    )  # fmt: skip


def _check_size(name: str, size: int) -> None:
    if size <= 0:
        raise FpgaError(f"{name}: no bitstream after the metadata; the file is incomplete")
    if size > gbs.BITSTREAM_LIMIT:
        raise FpgaError(f"{name}: bitstream of {size} bytes, expected at most {gbs.BITSTREAM_LIMIT}")


def _read(name: str, descriptor: int, offset: int, size: int) -> "array[int]":
    try:
        data = array("B", b"\0") * size
    except MemoryError:
        raise FpgaError(f"{name}: not enough memory for {size} bytes") from None
    view = memoryview(data)
    done = 0
    while done < size:
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise FpgaError(f"{name}: cannot be read: {error.strerror}") from None
        if not count:
            raise FpgaError(f"{name}: was truncated while it was read")
        done += count
    return data
