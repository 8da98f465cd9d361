"""The SGX scan on trees of plain files, and its messages without SGX."""

import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import write

from accelplane.cli.goflags import Value, flags_of, parse_or_exit
from accelplane.devices import CdiDevice, CdiMount, Device, DeviceNode, Inventory, Skipped
from accelplane.host import Host
from accelplane.host.epc import CpuSgx, Epc
from accelplane.node.scan_loop import explanation
from accelplane.plugins.sgx import (
    DEFAULT_LIMIT,
    ENCLAVE,
    PROVISION,
    VEPC,
    SgxConfig,
    SgxPlugin,
    default_limit,
    is_registered,
    likely_cause,
)

pytestmark = pytest.mark.memory

BOTH = (ENCLAVE, PROVISION)


def tree(root: Path, nodes: Sequence[str] = BOTH) -> Path:
    for node in nodes:
        write(root / node[1:], "")
    return root


def scan(root: Path, **options: Any) -> tuple[Mapping[str, list[Device]], dict[str, Skipped]]:
    """The published devices by resource, and skipped hardware."""
    inventory = Inventory.of(SgxPlugin(SgxConfig(**options)).scan(Host(root)))
    published = {name: list(devices.values()) for name, devices in inventory.resources.items()}
    return published, {skipped.subject: skipped for skipped in inventory.skipped}


def counts(root: Path, **options: Any) -> Mapping[str, int]:
    return {name: len(devices) for name, devices in scan(root, **options)[0].items()}


# The number of ids


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        ("", 110),
        *(("1", 4), ("0", 0), ("007", 28), ("110", 440), ("4294967295", 100_000)),
        *((text, 110) for text in ("4294967296", "-1", "+1", "0x10", " 1", "1 ", "1.5", "1_0", "ten", "٣", "9" * 5000)),
    ],
)
def test_the_limit_is_pods_per_core_times_cpus_up_to_the_maximum(value: str, limit: int) -> None:
    assert default_limit(value, 4).ids == limit


@given(st.text(max_size=20), st.integers(1, 4096))
def test_any_environment_gives_a_limit_and_an_invalid_one_a_problem(value: str, cpus: int) -> None:
    limit = default_limit(value, cpus)
    if value.isascii() and value.isdigit() and int(value) < 1 << 32:
        expected = int(value) * cpus
        assert (limit.ids, bool(limit.problem)) == (min(expected, 100_000), expected > 100_000)
    else:
        assert (limit.ids, bool(limit.problem)) == (DEFAULT_LIMIT, bool(value))


def test_without_options_there_are_110_ids_of_each(tmp_path: Path) -> None:
    assert counts(tree(tmp_path)) == {"enclave": 110, "provision": 110}


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ([], SgxConfig()),
        (["-enclave-limit", "20", "--provision-limit=0x10"], SgxConfig(enclave_limit=20, provision_limit=16)),
        (["-enclave-limit=0b11", "-provision-limit=1_0"], SgxConfig(enclave_limit=3, provision_limit=10)),
        (["-dcap-infra-resources"], SgxConfig(dcap_infra_resources=True)),
        (["-enclave-only=true", "-vepc-limit=2"], SgxConfig(enclave_only=True, vepc_limit=2)),
    ],
)
def test_the_command_line_is_that_of_the_go_program(arguments: list[str], config: SgxConfig) -> None:
    values: dict[str, Value] = parse_or_exit("prog", flags_of(SgxConfig), arguments)
    assert SgxConfig.of(values) == config


@pytest.mark.parametrize("argument", ["-enclave-limit=-1", "-provision-limit=ten", "-enclave-limit=", "-vepc-limit=+1"])
def test_an_invalid_limit_prints_the_usage_and_exits_with_2(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_or_exit("prog", flags_of(SgxConfig), [argument])
    assert caught.value.code == 2
    assert "  -enclave-limit uint\n" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"enclave-limit": -1}, {"enclave-limit": 100_001}, {"provision-limit": 2**63}])
def test_invalid_limits_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises((msgspec.ValidationError, ValueError), match=next(iter(options))):
        SgxConfig.of(options)


# Published devices


def test_an_id_has_exactly_one_device_node(tmp_path: Path) -> None:
    published, skipped = scan(tree(tmp_path), enclave_limit=2, provision_limit=1)
    assert published == {
        "enclave": [
            Device(
                resource="enclave", id=f"sgx-enclave-{number}", unit="sgx-enclave", nodes=[DeviceNode(ENCLAVE)],
                topology=None,
            )
            for number in (0, 1)
        ],
        "provision": [
            Device(
                resource="provision", id="sgx-provision-0", unit="sgx-provision", nodes=[DeviceNode(PROVISION)],
                topology=None,
            )
        ],
    }  # fmt: skip
    assert skipped == {}


@pytest.mark.parametrize(
    ("nodes", "options", "published", "skipped"),
    [
        (BOTH, {}, {"enclave": 3, "provision": 2}, {}),
        (BOTH, {"enclave_limit": 0}, {"provision": 2}, {}),
        (BOTH, {"enclave_limit": 0, "provision_limit": 0}, {}, {}),
        (BOTH, {"dcap_infra_resources": True}, {"enclave": 3, "provision": 2, "qe": 1, "registration": 1}, {}),
        (BOTH, {"enclave_only": True}, {"enclave": 3, "provision": 2}, {}),
        (BOTH, {"vepc_limit": 4}, {"enclave": 3, "provision": 2}, {VEPC: True}),
        ((*BOTH, VEPC), {}, {"enclave": 3, "provision": 2}, {}),
        ((*BOTH, VEPC), {"vepc_limit": 4}, {"enclave": 3, "provision": 2, "vepc": 4}, {}),
        ((VEPC,), {"vepc_limit": 4}, {"vepc": 4}, {ENCLAVE: True, PROVISION: True}),
        ((VEPC,), {}, {}, {}),
        ((), {}, {}, {}),
        ((), {"dcap_infra_resources": True, "enclave_only": True, "vepc_limit": 4}, {}, {}),
        ((ENCLAVE,), {}, {}, {PROVISION: True}),
        ((ENCLAVE,), {"dcap_infra_resources": True}, {}, {PROVISION: True}),
        ((ENCLAVE,), {"enclave_only": True, "dcap_infra_resources": True}, {"enclave": 3}, {PROVISION: False}),
        ((PROVISION,), {"enclave_only": True}, {}, {ENCLAVE: True}),
        (("/dev/sgx/enclave", "/dev/sgx/provision"), {}, {}, {}),
    ],
)
def test_resources_depend_on_both_nodes(
    tmp_path: Path,
    nodes: Sequence[str],
    options: dict[str, Any],
    published: Mapping[str, int],
    skipped: Mapping[str, bool],
) -> None:
    found, omitted = scan(tree(tmp_path, nodes), **{"enclave_limit": 3, "provision_limit": 2, **options})
    assert {name: len(devices) for name, devices in found.items()} == published
    assert {path: skip.warning for path, skip in omitted.items()} == skipped


def test_a_missing_provision_node_mentions_enclave_only(tmp_path: Path) -> None:
    _published, skipped = scan(tree(tmp_path, (ENCLAVE,)))
    assert "enclave-only" in skipped[PROVISION].reason


def test_qe_and_registration_have_both_nodes_and_registration_has_efivarfs(tmp_path: Path) -> None:
    published, _skipped = scan(tree(tmp_path), dcap_infra_resources=True)
    nodes = [DeviceNode(ENCLAVE), DeviceNode(PROVISION)]
    variables = CdiDevice(
        kind="intel.cdi.k8s.io/sgx",
        name="efivarfs",
        mounts=[CdiMount("efivarfs", "/run/efivars", "efivarfs", ["rw", "nosuid", "nodev", "noexec", "relatime"])],
    )
    assert published["qe"] == [Device(resource="qe", id="qe-1", nodes=nodes, topology=None)]
    assert published["registration"] == [
        Device(resource="registration", id="registration-1", nodes=nodes, cdi=variables, topology=None)
    ]
    variables.check()
    assert variables.indispensable


def test_two_scans_give_the_same_devices_and_build_them_once(tmp_path: Path) -> None:
    tree(tmp_path)
    plugin = SgxPlugin()
    first, second = (list(plugin.scan(Host(tmp_path))) for _ in range(2))
    assert all(one is other for one, other in zip(first, second, strict=True))


def test_ids_of_a_removed_device_node_stay_listed_until_it_returns() -> None:
    assert SgxPlugin.removal_delay == math.inf


# Invalid device nodes


def character_device(major: int = 10, minor: int = 125) -> os.stat_result:
    return os.stat_result((stat.S_IFCHR | 0o660, *[0] * 9), {"st_rdev": os.makedev(major, minor)})


@pytest.mark.parametrize(
    ("existing", "registered"),
    [
        ((), True),
        (("sys/class/misc/fuse/dev",), True),
        (("sys/dev/char/10:229",), True),
        (("sys/class/misc/fuse/dev", "sys/dev/char/10:229"), False),
        (("sys/class/misc/fuse/dev", "sys/dev/char/10:125"), True),
        (("sys/class/misc/sgx_enclave/dev", "sys/dev/char/10:229"), True),
        (("sys/class/misc/sgx_enclave/dev",), True),
        (("sys/class/misc/sgx_provision/dev", "sys/dev/char/10:1250"), False),
    ],
)
def test_a_node_without_an_entry_in_sysfs_has_no_driver(
    tmp_path: Path, existing: Sequence[str], registered: bool
) -> None:
    for path in existing:
        write(tmp_path / path, "")
    assert is_registered(Host(tmp_path), ENCLAVE, character_device()) == registered


def test_a_node_without_a_driver_is_not_published(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    try:
        for node in BOTH:
            os.mknod(tmp_path / node[1:], stat.S_IFCHR | 0o600, os.makedev(10, 125))
    except PermissionError:
        pytest.skip("device nodes cannot be created here")
    assert counts(tmp_path, enclave_limit=1, provision_limit=1) == {"enclave": 1, "provision": 1}
    write(tmp_path / "sys/class/misc/sgx_provision/dev", "10:126\n")
    write(tmp_path / "sys/dev/char/10:1/dev", "")
    published, skipped = scan(tmp_path)
    assert published == {}
    assert {path: skip.warning for path, skip in skipped.items()} == {ENCLAVE: True}
    assert "sysfs shows no driver for it" in skipped[ENCLAVE].reason


def test_a_file_that_is_not_a_device_node_is_reported_and_published(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for node in BOTH:
        os.mkfifo(tmp_path / node[1:])
    host = Host(tmp_path)
    assert len(list(SgxPlugin(SgxConfig(enclave_limit=1, provision_limit=1)).scan(host))) == 2
    assert host.notes == [f"{node}: not a character device, but published" for node in BOTH]


@pytest.mark.parametrize("target", ["sgx_enclave", "../../outside", "missing"])
def test_dangling_links_are_not_device_nodes(tmp_path: Path, target: str) -> None:
    root = tree(tmp_path / "root", (PROVISION,))
    (root / ENCLAVE[1:]).symlink_to(target)
    published, skipped = scan(root)
    assert (published, list(skipped)) == ({}, [ENCLAVE])


# Explanation

CPU = CpuSgx(present=True, flexible=True)


@pytest.mark.parametrize(
    ("epc", "faulty", "cause"),
    [
        (Epc(), (), ""),
        (Epc(cpu=CPU, cpu_flags=("sgx", "sgx_lc")), (PROVISION,), "the driver makes /dev/sgx_provision"),
        (Epc(), BOTH, "unknown: "),
        (Epc(cpu=CpuSgx()), BOTH, "the CPU has no SGX"),
        (Epc(cpu=CpuSgx(), cpu_flags=()), BOTH, "the CPU has no SGX"),
        (Epc(cpu=CPU, cpu_flags=()), BOTH, "SGX is disabled: the firmware (BIOS) disables it, or the kernel"),
        (Epc(cpu_flags=()), BOTH, "SGX is disabled: the CPU has none, or the firmware"),
        (Epc(cpu=CPU, cpu_flags=("sgx",)), BOTH, "the firmware (BIOS) locks flexible launch control"),
        (Epc(cpu_flags=("sgx",)), BOTH, "the firmware (BIOS) locks flexible launch control"),
        (Epc(cpu=CpuSgx(present=True)), BOTH, "the firmware (BIOS) locks flexible launch control"),
        (Epc(cpu=CPU, cpu_flags=("sgx", "sgx_lc")), BOTH, "SGX is enabled: the driver"),
        (Epc(cpu=CPU), (ENCLAVE,), "SGX is enabled: the driver"),
    ],
)
def test_the_likely_cause_follows_from_cpu_features(epc: Epc, faulty: Sequence[str], cause: str) -> None:
    assert likely_cause(epc, faulty).startswith(cause)
    assert bool(cause) == bool(faulty)


def test_explain_reports_facts_and_options(tmp_path: Path) -> None:
    tree(tmp_path, (ENCLAVE,))
    write(tmp_path / "proc/cpuinfo", "flags\t: sgx sgx_lc\n")
    write(tmp_path / "sys/devices/system/node/node1/x86/sgx_total_bytes", "8192\n")
    explained = json.loads(explanation(SgxPlugin(SgxConfig(enclave_limit=7)), Host(tmp_path)))
    assert explained["options"]["enclave-limit"] == 7
    assert explained["limit-by-default"] == "110 (PODS_PER_CORE not set)"
    assert explained["device-nodes"] == {
        ENCLAVE: "usable",
        PROVISION: "no such device node",
        VEPC: "no such device node",
    }
    assert (explained["cpu-flags"], explained["cpu"]) == (["sgx", "sgx_lc"], None)
    assert (explained["epc-bytes"], explained["epc-source"], explained["epc-bytes-by-numa-node"]) == (
        8192,
        "sysfs",
        {"1": 8192},
    )
    assert explained["problems"] == []
    assert explained["likely-cause"].startswith("the driver makes /dev/sgx_provision")


def test_explain_reports_problems(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    os.mkfifo(tmp_path / ENCLAVE[1:])
    write(tmp_path / "sys/devices/system/node/node0/x86/sgx_total_bytes", "much\n")
    problems = json.loads(explanation(SgxPlugin(), Host(tmp_path)))["problems"]
    assert problems == [
        f"{ENCLAVE}: not a character device, but published",
        "/sys/devices/system/node/node0/x86/sgx_total_bytes: 'much', expected a number of bytes",
    ]


def test_the_memory_of_each_numa_node_is_measured(tmp_path: Path) -> None:
    for number, size in ((0, "4096\n"), (1, "8192\n"), (2, "much\n")):
        write(tmp_path / f"sys/devices/system/node/node{number}/x86/sgx_total_bytes", size)
    samples = list(SgxPlugin().measure(Host(tmp_path), ()))
    assert [(sample.name, sample.labels, sample.value) for sample in samples] == [
        ("accelplane_sgx_epc_bytes", {"numa_node": "0"}, 4096.0),
        ("accelplane_sgx_epc_bytes", {"numa_node": "1"}, 8192.0),
        ("sgx_epc_bytes", {"numa_node": "0"}, 4096.0),
        ("sgx_epc_bytes", {"numa_node": "1"}, 8192.0),
    ]
