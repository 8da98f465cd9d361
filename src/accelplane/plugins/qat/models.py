"""QAT hardware: PCI ids of physical functions (PF) and virtual functions (VF), and their kernel drivers.

Facts: the id tables of the kernel's `drivers/crypto/intel/qat` and of Intel's out-of-tree driver. Names of drivers are
those in `/sys/bus/pci/drivers`: C62x has `c6xx`, although its modules are `qat_c62x` and `qat_c62xvf`.
"""

from collections.abc import Mapping
from typing import NamedTuple

VENDOR = "8086"


class QatModel(NamedTuple):
    """One product line. PCI ids are written as in `4940`, without `0x`.

    `detects_services`: `qat/cfg_services` of the PF configures the services of its VFs. Older models have all services.
    """

    vf_driver: str
    pf_driver: str
    vf_ids: tuple[str, ...]
    pf_ids: tuple[str, ...]
    detects_services: bool = False


MODELS: tuple[QatModel, ...] = (
    QatModel("dh895xccvf", "dh895xcc", ("0442", "0443"), ("0434", "0435")),
    QatModel("c4xxxvf", "c4xxx", ("18a1",), ("18a0",)),
    QatModel("c3xxxvf", "c3xxx", ("19e3",), ("19e2",)),
    QatModel("c6xxvf", "c6xx", ("37c9",), ("37c8",)),
    QatModel("d15xxvf", "d15xx", ("6f55",), ("6f54",)),
    QatModel("4xxxvf", "4xxx", ("4941", "4943", "4945"), ("4940", "4942", "4944"), detects_services=True),
    QatModel("420xxvf", "420xx", ("4947",), ("4946",), detects_services=True),
    QatModel("6xxxvf", "6xxx", ("4949",), ("4948",), detects_services=True),
)

BY_VF_DRIVER: Mapping[str, QatModel] = {model.vf_driver: model for model in MODELS}
_BY_VF_ID: Mapping[str, QatModel] = {number: model for model in MODELS for number in model.vf_ids}
_BY_PF_ID: Mapping[str, QatModel] = {number: model for model in MODELS for number in model.pf_ids}


def model_of_vf(device_id: str) -> QatModel | None:
    """Returns the model whose VFs have the PCI device id (`4941`, or `0x4941` as in sysfs), or None."""
    return _BY_VF_ID.get(device_id.removeprefix("0x"))


def model_of_pf(device_id: str) -> QatModel | None:
    """Returns the model whose PFs have the PCI device id (`4940`, or `0x4940` as in sysfs), or None."""
    return _BY_PF_ID.get(device_id.removeprefix("0x"))
