"""How units of each family are published: the names of devices, and the attributes and capacities that all have.

GPU, QAT and NPU have the names and attributes of Intel's DRA drivers, so that claims for those drivers work unchanged.
Every device of a driver has every attribute of its family: a selector with an attribute that one device does not have
aborts the scheduling of a pod. Names do not have numbers that the kernel gives in the order of discovery.
"""

import hashlib
import re
from collections.abc import Callable, Mapping

from msgspec import Struct

from accelplane.devices import Attribute, Unit
from accelplane.dra.families.gpumodels import FAMILY_AND_MODEL
from accelplane.dra.model import Offer

STANDARD = "resource.kubernetes.io/"

# Of a name with 63 characters. The rest is for the number of a share or tile.
_BASE_LENGTH = 55
_PCI_ID = re.compile(r"0x[0-9a-f]{4}")
_INVALID = re.compile(r"[^a-z0-9]+")
_PLAIN = re.compile(r"[a-z0-9.:-]+")
MAX_SHARES = 64  # devices of one unit, where the API server does not support shared devices
_SERVICES = ("sym", "asym", "dc", "dcc", "decomp")

Values = Mapping[str, Attribute]


class Family(Struct, frozen=True, kw_only=True):
    """The devices of a driver.

    `attributes` and `capacities` have the value of a unit without them, and so the type. `values` are the attributes
    with another name or value than in the unit. `share` is the name of one share of the device `{name}`. At most
    `max_shares` such devices are published. With `own`, devices also have the other attributes and capacities of units.
    """

    name: Callable[[Unit], str]
    attributes: Values = {}
    capacities: Mapping[str, int] = {}
    values: Callable[[Offer], Values] = lambda _offer: {}
    share: str = "{name}-s{number}"
    max_shares: int | None = None
    own: bool = False


def label(text: str, length: int = _BASE_LENGTH) -> str:
    """A DNS label of at most `length` characters for a unit ID. Different PCI addresses have different labels."""
    found = _INVALID.sub("-", text.lower()).strip("-")
    if found and len(found) <= length and _PLAIN.fullmatch(text):
        return found
    return with_hash(found, text, length)


def with_hash(name: str, text: str, length: int = _BASE_LENGTH) -> str:
    """The name, shortened, with a part of the hash of `text`."""
    digest = hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:8]
    return "-".join(filter(None, (name[: length - 9].strip("-"), digest)))


def _by_id(unit: Unit) -> str:
    return label(unit.id)


def _by_address_and_pci_id(unit: Unit) -> str:
    pci_id = unit.text("pciId")
    suffix = f"-{pci_id}" if _PCI_ID.fullmatch(pci_id) else ""
    return label(unit.id, _BASE_LENGTH - len(suffix)) + suffix


def _qat_name(unit: Unit) -> str:
    prefix = "qatvf-" if unit.attributes.get("vf", True) else ""
    return prefix + label(unit.id, _BASE_LENGTH - len(prefix))


def _sgx_name(unit: Unit) -> str:
    return label(unit.id.removeprefix("sgx-"))


def _resource(unit: Unit) -> str:
    return next(iter(unit.ids), "")


def _gpu(offer: Offer) -> Values:
    unit = offer.unit
    family, model = FAMILY_AND_MODEL.get(unit.text("pciId"), ("", ""))
    return {
        "family": family,
        **({"model": model} if model else {}),
        "type": "vf" if unit.text("function") == "vf" else "gpu",
        "pciRoot": unit.text(f"{STANDARD}pcieRoot").partition(":")[2],
        "memoryKnown": "memory" in unit.capacities,
    }


def _npu(offer: Offer) -> Values:
    return {"type": "npu", "generation": offer.unit.text("model")}


def _qat(offer: Offer) -> Values:
    unit = offer.unit
    services = {word.strip() for word in unit.text("services").split(";")}
    known = [word for word in _SERVICES if word in services]
    return {
        "type": "vf" if unit.attributes.get("vf", True) else "pf",
        "services": ";".join(known),
        "pf": unit.parent,
        "heartbeat": "lost" if offer.reason == "heartbeat" else "ok" if offer.state == "healthy" else "",
        **{word: word in services for word in _SERVICES},
    }


def _by_resource(offer: Offer) -> Values:
    return {"type": _resource(offer.unit)}


def _by_type(offer: Offer) -> Values:
    return {"type": offer.unit.text("type") or _resource(offer.unit)}


def _fpga(offer: Offer) -> Values:
    unit = offer.unit
    ports = unit.text("ports")
    interface = unit.text("interface")
    return {
        "type": "region" if ports else "port",
        "interfaceId": interface,
        "afuId": unit.text("afu"),
        "board": unit.text("model"),
        "ports": ports.count(",") + 1,
        "programmable": bool(interface),
    }


_QUEUES = Family(
    name=_by_id,
    attributes={"mode": "", "wqName": "", "wqDriver": "", "blockOnFault": False, "priority": 0},
    capacities={"size": 0, "maxBatchSize": 0, "maxTransferSize": 0, "shares": 1},
    values=_by_type,
)

FAMILIES: Mapping[str, Family] = {
    "gpu.intel.com": Family(
        name=_by_address_and_pci_id,
        attributes={
            "family": "", "sriov": False, "pciRoot": "", "kind": "", "vfIndex": -1, "tiles": 1, "memoryKnown": False,
            "iommuGroup": -1,
        },
        capacities={"memory": 0, "millicores": 1000, "shares": 1},
        values=_gpu,
    ),
    "npu.intel.com": Family(
        name=_by_address_and_pci_id, attributes={"generation": ""}, capacities={"shares": 1}, values=_npu
    ),
    "qat.intel.com": Family(
        name=_qat_name,
        attributes={"services": "", "pf": "", "heartbeat": "", **dict.fromkeys(_SERVICES, False)},
        values=_qat,
    ),
    "dsa.intel.com": _QUEUES,
    "iaa.intel.com": _QUEUES,
    "dlb.intel.com": Family(
        name=_by_id,
        capacities=dict.fromkeys(("ldbQueues", "ldbPorts", "dirPorts", "ldbCredits", "dirCredits", "schedDomains"), 0),
        values=_by_resource,
    ),
    "sgx.intel.com": Family(
        name=_sgx_name,
        attributes={"flc": False},
        capacities={"epc": 0, "shares": 1},
        values=_by_resource,
        share="{name}-{number}",
        max_shares=MAX_SHARES,
    ),
    "fpga.intel.com": Family(
        name=_by_id,
        attributes={"interfaceId": "", "afuId": "", "board": "", "ports": 1, "programmable": False},
        values=_fpga,
    ),
}  # fmt: skip
"""By driver. Other drivers have the family of `other`."""


def other(attributes: Values = {}, capacities: Mapping[str, int] = {}) -> Family:  # noqa: B006 - never changed
    """The family of a plugin whose units have these attributes and capacities, with the values of units without them.

    Devices are named by the ID of the unit. Their type is the resource, unless the plugin has another one.
    """
    return Family(
        name=_by_id,
        attributes=attributes,
        capacities={"shares": 1, **capacities},
        values=_by_type,
        max_shares=MAX_SHARES,
        own=True,
    )


OTHER = other()
