"""The version and the limits of the documents. Encoders cut what is longer, decoders reject it."""

from typing import Annotated

from msgspec import Meta

VERSION = 1
MAX_BYTES = 2 * 1024 * 1024

MAX_NAME = 253
MAX_TEXT = 2048
MAX_PLUGINS = 64
MAX_RESOURCES = 256
MAX_SKIPPED = 1024
MAX_PROBLEMS = 64
# Of all plugins together, as the holders.
MAX_UNITS = 8192
MAX_HOLDERS = 16_384
MAX_UNIT_HOLDERS = 4096
MAX_HISTORY = 32
MAX_DEVICES = 4096
MAX_VALUES = 512
MAX_LABELS = 16
MAX_OUTCOMES = 32

Version = Annotated[int, Meta(ge=VERSION, le=VERSION)]
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
# Seconds since the epoch, 0 if unknown.
Time = Annotated[float, Meta(ge=0, le=1e12)]
