"""Names of accelerators by PCI IDs, and their generator."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from accelplane.host.pcinames import NAMES, product_name
from accelplane.plugins.dlb import PF_IDS
from accelplane.plugins.idxd import DSA_PCI_IDS
from accelplane.plugins.qat.models import MODELS

DATABASE = """\
#	Version: 2031.01.02
# a comment
1924  Solarflare Communications
	0903  SFC9120 10G Ethernet Controller
		1924 8002  SFC9120 subsystem
	6703  SFC4000 rev A iSCSI/Onload [Solarstorm]
8086  Intel Corporation
	37c8  C62x Chipset QuickAssist Technology
	56c0  Data Center GPU Flex 170 "quoted"
	1234  82540EM Gigabit Ethernet Controller
	4f90  DG2 Audio Controller
10de  NVIDIA Corporation
	1db4  GV100GL [Graphics]
C 03  Display controller
	00  VGA compatible controller
"""


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(Path(__file__).parents[2] / "tools/pcinames.py"))


def test_every_device_id_of_the_plugins_has_a_name() -> None:
    qat = {number for model in MODELS for number in (*model.pf_ids, *model.vf_ids)}
    for number in (*qat, *DSA_PCI_IDS, *PF_IDS, "0x0cfe", "0x1216", "0x09c4"):
        assert product_name("0x8086", number)


def test_a_name_needs_vendor_and_device() -> None:
    assert product_name("0x8086", "0x56c0") == "Data Center GPU Flex 170"
    assert product_name("0x1924", "0x56c0") == product_name("", "") == product_name("0x8086", "junk") == ""


def test_only_accelerators_of_the_database_are_kept(generator: dict[str, Any]) -> None:
    names = {key: name for key, name in generator["names"](DATABASE).items() if key not in generator["MORE"]}
    assert names == {
        "1924:0903": "SFC9120 10G Ethernet Controller",
        "8086:37c8": "C62x Chipset QuickAssist Technology",
        "8086:56c0": 'Data Center GPU Flex 170 "quoted"',
    }
    text = generator["module"](names, "2031.01.02")
    made: dict[str, Any] = {}
    exec(text, made)  # noqa: S102 - the generated module
    assert made["NAMES"] == names


def test_the_generated_names_have_those_of_the_generator(generator: dict[str, Any]) -> None:
    assert NAMES.items() >= generator["MORE"].items()
    assert list(NAMES) == sorted(NAMES)
    assert max(map(len, NAMES.values())) <= generator["MAX_LENGTH"]


def test_a_name_that_is_too_long_for_an_attribute_is_an_error(generator: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"1924:0903: name 'x+' has 65 characters, expected at most 64"):
        generator["module"]({"1924:0903": "x" * 65}, "1")
