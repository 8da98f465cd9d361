"""GBS files: a header, JSON metadata, and the raw bitstream ("green bitstream") of one accelerator function.

    0   8  "XeonFPGA"
    8   8  0xB7 "GBSv001"
    16  4  length L of the metadata, little-endian, 1 to 4095
    20  L  metadata; only its first JSON value is used
    20+L   the bitstream for the hardware, to the end of the file

Source: OPAE's documentation of the format (packager, `opae.io`). Only two keys of the metadata are used:
`interface-uuid`, and `accelerator-type-uuid` of the only cluster.
"""

import json
import struct
from collections.abc import Mapping
from typing import NamedTuple

from accelplane.fpga import FpgaError, Json, quote
from accelplane.fpga.ids import canonical

MAGIC = b"XeonFPGA\xb7GBSv001"
METADATA_LIMIT = 4095
# Maximum size of header and metadata.
HEAD_LIMIT = 20 + METADATA_LIMIT
# Several times the size for the largest known card, decompressed.
BITSTREAM_LIMIT = 512 * 1024 * 1024

_HEADER = struct.Struct("<16sI")


class Gbs(NamedTuple):
    """Canonical ids of a GBS file, empty if it has none, and the offset of its bitstream."""

    interface: str
    accelerator: str
    offset: int


def parse(head: bytes | bytearray, name: str) -> Gbs:
    """Parses the first `HEAD_LIMIT` bytes of the file `name`. Raises `FpgaError`."""
    if len(head) < _HEADER.size:
        raise FpgaError(f"{name}: {len(head)} bytes, expected a GBS header of {_HEADER.size}")
    magic, length = _HEADER.unpack_from(head)
    if magic != MAGIC:
        raise FpgaError(f"{name}: begins with {magic.hex(' ')}, expected {MAGIC.hex(' ')} (GBS)")
    if not 1 <= length <= METADATA_LIMIT:
        raise FpgaError(f"{name}: {length} bytes of metadata, expected 1 to {METADATA_LIMIT}")
    offset = _HEADER.size + length
    if len(head) < offset:
        raise FpgaError(f"{name}: truncated in the metadata; the file is incomplete")
    image = _metadata(head[_HEADER.size : offset], name).get("afu-image")
    if not isinstance(image, dict):
        raise FpgaError(f"{name}: no object afu-image in the metadata")
    clusters = image.get("accelerator-clusters")
    if not isinstance(clusters, list) or len(clusters) != 1:
        found = len(clusters) if isinstance(clusters, list) else 0
        raise FpgaError(f"{name}: {found} accelerator clusters in the metadata, expected 1")
    cluster = clusters[0] if isinstance(clusters[0], dict) else {}
    return Gbs(_id(image, "interface-uuid", name), _id(cluster, "accelerator-type-uuid", name), offset)


def _metadata(data: bytes | bytearray, name: str) -> Mapping[str, Json]:
    text = data.decode("utf-8", "replace").lstrip(" \t\r\n")
    try:
        found: Json = json.JSONDecoder().raw_decode(text)[0]
    except (ValueError, RecursionError) as error:
        raise FpgaError(f"{name}: invalid JSON in the metadata: {error}") from None
    if not isinstance(found, dict):
        raise FpgaError(f"{name}: metadata is {quote(str(found))}, expected a JSON object")
    return found


def _id(found: Mapping[str, Json], key: str, name: str) -> str:
    value = found.get(key, "")
    if not isinstance(value, str):
        raise FpgaError(f"{name}: {key} in the metadata is {quote(str(value))}, expected a string")
    return canonical(value)
