"""Trees of FPGA cards as the two drivers make them, in plain files: sysfs, and files in place of device nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bitstreams import INTERFACE, NLB0, NLB3
from trees import link as new_link
from trees import write

PF, VF = "0000:81:00.0", "0000:81:00.1"


class Card(NamedTuple):
    """A card in the tree, and the paths of its parts."""

    root: Path
    family: str = "dfl"
    address: str = PF

    @property
    def pci(self) -> Path:
        """Its PCI function."""
        return self.root / "sys/devices/pci0000:80/0000:80:01.0" / self.address

    def device(self, index: int, address: str = "") -> Path:
        """A class device."""
        name = "fpga_region/region" if self.family == "dfl" else "fpga/intel-fpga-dev."
        return self.pci.with_name(address or self.address) / f"{name}{index}"

    def name(self, kind: str, index: int) -> str:
        """Of a port or FME."""
        return f"{'dfl' if self.family == 'dfl' else 'intel-fpga'}-{kind}.{index}"


def link(path: Path, target: Path) -> None:
    """Creates a link unless it exists."""
    if not path.is_symlink():
        new_link(path, target)


def function(card: Card, address: str = "", *, physical: str = "") -> Path:
    """A PCI function of the card."""
    path = card.pci.with_name(address or card.address)
    texts = {"vendor": "0x8086", "device": "0x09c4", "class": "0x120000", "local_cpulist": "0-7", "numa_node": "1"}
    texts |= {"subsystem_vendor": "0x8086", "subsystem_device": "0x0000"}
    for name, text in texts.items():
        write(path / name, f"{text}\n")
    driver = card.root / "sys/bus/pci/drivers" / ("dfl-pci" if card.family == "dfl" else "intel-fpga-pci")
    driver.mkdir(parents=True, exist_ok=True)
    link(path / "driver", driver)
    if physical:
        link(path / "physfn", path.with_name(physical))
    else:
        write(path / "sriov_numvfs", "0\n")
        write(path / "sriov_totalvfs", "1\n")
    return path


def class_device(card: Card, index: int, address: str = "") -> Path:
    """A class device of a function, and the class's link to it."""
    path = card.device(index, address)
    path.mkdir(parents=True, exist_ok=True)
    link(card.root / "sys/class" / path.parent.name / path.name, path)
    return path


def fme(card: Card, index: int = 0, interfaces: Sequence[str] = (INTERFACE,), ports: int = 1, number: int = 0) -> Path:
    """The FME in the card's class device `index`, and its node."""
    name = card.name("fme", number)
    path = card.device(index) / name
    texts = {"dev": f"243:{number}", "bitstream_id": "0x123000200000185", "bitstream_metadata": "0x19011011"}
    for attribute, text in {**texts, "ports_num": str(ports), "socket_id": "0"}.items():
        write(path / attribute, f"{text}\n")
    for place, interface in enumerate(interfaces, 20 * number + 9):
        if card.family == "opae":
            write(path / "pr/interface_id", f"{interface}\n")
            continue
        region = path / f"dfl-fme-region.{place}/fpga_region/region{place}"
        write(region / "compat_id", f"{interface}\n")
        link(card.root / "sys/class/fpga_region" / region.name, region)
    write(card.root / "dev" / name, "")
    return path


def port(card: Card, index: int = 0, afu: str = NLB0, *, number: int = 0, inside: int = 0, address: str = "") -> Path:
    """Port `number` in the class device `index`, which is port `inside` of its FPGA, and its node."""
    name = card.name("port", number)
    path = card.device(index, address) / name
    for attribute, text in {"dev": f"244:{number}", "id": str(inside), "afu_id": afu}.items():
        write(path / attribute, f"{text}\n")
    write(card.root / "dev" / name, "")
    return path


def one_port(root: Path, family: str = "dfl") -> Card:
    """A card with one port, programmed with NLB0."""
    card = Card(root, family)
    function(card)
    class_device(card, 0)
    fme(card)
    port(card)
    return card


def with_vf(root: Path, family: str = "dfl") -> Card:
    """A card whose port 0 is still the physical function's, and whose port 1 is a virtual one's, with NLB3."""
    card = Card(root, family)
    function(card)
    class_device(card, 0)
    fme(card, interfaces=[INTERFACE] * (1 if family == "opae" else 2), ports=2)
    port(card)
    function(card, VF, physical=PF)
    class_device(card, 12, VF)
    port(card, 12, NLB3, number=1, inside=1, address=VF)
    return card
