"""Sources of FPGAs behind the OPAE driver, which is out of tree: error registers of the FME and of its ports.

The driver also has files of power and temperature. Their units are not documented, so there are no samples of them.
"""

from collections.abc import Iterator, Sequence
from functools import partial

from accelplane.host import Host
from accelplane.readings import pci
from accelplane.readings.dfl import PORT_REGISTERS, parse_flags
from accelplane.readings.plan import Source

_FME_REGISTERS = (
    "pcie0_errors", "pcie1_errors", "nonfatal_errors", "catfatal_errors", "gbs_errors", "bbs_errors", "warning_errors",
)  # fmt: skip
_FME_ERRORS = {"errors": "fme_errors", "first_error": "first_error"}


def sources(host: Host, fme: str, ports: Sequence[tuple[str, str]]) -> Iterator[Source]:
    """`fme` is the directory of the FME; `ports` are names and directories of its ports."""
    errors = f"{fme}/errors"
    yield from pci.existing(host, errors, [(register, partial(parse_flags, register)) for register in _FME_REGISTERS])
    parsers = [(name, partial(parse_flags, register)) for name, register in _FME_ERRORS.items()]
    yield from pci.existing(host, f"{errors}/fme-errors", parsers)
    for name, path in ports:
        parsers = [(register, partial(parse_flags, f"{name}_{register}")) for register in PORT_REGISTERS]
        yield from pci.existing(host, f"{path}/errors", parsers)
