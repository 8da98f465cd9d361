"""Options of the QAT plugin are checked in the Go implementation's order."""

import msgspec
import pytest

from accelplane.cli.goflags import flags_of, parse
from accelplane.plugins.qat.config import QatConfig

REFUSED = [
    ({"mode": "dpdk "}, "unknown mode"),
    ({"mode": "", "dpdk_driver": "x"}, "unknown mode"),
    (
        {"dpdk_driver": "", "kernel_vf_drivers": "x", "allocation_policy": "x"},
        "dpdk-driver, valid values: .*; found ''",
    ),
    ({"dpdk_driver": "vfio_pci"}, "valid values: vfio-pci, igb_uio"),
    ({"kernel_vf_drivers": "x", "allocation_policy": "x"}, "kernel-vf-drivers, valid values: .*; found 'x'"),
    ({"kernel_vf_drivers": ""}, "kernel-vf-drivers, valid values: .*; found ''"),
    ({"kernel_vf_drivers": "4xxxvf,"}, "kernel-vf-drivers, valid values: .*; found ''"),
    ({"kernel_vf_drivers": "4xxxvf, c6xxvf"}, "kernel-vf-drivers, valid values: .*; found ' c6xxvf'"),
    ({"kernel_vf_drivers": "4xxxvf:c6xxvf"}, "kernel-vf-drivers, valid values: .*; found '4xxxvf:c6xxvf'"),
    ({"kernel_vf_drivers": "4xxx"}, "kernel-vf-drivers, valid values: .*; found '4xxx'"),
    ({"allocation_policy": ""}, "allocation-policy, valid values: .*; found ''"),
    ({"allocation_policy": "Packed"}, "valid values: none, balanced, packed"),
    ({"max_num_devices": -1}, "max-num-devices is -1"),
    ({"max_num_devices_by": "numa"}, "max-num-devices-by, valid values: .*; found 'numa'"),
    ({"new_id": "yes"}, "new-id, valid values: .*; found 'yes'"),
]


@pytest.mark.parametrize(("options", "pattern"), REFUSED)
def test_invalid_options_are_rejected(options: dict[str, object], pattern: str) -> None:
    with pytest.raises(ValueError, match=rf"^argument error: .*{pattern}"):
        QatConfig(**options)  # pyright: ignore[reportArgumentType] - a table of keyword arguments


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
def test_options_of_the_manifests_are_accepted(words: str) -> None:
    values, rest = parse(flags_of(QatConfig), words.split())
    QatConfig.of(values)
    assert not rest


def test_an_empty_policy_differs_from_a_missing_one() -> None:
    QatConfig.of({})
    with pytest.raises(msgspec.ValidationError):
        QatConfig.of(parse(flags_of(QatConfig), ["-allocation-policy="])[0])


def test_defaults_are_those_of_the_go_implementation() -> None:
    config = QatConfig()
    assert (config.mode, config.dpdk_driver, config.max_num_devices) == ("dpdk", "vfio-pci", 64)
    assert config.vf_drivers == ("4xxxvf", "420xxvf")
