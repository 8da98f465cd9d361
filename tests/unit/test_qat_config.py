"""Options of the QAT plugin are checked in the Go implementation's order."""

import msgspec
import pytest

from accelplane.cli.goflags import flags_of, parse
from accelplane.plugins.qat.config import QatConfig

REFUSED = [
    ({"mode": "dpdk "}, "unknown mode"),
    ({"mode": "", "dpdk_driver": "x"}, "unknown mode"),
    ({"dpdk_driver": "", "kernel_vf_drivers": "x", "allocation_policy": "x"}, "dpdk-driver: ''"),
    ({"dpdk_driver": "vfio_pci"}, "valid values: vfio-pci, igb_uio"),
    ({"kernel_vf_drivers": "x", "allocation_policy": "x"}, "kernel-vf-drivers: 'x'"),
    ({"kernel_vf_drivers": ""}, "kernel-vf-drivers: ''"),
    ({"kernel_vf_drivers": "4xxxvf,"}, "kernel-vf-drivers: ''"),
    ({"kernel_vf_drivers": "4xxxvf, c6xxvf"}, "kernel-vf-drivers: ' c6xxvf'"),
    ({"kernel_vf_drivers": "4xxxvf:c6xxvf"}, "kernel-vf-drivers: '4xxxvf:c6xxvf'"),
    ({"kernel_vf_drivers": "4xxx"}, "kernel-vf-drivers: '4xxx'"),
    ({"allocation_policy": ""}, "allocation-policy: ''"),
    ({"allocation_policy": "Packed"}, "valid values: none, balanced, packed"),
    ({"max_num_devices": -1}, "max-num-devices is -1"),
    ({"max_num_devices_by": "numa"}, "max-num-devices-by: 'numa'"),
    ({"new_id": "yes"}, "new-id: 'yes'"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_wrong_options_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^argument error: ") as refusal:
        QatConfig(**options)  # pyright: ignore[reportArgumentType] - a table of keyword arguments
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "-mode dpdk -dpdk-driver igb_uio",
        "-kernel-vf-drivers=dh895xccvf,c4xxxvf,c3xxxvf,c6xxvf,d15xxvf,4xxxvf,420xxvf,6xxxvf",
        "-max-num-devices 0",
        "--allocation-policy=balanced",
        "-allocation-policy packed -mode kernel",
        "-new-id always -iommufd -max-num-devices-by=pf",
    ],
)
def test_what_manifests_say_is_taken(words: str) -> None:
    given, rest = parse(flags_of(QatConfig), words.split())
    QatConfig.of(given)
    assert not rest


def test_an_empty_policy_differs_from_none_given() -> None:
    QatConfig.of({})
    with pytest.raises(msgspec.ValidationError):
        QatConfig.of(parse(flags_of(QatConfig), ["-allocation-policy="])[0])


def test_defaults_are_those_of_the_go_implementation() -> None:
    config = QatConfig()
    assert (config.mode, config.dpdk_driver, config.max_num_devices) == ("dpdk", "vfio-pci", 64)
    assert config.vf_drivers == ("4xxxvf", "420xxvf")
