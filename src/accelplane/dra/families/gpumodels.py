"""Names of Intel GPUs by PCI ID, as Intel's DRA driver publishes them: selectors of users compare them."""

from collections.abc import Mapping

_IDS = {
    ("Iris Xe", "Alder Lake-P"): "4626",
    ("Iris Xe", "Raptor Lake-P"): "a7a0",
    ("Intel Graphics", "Arrow Lake-S"): "7d67",
    ("Arc A-Series", "A770"): "56a0",
    ("Arc A-Series", "A750"): "56a1",
    ("Arc A-Series", "A580"): "56a2",
    ("Arc A-Series", "A380"): "56a5",
    ("Arc A-Series", "A310"): "56a6",
    ("Arc Pro A-Series", "A30M"): "56b0",
    ("Arc Pro A-Series", "A40/A50"): "56b1",
    ("Arc Pro A-Series", "A60M"): "56b2",
    ("Arc Pro A-Series", "A60"): "56b3",
    ("Arc B-Series", "B580"): "e20b",
    ("Arc B-Series", "B570"): "e20c",
    ("Arc B-Series", "B390"): "b080 b082 b084 b086",
    ("Arc B-Series", "B370"): "b081 b083 b085 b087",
    ("Arc Pro B-Series", "B60"): "e211",
    ("Arc Pro B-Series", "B50"): "e212",
    ("Arc Pro B-Series", "B65"): "e222",
    ("Arc Pro B-Series", "B70"): "e223",
    ("Data Center Flex", "Flex 170"): "56c0",
    ("Data Center Flex", "Flex 140"): "56c1",
    ("Data Center Max", "Max 1550"): "0b69 0bd0 0bd5",
    ("Data Center Max", "Max 1450"): "0bd6",
    ("Data Center Max", "Max 1100"): "0bd9 0bda 0bdb",
    ("CRI", "CRI"): "674c 674d 674e 674f 6750",
}

FAMILY_AND_MODEL: Mapping[str, tuple[str, str]] = {
    f"0x{pci_id}": names for names, pci_ids in _IDS.items() for pci_id in pci_ids.split()
}
"""Family and model by PCI ID as in sysfs."""
