"""`accelplane provision` and the init containers' programs, with their output and exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import click
import pytest
from mountpoints import mounted_for_test
from processes import run_main

from accelplane.cli import main, provision_dropin
from accelplane.cli.provision import provision as provision_command
from accelplane.simulate.kernel import Kernel, write_tree
from accelplane.simulate.offload import DlbSpec, DsaSpec, IaaSpec, QatSpec
from accelplane.simulate.specs import NodeSpec

pytestmark = pytest.mark.memory

PAGE = Path(__file__).parents[2] / "docs" / "provisioning.md"
PROGRAMS: Mapping[str, Callable[[], int | None]] = {
    "accelplane": main.main,
    "qat-init.sh": provision_dropin.qat_init,
    "idxd-init.sh": provision_dropin.idxd_init,
    "dlb-init.sh": provision_dropin.dlb_init,
}
NODE = NodeSpec(
    qats=[QatSpec(services="dc"), QatSpec(services="asym;sym", vfs=2, vf_driver="vfio-pci")],
    dsas=[DsaSpec()],
    iaas=[IaaSpec()],
    dlbs=[DlbSpec(), DlbSpec()],
    loaded=("vfio-pci",),
)


def run(
    program: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The program with this environment, called in this process."""

    def command(_arguments: Sequence[str]) -> int:
        return PROGRAMS[program]() or 0

    with patch.object(sys, "argv", [program, *arguments]), patch.dict(os.environ, environment or {}, clear=True):
        return run_main(command)


def provision(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return run("accelplane", "provision", *arguments, environment=environment)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    directory = tmp_path / "conf"
    directory.mkdir()
    (directory / "qat.conf").write_text("ServicesEnabled=sym;asym\n")
    return directory


@pytest.fixture
def tree(tmp_path: Path) -> str:
    """The node as plain files, which do not react to writes."""
    write_tree(Kernel(NODE), tmp_path / "tree")
    return str(tmp_path / "tree")


MakeNode = Callable[[NodeSpec], AbstractContextManager[tuple[Kernel, str]]]


@pytest.fixture
def node(tmp_path: Path) -> MakeNode:
    """A node with an emulated kernel."""

    @contextmanager
    def make(spec: NodeSpec) -> Iterator[tuple[Kernel, str]]:
        kernel = Kernel(spec)
        with mounted_for_test(kernel, tmp_path / "root") as root:
            yield kernel, str(root)

    return make


def files(root: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(root).rglob("*") if path.is_file() and not path.is_symlink()}


def test_a_plan_shows_the_difference_and_writes_nothing(tree: str, conf: Path) -> None:
    before = files(tree)
    result = provision("plan", "qat", "dlb", "--root", tree, "--config-dir", str(conf))
    assert (
        result.stdout
        == f"""\
qat: desired: services sym;asym, auto-reset any, all VFs on vfio-pci ({conf}/qat.conf)
  0000:61:00.0  pending
      now: driver 4xxx; state up; services dc; auto-reset off; VFs 0 of 16
      pending: state up -> down; services dc -> sym;asym; state down -> up; VFs 0 -> 16;
          driver of the VFs -> vfio-pci
  0000:65:00.0  unchanged
      now: driver 4xxx; state up; services asym;sym; auto-reset off; VFs 2 of 2; VFs on vfio-pci (2)
dlb: desired: 1 VF on every PF
  0000:62:00.0  pending
      now: driver dlb2; VFs 0 of 16
      pending: VFs 0 -> 1; resources of each VF: atomic_inflights 2048, dir_credits 2048, dir_ports 8,
          hist_list_entries 2048, ldb_credits 8192, ldb_ports 4, ldb_queues 32, sched_domains 32, sn0_slots 2,
          sn1_slots 2
  0000:66:00.0  pending
      now: driver dlb2; VFs 0 of 16
      pending: VFs 0 -> 1; resources of each VF: atomic_inflights 2048, dir_credits 2048, dir_ports 8,
          hist_list_entries 2048, ldb_credits 8192, ldb_ports 4, ldb_queues 32, sched_domains 32, sn0_slots 2,
          sn1_slots 2
4 devices: 1 unchanged, 3 pending
"""
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert files(tree) == before


def test_no_family_means_all_of_them(tree: str) -> None:
    result = provision("plan", "-o", "json", "--root", tree)
    report = json.loads(result.stdout)
    assert {device["kind"] for device in report["devices"]} == {"qat", "dsa", "iaa", "dlb"}
    assert report["problems"] == []


def test_status_shows_the_current_and_the_desired_state(tree: str, conf: Path) -> None:
    result = provision("status", "qat", "--root", tree, "--config-dir", str(conf))
    assert result.returncode == 1
    assert "  0000:61:00.0  pending\n      driver 4xxx\n      state up\n      services dc\n" in result.stdout
    assert result.stdout.endswith("2 devices: 1 unchanged, 1 pending\n")
    only = {"ENABLED_QAT_PF_PCIIDS": "4942"}
    assert provision("status", "qat", "--root", tree, environment=only).returncode == 0


def test_apply_reaches_the_desired_state_and_a_second_one_changes_nothing(node: MakeNode, conf: Path) -> None:
    with node(NODE) as (kernel, root):
        arguments = ("--root", root, "--config-dir", str(conf))
        first = provision("apply", *arguments)
        assert (first.returncode, first.stderr) == (0, ""), first.stdout
        assert "\n6 devices: 1 unchanged, 5 applied\n" in f"\n{first.stdout}"
        assert kernel.read("/sys/bus/pci/devices/0000:61:00.0/qat/cfg_services") == "asym;sym\n"
        assert len(kernel.list("/sys/bus/pci/drivers/vfio-pci/")) > 16
        assert kernel.list("/dev/dsa") == ["wq0.0", "wq0.1", "wq0.2", "wq0.3"]
        assert provision("status", *arguments).returncode == 0
        assert provision("apply", *arguments).stdout.endswith("\n6 devices: 6 unchanged\n")


def test_a_failed_device_is_reported_and_sets_the_exit_code(node: MakeNode) -> None:
    with node(NodeSpec(qats=[QatSpec(), QatSpec(services="dc")], iommu="off", loaded=("vfio-pci",))) as (_kernel, root):
        result = provision("apply", "qat", "--root", root)
    assert result.returncode == 1
    assert "reason: VFs 0 -> 16: /sys/bus/pci/devices/0000:61:00.0/sriov_numvfs: Invalid argument" in result.stdout
    assert "no IOMMU is enabled; add intel_iommu=on to the kernel's command line" in " ".join(result.stdout.split())
    assert result.stdout.endswith("2 devices: 2 failed\n")


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("plan", "gpu"), {}, "'gpu' is not one of 'qat', 'idxd', 'dlb'"),
        (("plan", "--root", "/nowhere"), {}, "--root: /nowhere: not a directory"),
        (("plan", "--config-dir", "/nowhere"), {}, "--config-dir: /nowhere: not a directory"),
        (("aply",), {}, "No such command 'aply'"),
        (("status", "--force"), {}, "No such option"),
    ],
)
def test_an_invalid_command_line_is_reported_in_one_line(
    arguments: tuple[str, ...], environment: Mapping[str, str], message: str
) -> None:
    result = provision(*arguments, environment=environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "environment", "name"),
    [
        (("--qat-vf-driver=x",), {}, "--qat-vf-driver"),
        ((), {"QAT_VF_DRIVER": "x"}, "QAT_VF_DRIVER"),
        (("--qat-vf-driver=y",), {"QAT_VF_DRIVER": "x"}, "--qat-vf-driver"),
    ],
)
def test_an_invalid_value_is_reported_with_its_flag_or_variable(
    tree: str, arguments: tuple[str, ...], environment: Mapping[str, str], name: str
) -> None:
    result = provision("plan", "qat", "--root", tree, *arguments, environment=environment)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"accelplane provision: {name}: found ")


def test_an_invalid_file_prevents_all_writes(tree: str, conf: Path) -> None:
    (conf / "qat.conf").write_text("ServicesEnabled=crypto\n")
    (conf / "dlb-node1.conf").write_text("VFs=0\n")
    before = files(tree)
    result = provision("apply", "--root", tree, "--config-dir", str(conf), "--node-name", "node1")
    assert (result.returncode, result.stdout) == (1, "")
    assert [line.partition(" expected ")[0] for line in result.stderr.splitlines()] == [
        f"accelplane provision: {conf}/qat.conf:1: found 'ServicesEnabled=crypto',",
        f"accelplane provision: {conf}/dlb-node1.conf:1: found 'VFs=0',",
        "accelplane provision: nothing was written",
    ]
    assert files(tree) == before


def test_an_invalid_shared_variable_is_reported_once(tree: str) -> None:
    result = provision("plan", "idxd", "--root", tree, environment={"DSA_DRIVER": "uio"})
    output = "accelplane provision: DSA_DRIVER: found 'uio', expected idxd or vfio-pci\n"
    assert (result.returncode, result.stderr) == (1, output)


def test_a_flag_has_priority_over_its_environment_variable(tree: str) -> None:
    environment = {"DLB_VFS": "2", "ENABLED_QAT_PF_PCIIDS": "4944"}
    arguments = ("plan", "qat", "dlb", "--root", tree)
    output = provision(*arguments, environment=environment).stdout
    assert "dlb: desired: 2 VFs on every PF" in output
    assert "no devices" in output
    output = provision(*arguments, "--dlb-vfs", "3", "--qat-ids", "4940", environment=environment).stdout
    assert "dlb: desired: 3 VFs on every PF" in output
    assert "0000:61:00.0" in output


# The page for administrators.


def test_the_page_documents_every_variable_and_flag() -> None:
    options = {
        f"`{option.envvar}` | `{option.opts[0]}`"
        for option in provision_command.commands["apply"].params
        if isinstance(option, click.Option) and option.envvar
    }
    assert [option for option in options if option not in PAGE.read_text()] == []
    assert len(options) == 8


def test_the_log_on_the_page_is_real_output(node: MakeNode, conf: Path) -> None:
    busy, refused = QatSpec(services="dc", vfs=16, vf_driver="vfio-pci"), QatSpec(model="c6xx")
    with node(NodeSpec(qats=[QatSpec(services="dc"), busy, refused], loaded=("vfio-pci",))) as (kernel, root):
        kernel.hold("0000:65:00.0")
        log = run("qat-init.sh", "-root", root, "-config-dir", str(conf)).stdout
    assert f"```text\n{log.replace(str(conf), '/qat-init/conf')}```" in PAGE.read_text()


# The init containers' programs.


def test_qat_init_accepts_the_variables_and_files_of_the_original(node: MakeNode, conf: Path) -> None:
    (conf / "qat-node1.conf").write_text("dc;sym\n")
    with node(NODE) as (kernel, root):
        arguments = ("-root", root, "-config-dir", str(conf))
        environment = {"NODE_NAME": "node1", "ENABLED_QAT_PF_PCIIDS": "37c8 4940"}
        result = run("qat-init.sh", *arguments, environment=environment)
        assert result.returncode == 0, result.stdout
        assert f"qat: desired: services dc;sym, auto-reset any, all VFs on vfio-pci ({conf}/qat-node1.conf)" in (
            result.stdout
        )
        assert kernel.read("/sys/bus/pci/devices/0000:61:00.0/qat/cfg_services") == "sym;dc\n"
        assert run("qat-init.sh", *arguments, environment=environment).stdout.endswith("2 unchanged\n")


def test_qat_init_fails_without_vfio_pci_and_on_a_wrong_file(node: MakeNode, conf: Path) -> None:
    with node(NodeSpec(qats=[QatSpec()], loaded=())) as (_kernel, root):
        result = run("qat-init.sh", "-root", root, "-config-dir", "/nowhere")
        assert (result.returncode, "(modprobe vfio-pci)" in result.stdout) == (1, True)
        (conf / "qat.conf").write_text("ServicesEnabled=dc\nServicesEnabled=sym\n")
        result = run("qat-init.sh", "-root", root, "-config-dir", str(conf))
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.startswith(f"qat-init.sh: {conf}/qat.conf:2: found ")


def test_idxd_init_configures_dsa_by_default(node: MakeNode) -> None:
    with node(NodeSpec(dsas=[DsaSpec()], iaas=[IaaSpec()])) as (kernel, root):
        arguments = ("-root", root, "-config-dir", "/nowhere")
        assert run("idxd-init.sh", *arguments).returncode == 0
        assert kernel.exists("/dev/dsa/wq0.3")
        assert not kernel.exists("/dev/iax")
        assert run("idxd-init.sh", *arguments, environment={"DEVICE_TYPE": "iaa"}).returncode == 0
        assert kernel.exists("/dev/iax/wq1.3")


def test_dlb_init_creates_one_vf_on_the_first_device_only(node: MakeNode) -> None:
    with node(NODE) as (kernel, root):
        arguments = ("-root", root, "-config-dir", "/nowhere")
        assert run("dlb-init.sh", *arguments).returncode == 0
        assert kernel.read("/sys/bus/pci/devices/0000:62:00.0/vf0_resources/num_ldb_credits") == "8192\n"
        assert kernel.read("/sys/bus/pci/devices/0000:66:00.0/sriov_numvfs") == "0\n"
        assert run("dlb-init.sh", *arguments, environment={"DLB_PFS": "all"}).returncode == 0
        assert kernel.read("/sys/bus/pci/devices/0000:66:00.0/sriov_numvfs") == "1\n"


def test_dlb_init_succeeds_if_no_change_is_possible(node: MakeNode) -> None:
    with node(NodeSpec(dlbs=[DlbSpec(vfs=4)])) as (_kernel, root):
        result = run("dlb-init.sh", "-root", root, "-config-dir", "/nowhere")
    assert result.returncode == 0
    assert "reason: sriov_numvfs is 4, expected 1; use --force to replace the VFs" in result.stdout


@pytest.mark.parametrize("program", ["qat-init.sh", "idxd-init.sh", "dlb-init.sh"])
def test_a_node_without_devices_is_not_a_failure(program: str, tmp_path: Path) -> None:
    result = run(program, "-root", str(tmp_path), "-config-dir", "/nowhere")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("  no devices\n0 devices\n")


@pytest.mark.parametrize("arguments", [("-roots", "/"), ("-root",), ("apply",)])
def test_unknown_arguments_are_reported(arguments: tuple[str, ...]) -> None:
    result = run("qat-init.sh", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
