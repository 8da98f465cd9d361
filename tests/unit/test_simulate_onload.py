"""Onload and sfc of the emulated kernel: modules, device nodes, parameters, and the calls of the control plane."""

import errno
import json
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernels import dangling, refusal

from accelplane.host import Host
from accelplane.plugins.onload.nics import Nic, find_nics
from accelplane.simulate import NicSpec, NodeSpec, OnloadSpec, TreeError
from accelplane.simulate.kernel import Kernel, Uevent, write_tree
from accelplane.simulate.kernel.control import Control
from accelplane.simulate.kernel.mounting import parts
from accelplane.simulate.kernel.usermode import Call, Usermode

SPEC = NodeSpec(nics=[NicSpec(), NicSpec(interface="ens7")], onload=OnloadSpec(), numa_nodes=2)
PARAMETERS = "/sys/module/onload/parameters"
PATH, ARGUMENTS = f"{PARAMETERS}/cplane_server_path", f"{PARAMETERS}/cplane_server_params"


def calls(kernel: Kernel) -> list[list[str]]:
    return [list(call.argv) for call in kernel.usermode_calls()]


def problem(kernel: Kernel, **command: object) -> int:
    """The errno that a command of the control file gets, 0 if it succeeds."""
    try:
        kernel.write("/control", json.dumps(command))
    except OSError as error:
        return error.errno or -1
    return 0


@pytest.fixture
def kernel() -> Kernel:
    instance = Kernel(SPEC)
    Control(instance)
    return instance


def test_nics_have_interfaces_in_sysfs_on_their_numa_nodes(kernel: Kernel) -> None:
    assert kernel.list("/sys/class/net") == ["ens7", "sfc0"]
    assert kernel.read("/sys/class/net/sfc0/device/vendor") == "0x1924\n"
    assert kernel.read("/sys/class/net/ens7/device/numa_node") == "1\n"
    assert "MODALIAS=pci:v00001924d00000B03sv00001924" in kernel.read("/sys/class/net/sfc0/device/uevent")
    assert dangling(kernel) == []


def test_the_plugin_finds_the_nics_in_a_written_tree(kernel: Kernel, tmp_path: object) -> None:
    write_tree(kernel, str(tmp_path))
    assert find_nics(Host(str(tmp_path))) == [Nic("ens7", 1), Nic("sfc0", 0)]


def test_interfaces_exist_while_the_driver_is_bound(kernel: Kernel) -> None:
    assert problem(kernel, do="unload", module="onload") == 0
    assert problem(kernel, do="unload", module="sfc") == 0
    assert kernel.list("/sys/class/net") == []
    assert kernel.list("/sys/bus/pci/devices")
    assert problem(kernel, do="load", module="sfc") == 0
    assert kernel.list("/sys/class/net") == ["ens7", "sfc0"]
    bdf = kernel.plug(NicSpec())
    assert kernel.list("/sys/class/net") == ["ens7", "sfc0", "sfc1"]
    kernel.unplug(bdf)
    assert kernel.list("/sys/class/net") == ["ens7", "sfc0"]


def test_an_interface_has_only_one_device() -> None:
    kernel = Kernel(NodeSpec(nics=[NicSpec(interface="a"), NicSpec(interface="a")]))
    assert kernel.list("/sys/class/net") == ["a"]


def test_device_nodes_and_parameters_exist_while_the_module_is_loaded() -> None:
    events: list[Uevent] = []
    kernel = Kernel(SPEC, listen=events.append)
    nodes = ("/dev/onload", "/dev/onload_epoll", "/dev/sfc_char")
    assert all(map(kernel.exists, nodes))
    kernel.unload("onload")
    assert not any(map(kernel.exists, (*nodes, "/sys/module/onload")))
    kernel.load("onload")
    assert all(map(kernel.exists, (*nodes, PATH)))
    actions = [event.action for event in events if (event.subsystem, event.devpath) == ("module", "/module/onload")]
    assert actions == ["remove", "add"]


def test_modules_are_loaded_and_unloaded_in_the_order_of_their_dependencies(kernel: Kernel) -> None:
    assert problem(kernel, do="unload", module="sfc") == errno.EWOULDBLOCK
    assert problem(kernel, do="load", module="onload", first_time=True) == errno.EEXIST
    assert problem(kernel, do="load", module="onload") == 0
    assert problem(kernel, do="unload", module="onload") == 0
    assert problem(kernel, do="unload", module="onload") == errno.ENOENT
    assert problem(kernel, do="unload", module="sfc") == 0
    assert problem(kernel, do="unload", module="sfc") == errno.ENOENT
    assert problem(kernel, do="load", module="onload") == errno.ENOENT
    assert problem(kernel, do="load", module="sfc", first_time=True) == 0
    assert problem(kernel, do="load", module="sfc", first_time=True) == errno.EEXIST


def test_a_module_in_use_is_not_unloaded(kernel: Kernel) -> None:
    kernel.hold("onload")
    assert problem(kernel, do="unload", module="onload") == errno.EBUSY
    kernel.release("onload")
    assert problem(kernel, do="unload", module="onload") == 0


def test_loading_fails_the_requested_number_of_times(kernel: Kernel) -> None:
    kernel.unload("onload")
    assert problem(kernel, do="load", module="onload", errno="ENOMEM", times=2) == 0
    assert [problem(kernel, do="load", module="onload") for _ in range(3)] == [errno.ENOMEM, errno.ENOMEM, 0]


def test_a_reloaded_module_has_its_defaults(kernel: Kernel) -> None:
    kernel.write(PATH, "/usr/bin/crictl")
    kernel.unload("onload")
    kernel.load("onload")
    assert (kernel.read(PATH), kernel.read(ARGUMENTS)) == ("\n", "\n")


def test_parameters_are_trimmed_and_limited(kernel: Kernel) -> None:
    kernel.write(ARGUMENTS, " exec  a\n")
    assert kernel.read(ARGUMENTS) == "exec  a\n"
    assert refusal(kernel, ARGUMENTS, "x" * 1025) == errno.ENOSPC
    kernel.write(f"{PARAMETERS}/cplane_server_uid", "7")
    assert kernel.read(f"{PARAMETERS}/cplane_server_uid") == "7\n"
    assert refusal(kernel, f"{PARAMETERS}/cplane_init_timeout", "x") == errno.EINVAL


def test_a_changed_parameter_starts_the_server_and_an_equal_one_does_not(kernel: Kernel) -> None:
    kernel.write(ARGUMENTS, "exec id /server -K")
    kernel.write(PATH, "/usr/bin/crictl")
    kernel.write(PATH, " /usr/bin/crictl\n")
    assert calls(kernel) == [
        ["/sbin/onload_cp_server", "exec", "id", "/server", "-K", "--daemonise"],
        ["/usr/bin/crictl", "exec", "id", "/server", "-K", "--daemonise"],
    ]


def test_no_server_is_started_while_it_is_in_use_or_disabled(kernel: Kernel) -> None:
    kernel.hold("onload")
    kernel.write(PATH, "/a")
    kernel.release("onload")
    kernel.write(f"{PARAMETERS}/cplane_spawn_server", "N")
    kernel.write(PATH, "/b")
    assert calls(kernel) == []
    assert kernel.read(f"{PARAMETERS}/cplane_spawn_server") == "N\n"


def test_the_first_stack_of_a_network_namespace_starts_a_server(kernel: Kernel) -> None:
    kernel.write(PATH, "/server")
    for _ in range(2):
        assert problem(kernel, do="stack", network_namespace="/proc/7/ns/net") == 0
    assert calls(kernel)[1:] == [["/server", "--daemonise", "--network-namespace-file", "/proc/7/ns/net"]]
    kernel.unload("onload")
    assert problem(kernel, do="stack") == errno.ENODEV


def test_programs_run_with_an_empty_environment_and_their_status_is_kept() -> None:
    usermode = Usermode(execute=True)
    usermode.start(
        (sys.executable, "-c", "import os, sys; sys.exit(3 + len([n for n in os.environ if n != 'LC_CTYPE']))")
    )
    usermode.start(("/nowhere/crictl",))
    usermode.start((sys.executable, "-c", "import time; time.sleep(1000)"))
    while (first := usermode.calls()[0]).status is None:
        pass
    assert first.status == 3
    assert "No such file" in usermode.calls()[1].error
    assert usermode.calls()[2].status is None
    usermode.close()


def test_the_control_file_returns_the_calls(kernel: Kernel) -> None:
    kernel.write(PATH, "/server")
    assert problem(kernel, do="calls") == 0
    assert json.loads(kernel.read("/control")) == [
        {"argv": ["/server", "--daemonise"], "status": None, "error": ""},
    ]
    assert kernel.usermode_calls() == (Call(("/server", "--daemonise")),)


def test_loaded_modules_are_mounted_with_their_directory() -> None:
    assert "/sys/module" in parts(Kernel(SPEC))
    assert not any(path.startswith("/sys/module/") for path in parts(Kernel(SPEC)))
    assert "/sys/module/sfc" in parts(Kernel(NodeSpec(nics=[NicSpec()])))


def test_the_mount_points_do_not_depend_on_what_is_loaded() -> None:
    nics = [NicSpec()]
    unloaded = NodeSpec(nics=nics, onload=OnloadSpec(loaded=False))
    assert parts(Kernel(unloaded)) == parts(Kernel(NodeSpec(nics=nics, onload=OnloadSpec())))


@given(st.text(max_size=1200))
def test_any_text_is_a_parameter_or_too_long(text: str) -> None:
    kernel = Kernel(SPEC)
    if len(text) > 1024:
        assert refusal(kernel, ARGUMENTS, text) == errno.ENOSPC
    else:
        kernel.write(ARGUMENTS, text)
        assert kernel.read(ARGUMENTS) == text.strip() + "\n"


def test_two_nics_at_one_address_are_rejected() -> None:
    with pytest.raises(TreeError, match="two devices"):
        Kernel(NodeSpec(nics=[NicSpec(bdf="0000:21:00.0"), NicSpec(bdf="0000:21:00.0")]))
