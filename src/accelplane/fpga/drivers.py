"""The two families of drivers, as data: OPAE (out of the kernel's tree, `intel-fpga`) and DFL (in the tree).

They differ in what their files are called and in their ioctls' encoding, not in what is done with them. Facts: kernel
documents Documentation/fpga/dfl.rst, ABI/testing/sysfs-platform-dfl-{fme,port}, include/uapi/linux/fpga-dfl.h, and
OPAE's intel-fpga.h.
"""

import contextlib
import re
from typing import Literal, NamedTuple, TypeAlias

from accelplane.host import Host, HostError

Kind: TypeAlias = Literal["port", "fme"]


class Driver(NamedTuple):
    """What a family calls things. `fme` is below a PCI function's directory, `interface` below the FME's."""

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
DRIVERS = (OPAE, DFL)  # the first that is there is used


def detect(host: Host) -> Driver | None:
    """The driver that is loaded, None when there is none."""
    return next((driver for driver in DRIVERS if host.exists(driver.class_directory)), None)


def named(text: str) -> tuple[Driver, Kind] | None:
    """What the last part of a name or path says it is, None when it is neither port nor FME."""
    name = text.rpartition("/")[2]
    for driver in DRIVERS:
        if driver.port.fullmatch(name):
            return driver, "port"
        if driver.fme.fullmatch(name):
            return driver, "fme"
    return None


def kind_of(host: Host, text: str) -> tuple[Driver, Kind] | None:
    """As `named`, for what a name or path leads to; a bare name is one in `/dev`."""
    path = node_path(text)
    with contextlib.suppress(HostError):  # links that loop: the name alone has to say it
        path = host.resolve(path)
    return named(path)


def node_path(text: str) -> str:
    """The device node that a name or path means."""
    return text if "/" in text else f"/dev/{text}"
