"""GBS files: a header, JSON metadata, and the raw bitstream ("green bitstream") of one accelerator function.

    0   8  "XeonFPGA"
    8   8  0xB7 "GBSv001"
    16  4  length L of the metadata, little-endian, 1 to 4095
    20  L  metadata; only its first JSON value counts
    20+L   the bitstream as the hardware takes it, to the end of the file

Facts: OPAE's documentation of the format (packager, `opae.io`). Only two keys matter here, `interface-uuid` and the one
cluster's `accelerator-type-uuid`; others may hold what they like.
"""

import json
import struct
from collections.abc import Mapping
from typing import NamedTuple

from accelplane.fpga import FpgaError, Json, shown
from accelplane.fpga.ids import canonical

MAGIC = b"XeonFPGA\xb7GBSv001"
METADATA_LIMIT = 4095
# Everything before the bitstream fits into so many bytes.
HEAD_LIMIT = 20 + METADATA_LIMIT
# Longest bitstream, unpacked: several times that of the largest card known.
BITSTREAM_LIMIT = 512 * 1024 * 1024

_HEADER = struct.Struct("<16sI")


class BitstreamError(FpgaError):
    """A file that is no bitstream, or one that nothing can be programmed from; the message names the file."""


class Gbs(NamedTuple):
    """What a GBS file is for, in canonical form and empty where it does not say, and where its bitstream begins."""

    interface: str
    accelerator: str
    offset: int


def parse(head: bytes | bytearray, name: str) -> Gbs:
    """The beginning of the file `name`, understood; `HEAD_LIMIT` bytes are enough. Raises `BitstreamError`."""
    if len(head) < _HEADER.size:
        raise BitstreamError(f"{name}: {len(head)} bytes, a GBS header has {_HEADER.size}")
    magic, length = _HEADER.unpack_from(head)
    if magic != MAGIC:
        raise BitstreamError(f"{name}: begins with {magic.hex(' ')}, expected {MAGIC.hex(' ')} (GBS)")
    if not 1 <= length <= METADATA_LIMIT:
        raise BitstreamError(f"{name}: {length} bytes of metadata, expected 1 to {METADATA_LIMIT}")
    offset = _HEADER.size + length
    if len(head) < offset:
        raise BitstreamError(f"{name}: ends within its metadata, is the file complete?")
    image = _object(_metadata(head[_HEADER.size : offset], name), "afu-image", name)
    clusters = image.get("accelerator-clusters")
    if not isinstance(clusters, list) or len(clusters) != 1:
        found = len(clusters) if isinstance(clusters, list) else 0
        raise BitstreamError(f"{name}: {found} accelerator clusters in its metadata, expected 1")
    cluster = clusters[0] if isinstance(clusters[0], dict) else {}
    return Gbs(_id(image, "interface-uuid", name), _id(cluster, "accelerator-type-uuid", name), offset)


def _metadata(data: bytes | bytearray, name: str) -> Mapping[str, Json]:
    text = data.decode("utf-8", "replace").lstrip(" \t\r\n")
    try:
        found: Json = json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError) as error:
        raise BitstreamError(f"{name}: its metadata is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise BitstreamError(f"{name}: its metadata is {shown(str(found))}, expected a JSON object")
    return found


def _object(found: Mapping[str, Json], key: str, name: str) -> Mapping[str, Json]:
    value = found.get(key)
    if not isinstance(value, dict):
        raise BitstreamError(f"{name}: its metadata has no object {key}")
    return value


def _id(found: Mapping[str, Json], key: str, name: str) -> str:
    value = found.get(key, "")
    if not isinstance(value, str):
        raise BitstreamError(f"{name}: {key} in its metadata is {shown(str(value))}, expected a text")
    return canonical(value)
