"""Options of the GPU plugin are checked in the order and with the words that users know."""

import msgspec
import pytest

from accelplane.plugins.gpu import GpuConfig
from accelplane.plugins.gpu.config import pci_ids

SENTENCES = [
    ({"shared_dev_num": 0}, "the number of containers sharing the same GPU must greater than zero"),
    ({"shared_dev_num": -3, "allocation_policy": "odd"}, "must greater than zero"),
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
    ({"xpumd_endpoint": "/" + "x" * 107}, "longer than the 107 bytes of a socket path"),
    ({"prefix": "host"}, "prefix 'host' must be an absolute path"),
    ({"allow_bdfs": "0000:03:00.0", "deny_bdfs": "0000:04:00.0"}, "cannot use both allow-bdfs and deny-bdfs"),
    ({"allow_bdfs": "03:00.0"}, "failed to validate allow-bdfs: '03:00.0'"),
    ({"deny_bdfs": "0000:03:00.0,"}, "failed to validate deny-bdfs: ''"),
    ({"drivers": "i915,"}, "failed to validate drivers"),
    ({"kinds": "external"}, "invalid value for kinds, valid values: integrated, discrete; found 'external'"),
    ({"functions": "vf,if"}, "invalid value for functions, valid values: pf, vf; found 'if'"),
    ({"health_bad_verdicts": 0}, "health-bad-verdicts is 0"),
    ({"temperature_margin": -0.5}, "temperature-margin is -0.5"),
    ({"temperature_margin": float("nan")}, "temperature-margin is nan"),
    ({"cdi": "yes"}, "invalid value for cdi"),
    ({"cdi": "off", "bypath": "links"}, "cannot be used with cdi off"),
    ({"cdi_hook": "hook"}, "cdi-hook 'hook' must be an absolute path"),
]


@pytest.mark.parametrize(("options", "sentence"), SENTENCES)
def test_wrong_options_are_refused_with_the_sentence_users_know(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^argument error: ") as refusal:
        GpuConfig(**options)  # pyright: ignore[reportArgumentType] - a table of keyword arguments
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bypath": "whatever"},
        {"allow_ids": "0x56C0, 0x56c1"},
        {"monitoring_mode": "split", "enable_monitoring": True},
        {"xpumd_endpoint": "/run/xpumd/intelxpuinfo.sock", "enable_monitoring": True},
        {"prefix": "/"},
        {"kinds": "integrated,discrete", "functions": "pf", "drivers": "i915, xe", "deny_bdfs": "10000:03:00.0"},
    ],
)
def test_good_options_are_taken(options: dict[str, object]) -> None:
    GpuConfig(**options)  # pyright: ignore[reportArgumentType] - a table of keyword arguments


def test_a_wrong_option_in_yaml_is_refused_with_the_same_sentence() -> None:
    with pytest.raises(msgspec.ValidationError, match="must greater than zero"):
        GpuConfig.of({"shared-dev-num": 0})


def test_every_option_explains_itself() -> None:
    schema = msgspec.json.schema(GpuConfig)["$defs"]["GpuConfig"]["properties"]
    assert [name for name, field in schema.items() if not field.get("description")] == []


def test_ids_count_the_same_in_either_case() -> None:
    assert pci_ids("0x56C0, 0x56c0 ,0X56c1".replace("X", "x")) == {"0x56c0", "0x56c1"}
