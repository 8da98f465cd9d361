"""Units, offers and pools for tests of the DRA driver."""

from collections.abc import Mapping, Sequence
from typing import Any

from accelplane.devices import Attribute, Unit
from accelplane.dra.model import Offer, State

STANDARD = "resource.kubernetes.io/"


def unit(address: str = "0000:03:00.0", **fields: Any) -> Unit:
    """A GPU."""
    attributes: dict[str, Attribute] = {
        "pciId": "0x56c0", "pciAddress": address, "driver": "i915", "kind": "discrete", "function": "pf",
        "model": "Data Center GPU Flex 170", f"{STANDARD}pciBusID": address, f"{STANDARD}pcieRoot": "pci0000:00",
        f"{STANDARD}numaNode": 0, **fields.pop("attributes", {}),
    }  # fmt: skip
    given: dict[str, Any] = {"health": "card0", "ids": {"i915": ["card0"]}, "capacities": {"memory": 1 << 34}, **fields}
    return Unit(id=address, attributes=attributes, **given)


def offer(address: str = "0000:03:00.0", state: State = "healthy", **fields: Any) -> Offer:
    """A GPU that DRA owns."""
    known = {name: fields.pop(name) for name in ("owner", "reason", "text", "shares") if name in fields}
    return Offer(unit=unit(address, **fields), state=state, **{"owner": "dra", **known})


def offers(*given: Offer) -> Mapping[str, Offer]:
    return {each.unit.id: each for each in given}


def functions(count: int, without: Sequence[int] = ()) -> Mapping[str, Offer]:
    """Virtual functions of QAT, by 16 on a bus."""
    return offers(
        *(
            Offer(
                unit=Unit(
                    id=f"0000:{number // 16 + 16:02x}:{number % 16 // 8 + 1:02x}.{number % 8}",
                    parent=f"0000:{number // 16 + 16:02x}:00.0",
                    health=f"0000:{number // 16 + 16:02x}:00.0",
                    attributes={"services": "sym;asym"},
                ),
                owner="dra",
            )
            for number in range(count)
            if number not in without
        )
    )
