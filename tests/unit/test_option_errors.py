"""Errors of options: the drop-in commands print the texts of the Go implementation where it has any."""

from typing import Any

import pytest

from accelplane.cli import logflags
from accelplane.cli.node import dropin
from accelplane.plugins import Plugin
from accelplane.plugins.fpga import FpgaPlugin
from accelplane.plugins.gpu import GpuPlugin
from accelplane.plugins.idxd import DsaPlugin, IaaPlugin
from accelplane.plugins.npu import NpuPlugin
from accelplane.plugins.options import check_choice
from accelplane.plugins.qat import QatPlugin
from accelplane.plugins.sgx import SgxPlugin

WSL = "-wsl"
XPUMD = "-xpumd-endpoint=/run/xpumd/intelxpuinfo.sock"
LIMITS = "temperature limits do not work with xpumd health source"

# The fragments are those that the Go implementation's messages contain.
GO = [
    (GpuPlugin, ["-shared-dev-num=0"], "the number of containers sharing the same GPU must greater than zero"),
    (GpuPlugin, ["-allocation-policy="], "invalid value for preferredAllocationPolicy"),
    (GpuPlugin, ["-allocation-policy=Packed"], "invalid value for preferredAllocationPolicy"),
    (
        GpuPlugin,
        ["-allow-ids=0x56c0", "-deny-ids=0x56c1"],
        "cannot use both allow-ids and deny-ids options at the same time",
    ),
    (GpuPlugin, ["-allow-ids=0x56c0,"], "failed to validate allow-ids: empty PCI ID"),
    (GpuPlugin, ["-deny-ids=56c0"], "failed to validate deny-ids: invalid PCI ID: 56c0"),
    (GpuPlugin, ["-monitoring-mode=both"], "invalid value for monitoring-mode, valid values"),
    (GpuPlugin, [WSL, "-enable-monitoring"], "monitoring is not supported within WSL"),
    (GpuPlugin, [WSL, "-health-management"], "health management is not supported within WSL"),
    (GpuPlugin, [WSL, XPUMD], "health management is not supported within WSL"),
    (
        GpuPlugin,
        ["-health-management", XPUMD],
        "cannot use both Level-Zero sidecar and xpumd for health management",
    ),
    (GpuPlugin, [XPUMD, "-temp-limit=99"], LIMITS),
    (GpuPlugin, [XPUMD, "-gpu-temp-limit=99"], LIMITS),
    (GpuPlugin, [XPUMD, "-memory-temp-limit=99"], LIMITS),
    (QatPlugin, ["-mode=user"], "unknown mode"),
]


def output(plugin: type[Plugin[Any]], arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a drop-in command prints before it ends with the status 1."""
    assert dropin("program", plugin, "family", arguments) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err


@pytest.fixture(autouse=True)
def _no_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the configuration of the logs of the test run."""
    monkeypatch.setattr(logflags, "start", lambda *_arguments: None)


@pytest.mark.parametrize(("plugin", "arguments", "text"), GO)
def test_a_drop_in_command_prints_the_text_of_the_go_implementation(
    plugin: type[Plugin[Any]], arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = output(plugin, arguments, capsys)
    assert line.startswith("program: Argument check failed: argument error: ")
    assert text in line


@pytest.mark.parametrize(
    ("plugin", "arguments", "text"),
    [
        (DsaPlugin, ["-driver=vfio"], "invalid value for driver, valid values: idxd, vfio-pci; found 'vfio'"),
        (DsaPlugin, ["-shared-dev-num=0"], "shared-dev-num is 0, expected 1 or more"),
        (IaaPlugin, ["-shared-dev-num=-1"], "shared-dev-num is -1, expected 1 or more"),
        (FpgaPlugin, ["-mode=afu"], "invalid value for mode, valid values: af, region, regiondevel; found 'afu'"),
        (FpgaPlugin, ["-cdi=all"], "invalid value for cdi, valid values: auto, only, off; found 'all'"),
        (NpuPlugin, ["-shared-dev-num=0"], "the number of containers sharing the same NPU must greater than zero"),
        (
            QatPlugin,
            ["-dpdk-driver=uio"],
            "invalid value for dpdk-driver, valid values: vfio-pci, igb_uio; found 'uio'",
        ),
        (QatPlugin, ["-allocation-policy="], "valid values: none, balanced, packed; found ''"),
        (QatPlugin, ["-max-num-devices=-1"], "max-num-devices is -1, expected 0 or more"),
        (SgxPlugin, ["-enclave-limit=100001"], "enclave-limit is 100001, expected 100000 or less"),
    ],
)
def test_other_errors_name_the_option_the_value_and_what_is_expected(
    plugin: type[Plugin[Any]], arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert text in output(plugin, arguments, capsys)


@pytest.mark.parametrize("value", ["", "b", "A", "a ", "a,b"])
def test_a_value_outside_the_choices_is_rejected(value: str) -> None:
    with pytest.raises(ValueError, match=r"^invalid value for option, valid values: a; found '"):
        check_choice("option", value, ["a"])
    check_choice("option", "a", ["a"])
