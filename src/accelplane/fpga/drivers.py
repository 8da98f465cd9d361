"""The two driver families as data: OPAE (out-of-tree, `intel-fpga`) and DFL (in-tree).

They differ in the names of their files and in the encoding of their ioctls. Sources: kernel documents
Documentation/fpga/dfl.rst, ABI/testing/sysfs-platform-dfl-{fme,port}, include/uapi/linux/fpga-dfl.h, and OPAE's
intel-fpga.h.
"""

import contextlib
import re
from typing import Literal, NamedTuple, TypeAlias

from accelplane.host import Host, HostError

Kind: TypeAlias = Literal["port", "fme"]


class Driver(NamedTuple):
    """Names in a family. `fme_glob` is relative to the PCI function, `interface_glob` to the FME."""

    name: str
    class_directory: str
    class_device: re.Pattern[str]
    port: re.Pattern[str]
    fme: re.Pattern[str]
    fme_glob: str
    interface_glob: str
    magic: int


OPAE = Driver(
    name="OPAE",
    class_directory="/sys/class/fpga",
    class_device=re.compile(r"intel-fpga-dev\.[0-9]+"),
    port=re.compile(r"intel-fpga-port\.[0-9]+"),
    fme=re.compile(r"intel-fpga-fme\.[0-9]+"),
    fme_glob="fpga/intel-fpga-dev.*/intel-fpga-fme.*",
    interface_glob="pr/interface_id",
    magic=0xB5,
)
DFL = Driver(
    name="DFL",
    class_directory="/sys/class/fpga_region",
    class_device=re.compile(r"region[0-9]+"),
    port=re.compile(r"dfl-port\.[0-9]+"),
    fme=re.compile(r"dfl-fme\.[0-9]+"),
    fme_glob="fpga_region/region*/dfl-fme.*",
    interface_glob="dfl-fme-region.*/fpga_region/region*/compat_id",
    magic=0xB6,
)
DRIVERS = (OPAE, DFL)  # the first one present is used


def detect(host: Host) -> Driver | None:
    """Returns the loaded driver, None without one."""
    return next((driver for driver in DRIVERS if host.exists(driver.class_directory)), None)


def parse_name(text: str) -> tuple[Driver, Kind] | None:
    """Returns driver and kind by the last part of a name or path, None for neither port nor FME."""
    name = text.rpartition("/")[2]
    for driver in DRIVERS:
        if driver.port.fullmatch(name):
            return driver, "port"
        if driver.fme.fullmatch(name):
            return driver, "fme"
    return None


def kind_of(host: Host, text: str) -> tuple[Driver, Kind] | None:
    """Like `parse_name`, after resolving links; a bare name is in `/dev`."""
    path = node_path(text)
    with contextlib.suppress(HostError):  # a link loop: only the name is used
        path = host.resolve(path)
    return parse_name(path)


def node_path(text: str) -> str:
    """Returns the path of the device node for a name or path."""
    return text if "/" in text else f"/dev/{text}"
