"""Generates the names of accelerators, `src/accelplane/host/pcinames.py`, from the PCI ID database (`make pci-names`).

The input is a file `pci.ids`, such as that of Debian's package of this name. Only functions are kept that a plugin can
find: the PCI IDs in the modules of the plugins, and Intel's display controllers since Skylake. `MORE` has names
that the database of 2023 does not have, or that are too long there.
"""

import argparse
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from accelplane.plugins.qat.models import MODELS

OUTPUT = Path(__file__).parent.parent / "src/accelplane/host/pcinames.py"
INTEL, SOLARFLARE, ALTERA = "8086", "1924", "1172"
MAX_LENGTH = 64  # of a text attribute of a device in a ResourceSlice

MORE = {
    "8086:0b25": "Data Streaming Accelerator (DSA)",
    "8086:0b30": "FPGA Programmable Acceleration Card N3000",
    "8086:0b31": "FPGA Programmable Acceleration Card N3000 Virtual Function",
    "8086:0cfe": "In-Memory Analytics Accelerator (IAA)",
    "8086:09c5": "PAC with Intel Arria 10 GX FPGA Virtual Function",
    "8086:0b2c": "FPGA PAC D5005 Virtual Function",
    "8086:11fb": "Data Streaming Accelerator (DSA)",
    "8086:1212": "Data Streaming Accelerator (DSA)",
    "8086:1216": "In-Memory Analytics Accelerator (IAA)",
    "8086:19e3": "Atom Processor C3000 Series QAT Virtual Function",
    "8086:2710": "Dynamic Load Balancer 2.0 (DLB)",
    "8086:2711": "Dynamic Load Balancer 2.0 (DLB) Virtual Function",
    "8086:2714": "Dynamic Load Balancer 2.5 (DLB)",
    "8086:2715": "Dynamic Load Balancer 2.5 (DLB) Virtual Function",
    "8086:4940": "4xxx Series QAT",
    "8086:4941": "4xxx Series QAT Virtual Function",
    "8086:4942": "401xx Series QAT",
    "8086:4943": "401xx Series QAT Virtual Function",
    "8086:4944": "402xx Series QAT",
    "8086:4945": "402xx Series QAT Virtual Function",
    "8086:4946": "420xx Series QAT",
    "8086:4947": "420xx Series QAT Virtual Function",
    "8086:4948": "6xxx Series QAT",
    "8086:4949": "6xxx Series QAT Virtual Function",
    "8086:64a0": "Lunar Lake [Arc Graphics 130V/140V]",
    "8086:6f55": "Xeon Processor D Family QAT Virtual Function",
    "8086:7d40": "Meteor Lake-M [Graphics]",
    "8086:7d45": "Meteor Lake-P [Graphics]",
    "8086:7d51": "Arrow Lake-P [Arc Graphics 130T/140T]",
    "8086:7d55": "Meteor Lake-P [Arc Graphics]",
    "8086:7d67": "Arrow Lake-S [Graphics]",
    "8086:bcce": "FPGA SmartNIC N6000",
    "8086:bccf": "FPGA SmartNIC N6000 Virtual Function",
    "8086:e20b": "Battlemage G21 [Arc B580]",
    "8086:e20c": "Battlemage G21 [Arc B570]",
    "8086:e211": "Battlemage G21 [Arc Pro B60]",
    "8086:e212": "Battlemage G21 [Arc Pro B50]",
    "1924:0c03": "X4 Series Ethernet Controller",
    "1924:1b03": "XtremeScale SFC9250 Ethernet Controller (Virtual Function)",
}

LICENSE = """\
Copyright 1997-2023 Martin Mares, 2015-2023 Albert Pool

Redistribution and use in source and binary forms, with or without modification, are permitted provided that the
following conditions are met:

1. Redistributions of source code must retain the above copyright notice, this list of conditions and the following
   disclaimer.
2. Redistributions in binary form must reproduce the above copyright notice, this list of conditions and the following
   disclaimer in the documentation and/or other materials provided with the distribution.
3. Neither the name of the copyright holder nor the names of its contributors may be used to endorse or promote products
   derived from this software without specific prior written permission.

THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS" AND ANY EXPRESS OR IMPLIED WARRANTIES,
INCLUDING, BUT NOT LIMITED TO, THE IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE FOR ANY DIRECT, INDIRECT, INCIDENTAL,
SPECIAL, EXEMPLARY, OR CONSEQUENTIAL DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER CAUSED AND ON ANY THEORY OF LIABILITY,
WHETHER IN CONTRACT, STRICT LIABILITY, OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE OF
THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.
"""

_VENDOR = re.compile(r"([0-9a-f]{4})  (.+)")
_DEVICE = re.compile(r"\t([0-9a-f]{4})  (.+)")
# Product names that the drivers i915 and xe have in common, and older devices with such names.
_GPU = re.compile(r"\b(Graphics|Arc|GPU|DG1|Iris)\b")
_OLD = re.compile(r"Controller|Port|Media|Moorestown|IvyBridge|82\d{3}|LE80578|\bHD Graphics( P?\d{4})?$")
_FPGA = re.compile(r"^(FPGA )?PAC |Programmable Acceleration Card N3000$")
_ALTERA_BOARD = re.compile(r"board", re.IGNORECASE)


def entries(text: str) -> Iterator[tuple[str, str, str]]:
    """The vendor, device and name of each function of a database."""
    vendor = ""
    for line in text.splitlines():
        if line.startswith("C "):
            return  # classes follow
        if match := _VENDOR.fullmatch(line):
            vendor = match[1]
        elif match := _DEVICE.fullmatch(line):
            yield vendor, match[1], match[2]


def is_accelerator(vendor: str, device: str, name: str) -> bool:
    """Whether a plugin may find a function with this name."""
    if vendor == INTEL:
        known = {number for model in MODELS for number in (*model.pf_ids, *model.vf_ids)}
        is_gpu = bool(_GPU.search(name)) and not _OLD.search(name)
        return device in known or f"{vendor}:{device}" in MORE or is_gpu or bool(_FPGA.search(name))
    if vendor == SOLARFLARE:
        return "Ethernet Controller" in name
    return vendor == ALTERA and not _ALTERA_BOARD.search(name)


def names(text: str) -> Mapping[str, str]:
    """The names by vendor and device, in order."""
    found = {
        f"{vendor}:{device}": name for vendor, device, name in entries(text) if is_accelerator(vendor, device, name)
    }
    return dict(sorted({**found, **MORE}.items()))


def module(found: Mapping[str, str], version: str) -> str:
    """The text of the generated module. Raises `ValueError` for a name that is too long."""
    for key, name in found.items():
        if len(name.encode()) > MAX_LENGTH:
            raise ValueError(f"{key}: name {name!r} has {len(name)} characters, expected at most {MAX_LENGTH}")
    lines = "\n".join(f'    "{key}": {quoted(name)},' for key, name in found.items())
    return f'''"""Names of accelerators by PCI vendor and device. Generated by tools/pcinames.py (`make pci-names`).

From the PCI ID database, version {version}, under its 3-clause BSD license:

{LICENSE}"""

from collections.abc import Mapping

NAMES: Mapping[str, str] = {{
{lines}
}}


def product_name(vendor: str, device: str) -> str:
    """The name of the product with these IDs as sysfs writes them (`0x8086`, `0x56c0`), empty if it is not known."""
    return NAMES.get(f"{{vendor.removeprefix('0x')}}:{{device.removeprefix('0x')}}", "")
'''


def quoted(text: str) -> str:
    """A string literal with double quotes."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path, nargs="?", default=Path("/usr/share/misc/pci.ids"))
    path = parser.parse_args().database
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        print(f"{path}: {error.strerror}; install Debian's package pci.ids", file=sys.stderr)
        return 1
    version = re.search(r"^#\s+Version: (\S+)", text, re.MULTILINE)
    if version is None:
        print(f"{path}: found no line with `Version:`, expected the PCI ID database", file=sys.stderr)
        return 1
    OUTPUT.write_text(module(names(text), version[1]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
