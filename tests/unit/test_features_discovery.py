"""Feature discovery in trees of plain files: valid, unusual and hostile ones."""

import gzip
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import link, write

from accelplane.host import Host
from accelplane.nodelabels import Features, Function, discover, evaluate

RELEASE = "6.8.0-45-generic"


def pci(root: Path, address: str, cls: str, device: str, vendor: str = "0x8086") -> None:
    function = root / "sys/devices/pci0000:00" / address
    for name, text in (("vendor", vendor), ("device", device), ("class", cls)):
        write(function / name, f"{text}\n")
    link(root / "sys/bus/pci/devices" / address, function)


def modules(root: Path, *names: str) -> None:
    write(root / "proc/modules", "".join(f"{name} 16384 0 - Live 0x0000000000000000\n" for name in names))


def cpu(root: Path, flags: str) -> None:
    processor = f"processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu vme {flags} lahf_lm\nbugs\t\t: none\n\n"
    write(root / "proc/cpuinfo", processor * 2)


def epc(root: Path, *sizes: int) -> None:
    for number, size in enumerate(sizes):
        write(root / f"sys/devices/system/node/node{number}/x86/sgx_total_bytes", f"{size}\n")


def discovered_labels(root: Path) -> Features:
    return discover(Host(root))


def names(features: Features, feature: str) -> set[str]:
    return set(features.elements[feature])


def test_an_empty_tree_has_no_features(tmp_path: Path) -> None:
    host = Host(tmp_path)
    found = discover(host)
    assert found.pci == ()
    assert not any(found.elements.values())
    assert host.notes == []
    assert evaluate(found).labels == {}


def test_pci_functions_have_class_and_device(tmp_path: Path) -> None:
    pci(tmp_path, "0000:3d:00.0", "0x038000", "0x56c0")
    pci(tmp_path, "0000:00:02.0", "0x030000", "0x4680")
    pci(tmp_path, "0000:01:00.0", "0x030000", "0x2204", vendor="0x10de")
    assert discovered_labels(tmp_path).pci == (Function("0300", "4680"), Function("0380", "56c0"))


@pytest.mark.parametrize(
    ("cls", "device"), [("0x0380", "0x56c0"), ("junk", "0x56c0"), ("0x038000", "56c0"), ("0x038000", "0x56c0/x=y")]
)
def test_a_function_with_invalid_ids_is_skipped_and_noted(tmp_path: Path, cls: str, device: str) -> None:
    pci(tmp_path, "0000:3d:00.0", cls, device)
    pci(tmp_path, "0000:3e:00.0", "0x038000", "0x56c0")
    host = Host(tmp_path)
    assert discover(host).pci == (Function("0380", "56c0"),)
    assert any("0000:3d:00.0" in note for note in host.notes)


def test_loaded_and_built_in_modules_are_enabled(tmp_path: Path) -> None:
    modules(tmp_path, "i915", "intel_qat")
    write(tmp_path / "proc/sys/kernel/osrelease", f"{RELEASE}\n")
    builtin = "kernel/drivers/vfio/pci/vfio-pci.ko\nkernel/drivers/dma/idxd/idxd.ko\n"
    write(tmp_path / f"lib/modules/{RELEASE}/modules.builtin", builtin)
    found = discovered_labels(tmp_path)
    assert names(found, "kernel.loadedmodule") == {"i915", "intel_qat"}
    assert names(found, "kernel.enabledmodule") == {"i915", "intel_qat", "vfio-pci", "idxd"}


def test_built_in_modules_are_read_from_sysfs(tmp_path: Path) -> None:
    modules(tmp_path, "i915")
    for name in ("i915", "vfio_pci"):
        write(tmp_path / f"sys/module/{name}/parameters/x", "")
    found = discovered_labels(tmp_path)
    assert names(found, "kernel.loadedmodule") == {"i915"}
    assert names(found, "kernel.enabledmodule") == {"i915", "vfio_pci", "vfio-pci"}


def test_loaded_modules_are_read_from_sysfs_without_procfs(tmp_path: Path) -> None:
    write(tmp_path / "sys/module/i915/initstate", "live\n")
    write(tmp_path / "sys/module/vfio_pci/parameters/x", "")
    found = discovered_labels(tmp_path)
    assert names(found, "kernel.loadedmodule") == {"i915"}
    assert names(found, "kernel.enabledmodule") == {"i915", "vfio_pci", "vfio-pci"}


def test_a_long_list_of_modules_is_read_to_its_end(tmp_path: Path) -> None:
    many = [f"module_{number}" for number in range(3000)]
    modules(tmp_path, *many)
    assert names(discovered_labels(tmp_path), "kernel.loadedmodule") == set(many)


CONFIG = "#\n# Linux\n#\nCONFIG_X86_SGX=y\n# CONFIG_X86_SGX_KVM is not set\nCONFIG_64BIT=y\n"


@pytest.mark.parametrize(
    "place",
    [
        "proc/config.gz",
        f"boot/config-{RELEASE}",
        f"lib/modules/{RELEASE}/config",
        f"lib/modules/{RELEASE}/build/.config",
    ],
)
def test_the_kernel_configuration_is_found_in_the_paths_of_distributions(tmp_path: Path, place: str) -> None:
    write(tmp_path / "proc/sys/kernel/osrelease", f"{RELEASE}\n")
    write(tmp_path / place, gzip.compress(CONFIG.encode()) if place.endswith(".gz") else CONFIG)
    assert names(discovered_labels(tmp_path), "kernel.config") == {"X86_SGX"}


def test_the_kernel_configuration_overrides_the_sgx_driver(tmp_path: Path) -> None:
    write(tmp_path / "proc/config.gz", gzip.compress(CONFIG.replace("X86_SGX=y", "OTHER=y").encode()))
    epc(tmp_path, 4096)
    assert names(discovered_labels(tmp_path), "kernel.config") == set()


# Without a time in it, so that every process of the test run gives the case the same name.
@pytest.mark.parametrize(
    "config",
    [b"", b"no gzip", gzip.compress(b"hello", mtime=0), gzip.compress(CONFIG.encode(), mtime=0)[:20]],
    ids=["empty", "no gzip", "no configuration", "cut"],
)
def test_the_sgx_driver_replaces_an_unreadable_configuration(tmp_path: Path, config: bytes) -> None:
    write(tmp_path / "proc/config.gz", config)
    assert names(discovered_labels(tmp_path), "kernel.config") == set()
    write(tmp_path / "sys/class/misc/sgx_enclave/dev", "10:125\n")
    assert names(discovered_labels(tmp_path), "kernel.config") == {"X86_SGX"}


def test_a_node_with_sgx_gets_its_label_and_memory(tmp_path: Path) -> None:
    cpu(tmp_path, "sgx sgx_lc")
    epc(tmp_path, 98566144, 98566144)
    found = discovered_labels(tmp_path)
    assert names(found, "cpu.cpuid") == {"SGX", "SGXLC"}
    assert found.element("cpu.security", "sgx.epc") == "197132288"
    assert evaluate(found).resources == {"sgx.intel.com/epc": "197132288"}
    assert evaluate(found).labels == {"intel.feature.node.kubernetes.io/sgx": "true"}


@pytest.mark.parametrize("flags", ["", "sgx", "sgx_lc"])
def test_a_node_without_sgx_cpu_flags_gets_no_label(tmp_path: Path, flags: str) -> None:
    cpu(tmp_path, flags)
    epc(tmp_path, 98566144)
    assert evaluate(discovered_labels(tmp_path)).labels == {}


def test_a_node_without_sgx_memory_gets_no_label(tmp_path: Path) -> None:
    cpu(tmp_path, "sgx sgx_lc")
    write(tmp_path / "dev/sgx_enclave", "")
    assert evaluate(discovered_labels(tmp_path)).labels == {}


def test_a_kernel_release_with_path_separators_is_rejected(tmp_path: Path) -> None:
    write(tmp_path / "proc/sys/kernel/osrelease", "../../etc\n")
    write(tmp_path / "etc/modules.builtin", "kernel/xe.ko\n")
    host = Host(tmp_path)
    assert names(discover(host), "kernel.enabledmodule") == set()
    assert any("osrelease" in note for note in host.notes)


def test_links_stay_inside_the_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    link(root / "proc/modules", "/proc/modules")
    assert names(discovered_labels(root), "kernel.loadedmodule") == set()


def test_discovery_succeeds_on_the_real_host() -> None:
    host = Host("/")
    discover(host)
    assert [note for note in host.notes if "memory" in note] == []


FILES = ("proc/modules", "proc/cpuinfo", "proc/config.gz", "proc/sys/kernel/osrelease", f"boot/config-{RELEASE}")


def test_pipes_directories_and_endless_files_are_skipped(tmp_path: Path) -> None:
    write(tmp_path / "proc/sys/kernel/osrelease", RELEASE)
    os.mkfifo(tmp_path / "proc/modules")
    (tmp_path / "proc/config.gz").mkdir()
    (tmp_path / "boot").mkdir()
    with open(tmp_path / f"boot/config-{RELEASE}", "wb") as file:
        file.truncate(1 << 30)
    host = Host(tmp_path)
    assert names(discover(host), "kernel.loadedmodule") == set()
    assert len(host.notes) == 3


@given(st.lists(st.tuples(st.sampled_from(FILES), st.binary(max_size=200)), max_size=5))
def test_any_content_of_procfs_and_sysfs_is_accepted(tmp_path: Path, files: list[tuple[str, bytes]]) -> None:
    for name, data in files:
        write(tmp_path / name, data)
    found = discovered_labels(tmp_path)
    assert evaluate(found).labels.keys() <= {"intel.feature.node.kubernetes.io/sgx"}
    for name in names(found, "kernel.enabledmodule"):
        assert name.isascii()


@given(st.text(max_size=40), st.text(max_size=40), st.binary(max_size=64))
def test_any_attribute_is_accepted(tmp_path: Path, cls: str, device: str, epc: bytes) -> None:
    function = tmp_path / "sys/bus/pci/devices/0000:00:02.0"
    write(function / "vendor", "0x8086\n")
    write(function / "class", cls.encode("utf-8", "surrogatepass"))
    write(function / "device", device.encode("utf-8", "surrogatepass"))
    write(tmp_path / "sys/devices/system/node/node0/x86/sgx_total_bytes", epc)
    for function_found in discovered_labels(tmp_path).pci:
        assert len(function_found.cls) == len(function_found.device) == 4
