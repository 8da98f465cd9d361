"""Options of the GPU plugin are checked in the order of the Go implementation, with its texts."""

import msgspec
import pytest

from accelplane.plugins.gpu import GpuConfig
from accelplane.plugins.gpu.config import pci_ids

REFUSED = [
    ({"shared_dev_num": 0}, "the number of containers sharing the same GPU must greater than zero"),
    ({"shared_dev_num": -3, "allocation_policy": "odd"}, "must greater than zero"),
    ({"resource_manager": True}, "shared-dev-num is 1 with resource-manager"),
    ({"resource_manager": True, "allocation_policy": "odd"}, "shared-dev-num is 1 with resource-manager"),
    (
        {"resource_manager": True, "shared_dev_num": 2, "wsl": True, "enable_monitoring": True},
        "resource-manager is not supported within WSL",
    ),
    ({"resource_manager": True, "shared_dev_num": 2, "cdi": "only"}, "cdi is only, expected another value"),
    ({"resource_manager": True, "shared_dev_num": 2, "bypath": "links"}, "bypath is links, expected another value"),
    ({"allocation_policy": ""}, "invalid value for preferredAllocationPolicy"),
    ({"allocation_policy": "Balanced"}, "invalid value for preferredAllocationPolicy"),
    (
        {"allow_ids": "junk", "deny_ids": "0x56c0"},
        "cannot use both allow-ids and deny-ids options at the same time",
    ),
    ({"allow_ids": "0x56c0,"}, "failed to validate allow-ids: empty PCI ID"),
    ({"deny_ids": ","}, "failed to validate deny-ids: empty PCI ID"),
    ({"deny_ids": "0x56c0, 56c1"}, "failed to validate deny-ids: invalid PCI ID: 56c1"),
    ({"allow_ids": "0x56c01"}, "failed to validate allow-ids: invalid PCI ID: 0x56c01"),
    ({"allow_ids": "0x56cg\n"}, "failed to validate allow-ids: invalid PCI ID: 0x56cg"),
    ({"monitoring_mode": "both"}, "invalid value for monitoring-mode, valid values: single, split; found 'both'"),
    ({"wsl": True, "enable_monitoring": True, "health_management": True}, "monitoring is not supported within WSL"),
    ({"wsl": True, "health_management": True}, "health management is not supported within WSL"),
    ({"wsl": True, "xpumd_endpoint": "/x"}, "health management is not supported within WSL"),
    (
        {"health_management": True, "xpumd_endpoint": "/x", "temp_limit": 90},
        "cannot use both Level-Zero sidecar and xpumd for health management",
    ),
    ({"xpumd_endpoint": "/x", "temp_limit": 90}, "temperature limits do not work with xpumd health source"),
    ({"xpumd_endpoint": "/x", "gpu_temp_limit": 101}, "temperature limits do not work with xpumd health source"),
    ({"xpumd_endpoint": "/x", "memory_temp_limit": 0}, "temperature limits do not work with xpumd health source"),
    ({"xpumd_endpoint": "/" + "x" * 107}, "expected a path of at most 107 bytes"),
    ({"prefix": "host"}, "prefix 'host' must be an absolute path"),
    ({"allow_bdfs": "0000:03:00.0", "deny_bdfs": "0000:04:00.0"}, "cannot use both allow-bdfs and deny-bdfs"),
    ({"allow_bdfs": "03:00.0"}, "failed to validate allow-bdfs: found '03:00.0'"),
    ({"deny_bdfs": "0000:03:00.0,"}, "failed to validate deny-bdfs: found ''"),
    ({"drivers": "i915,"}, "failed to validate drivers"),
    ({"kinds": "external"}, "invalid value for kinds, valid values: integrated, discrete; found 'external'"),
    ({"functions": "vf,if"}, "invalid value for functions, valid values: pf, vf; found 'if'"),
    ({"health_bad_verdicts": 0}, "health-bad-verdicts is 0"),
    ({"temperature_margin": -0.5}, "temperature-margin is -0.5"),
    ({"temperature_margin": float("nan")}, "temperature-margin is nan"),
    ({"cdi": "yes"}, "invalid value for cdi"),
    ({"cdi": "off", "bypath": "links"}, "needs a CDI hook, but cdi is off"),
    ({"cdi_hook": "hook"}, "cdi-hook is 'hook', expected an absolute path"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_invalid_options_are_rejected_with_the_text_of_the_go_implementation(
    options: dict[str, object], text: str
) -> None:
    with pytest.raises(ValueError, match=r"^argument error: ") as refusal:
        GpuConfig(**options)  # pyright: ignore[reportArgumentType] - a table of keyword arguments
    assert text in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bypath": "whatever"},
        {"allow_ids": "0x56C0, 0x56c1"},
        {"monitoring_mode": "split", "enable_monitoring": True},
        {"xpumd_endpoint": "/run/xpumd/intelxpuinfo.sock", "enable_monitoring": True},
        {"prefix": "/"},
        {"resource_manager": True, "shared_dev_num": 300, "enable_monitoring": True, "cdi": "all"},
        {"kinds": "integrated,discrete", "functions": "pf", "drivers": "i915, xe", "deny_bdfs": "10000:03:00.0"},
    ],
)
def test_valid_options_are_accepted(options: dict[str, object]) -> None:
    GpuConfig(**options)  # pyright: ignore[reportArgumentType] - a table of keyword arguments


def test_an_invalid_option_in_yaml_is_rejected_with_the_same_text() -> None:
    with pytest.raises(msgspec.ValidationError, match="must greater than zero"):
        GpuConfig.of({"shared-dev-num": 0})


def test_every_option_has_a_help_text() -> None:
    schema = msgspec.json.schema(GpuConfig)["$defs"]["GpuConfig"]["properties"]
    assert [name for name, field in schema.items() if not field.get("description")] == []


def test_ids_are_case_insensitive() -> None:
    assert pci_ids("0x56C0, 0x56c0 ,0X56c1".replace("X", "x")) == {"0x56c0", "0x56c1"}
