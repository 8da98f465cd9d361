"""Sources of FPGAs behind the kernel's DFL driver: sensors and error registers of the FME, state of its ports."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from accelplane.host import Host
from accelplane.readings import families, hwmon, pci
from accelplane.readings.plan import Source
from accelplane.readings.values import InvalidText, Value, labels, number

_FME_REGISTERS = (
    "pcie0_errors", "pcie1_errors", "nonfatal_errors", "catfatal_errors", "fme_errors", "first_error",
)  # fmt: skip
PORT_REGISTERS = ("errors", "first_error")
_PORT_STATES = (0, 1, 2, 6)


def sources(host: Host, fme: str, ports: Sequence[tuple[str, str]]) -> Iterator[Source]:
    """`fme` is the directory of the FME; `ports` are names and directories of its ports."""
    yield from hwmon.sources(host, fme, default="fpga")
    yield from pci.existing(
        host, f"{fme}/errors", [(register, partial(parse_flags, register)) for register in _FME_REGISTERS]
    )
    for name, path in ports:
        yield from pci.existing(
            host,
            f"{path}/errors",
            [(register, partial(parse_flags, f"{name}_{register}")) for register in PORT_REGISTERS],
        )
        yield from pci.existing(host, path, [("power_state", _port_state(name))])


def parse_flags(register: str, text: str) -> Sequence[Value]:
    """The number of bits that are set in a mask."""
    mask = number(text)
    if mask < 0:
        raise InvalidText(text)
    return (Value(families.FPGA_ERRORS, labels(register=register), float(mask.bit_count())),)


def _port_state(port: str) -> Callable[[str], Sequence[Value]]:
    def parse(text: str) -> Sequence[Value]:
        state = number(text)
        if state not in _PORT_STATES:
            raise InvalidText(text)
        return (Value(families.FPGA_PORT_POWER, labels(unit=port), float(state)),)

    return parse
