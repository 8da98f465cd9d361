"""The emulated kernel at a mount point, with real system calls and shells."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mountpoints import mounted_for_test

from accelplane.host import Host, HostError
from accelplane.simulate import DlbSpec, DsaSpec, NodeSpec, QatSpec, QueueSpec, TreeError
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.mounting import mount_at

QAT = "/sys/bus/pci/devices/0000:61:00.0"
SPEC = NodeSpec(qats=[QatSpec()], dsas=[DsaSpec(queues=[QueueSpec()])], dlbs=[DlbSpec()])


@pytest.fixture
def kernel() -> Kernel:
    return Kernel(SPEC)


@pytest.fixture
def root(kernel: Kernel, tmp_path: Path) -> Iterator[Path]:
    with mounted_for_test(kernel, tmp_path) as where:
        yield where


def shell(root: Path, script: str) -> subprocess.CompletedProcess[str]:
    environment = {"ROOT": str(root), "PATH": os.environ["PATH"], "LC_ALL": "C"}
    return subprocess.run(
        ["sh", "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_a_host_reads_the_result_of_its_writes(root: Path) -> None:
    host = Host(root)
    assert host.text(f"{QAT}/sriov_numvfs") == "0"
    host.write(f"{QAT}/sriov_numvfs", "16")
    assert host.text(f"{QAT}/sriov_numvfs") == "16"
    assert host.driver(f"{QAT}/virtfn15") == "4xxxvf"
    with pytest.raises(HostError, match="Device or resource busy"):
        host.write(f"{QAT}/sriov_numvfs", "8")
    host.write("/sys/bus/pci/drivers/4xxxvf/unbind", "0000:61:00.1")
    host.write(f"{QAT}/virtfn0/driver_override", "vfio-pci")
    host.write("/sys/bus/pci/drivers/vfio-pci/bind", "0000:61:00.1")
    group = host.link(f"{QAT}/virtfn0/iommu_group").rpartition("/")[2]
    assert host.exists(f"/dev/vfio/{group}")
    assert host.topology_of_nodes([f"/dev/vfio/{group}"]) == (0,)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda root: os.mkdir(root / "sys/bus/mine"), errno.EPERM),
        (lambda root: os.open(root / "sys/bus/mine", os.O_CREAT | os.O_WRONLY), errno.EACCES),
        (lambda root: os.unlink(root / f"{QAT[1:]}/vendor"), errno.EPERM),
        (lambda root: os.rmdir(root / "sys/bus/dsa"), errno.EPERM),
        (lambda root: os.rename(root / "sys/bus/dsa", root / "sys/bus/asd"), errno.EPERM),
        (lambda root: os.symlink("x", root / "sys/bus/x"), errno.EPERM),
        (lambda root: os.open(root / f"{QAT[1:]}/vendor", os.O_WRONLY), errno.EACCES),
        (lambda root: os.open(root / f"{QAT[1:]}/vendor", os.O_WRONLY | os.O_TRUNC), errno.EACCES),
        (lambda root: os.open(root / "sys/bus/pci/drivers_probe", os.O_RDONLY), errno.EACCES),
        (lambda root: os.open(root / f"{QAT[1:]}/absent", os.O_RDONLY), errno.ENOENT),
        (lambda root: os.listdir(root / f"{QAT[1:]}/vendor"), errno.ENOTDIR),
        (lambda root: os.open(root / f"{QAT[1:]}/qat", os.O_WRONLY), errno.EISDIR),
        (lambda root: os.readlink(root / f"{QAT[1:]}/vendor"), errno.EINVAL),
    ],
)
def test_writes_rejected_by_sysfs_are_rejected(root: Path, call: object, code: int) -> None:
    assert callable(call)
    with pytest.raises(OSError) as caught:  # noqa: PT011 - the errno is looked at
        call(root)
    assert errno.errorcode[caught.value.errno] == errno.errorcode[code]


def test_files_have_the_modes_and_sizes_of_sysfs(root: Path) -> None:
    function = root / QAT[1:]
    status = os.stat(function / "vendor")
    assert (stat.filemode(status.st_mode), status.st_size) == ("-r--r--r--", 4096)
    assert stat.filemode(os.stat(root / "sys/bus/pci/drivers_probe").st_mode) == "--w-------"
    assert os.readlink(root / "sys/class/dlb2/dlb0") == "../../devices/pci0000:62/0000:62:00.0/dlb2/dlb0"
    assert set(os.listdir(function)) >= {"vendor", "qat", "driver", "iommu_group"}
    assert {entry.name: entry.is_symlink() for entry in os.scandir(function)}["driver"]
    assert (function / "vendor").read_text() == "0x8086\n"
    assert os.path.realpath(root / "sys/bus/dsa/devices/wq0.0") == str(
        root / "sys/devices/pci0000:60/0000:60:01.0/dsa0/wq0.0"
    )
    with open(function / "uevent") as file:
        assert file.readline() == "DRIVER=4xxx\n"
        file.seek(0)
        assert file.read().splitlines()[1] == "PCI_CLASS=B4000"
    os.truncate(function / "sriov_numvfs", 0)  # as the > of a shell; sysfs ignores it
    assert (function / "sriov_numvfs").read_text() == "0\n"
    assert os.statvfs(root / "sys").f_bsize == 4096


def test_reads_are_not_cached_and_removed_files_return_enodev(root: Path, kernel: Kernel) -> None:
    with open(root / f"{QAT[1:]}/qat/state", "rb", buffering=0) as file:
        assert file.read() == b"up\n"
        kernel.write(f"{QAT}/qat/state", "down")
        file.seek(0)
        assert file.read() == b"down\n"
        kernel.unplug("0000:61:00.0")
        file.seek(0)
        with pytest.raises(OSError, match="No such device"):
            file.read()
    assert not os.path.lexists(root / QAT[1:])


def test_injected_faults_apply_to_reads_and_writes(root: Path, kernel: Kernel) -> None:
    state = root / f"{QAT[1:]}/qat/state"
    kernel.fail(f"{QAT}/qat/state", errno.EIO, on="read", times=1)
    with pytest.raises(OSError, match="Input/output error"):
        state.read_text()
    assert state.read_text() == "up\n"
    kernel.set_content(f"{QAT}/qat/state", b"\xff\xfe\0")
    assert state.read_bytes() == b"\xff\xfe\0"
    kernel.clear_faults()
    kernel.hold("0000:61:00.0")
    with pytest.raises(OSError, match="Device or resource busy"):
        state.write_text("down")


def test_calls_of_blocked_attributes_wait_and_all_others_are_answered(root: Path, kernel: Kernel) -> None:
    state, other = root / f"{QAT[1:]}/qat/state", root / f"{QAT[1:]}/sriov_numvfs"
    kernel.block(f"{QAT}/qat/*")
    with ThreadPoolExecutor(1) as executor:
        reading = executor.submit(state.read_text)
        assert [other.read_text() for _ in range(20)] == ["0\n"] * 20
        assert not reading.done()
        kernel.write(f"{QAT}/qat/state", "down")
        kernel.unblock()
        other.read_text()
        assert reading.result() == "down\n"


def test_a_process_that_waits_for_a_blocked_attribute_can_be_killed(root: Path, kernel: Kernel) -> None:
    state = root / f"{QAT[1:]}/qat/state"
    kernel.block(f"{QAT}/qat/state")
    with subprocess.Popen(["cat", str(state)], stdout=subprocess.PIPE) as process:
        for _ in range(500):  # until it waits; without this name in other kernels, a while
            if Path(f"/proc/{process.pid}/wchan").read_text() == "request_wait_answer":
                break
            time.sleep(0.01)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    kernel.unblock()
    assert state.read_text() == "up\n"


def test_control_file_commands_call_the_methods(root: Path, kernel: Kernel) -> None:
    control = root / ".kernel/control"

    def do(description: str, **more: object) -> str:
        control.write_text(json.dumps({"do": description, **more}))
        return control.read_text().strip()

    assert do("hold", name="wq0.0") == "done"
    assert kernel.read("/sys/bus/dsa/devices/wq0.0/clients") == "1\n"
    assert do("release", name="wq0.0") == "done"
    assert do("fail", path=f"{QAT}/qat/state", errno="EIO", times=1) == "done"
    with pytest.raises(OSError, match="Input/output error"):
        kernel.write(f"{QAT}/qat/state", "up")
    assert do("set_content", path=f"{QAT}/qat/state", content="/wA=") == "done"
    assert kernel.read_bytes(f"{QAT}/qat/state") == b"\xff\0"
    assert do("clear_faults") == "done"
    assert do("qat", bdf="0000:61:00.0", healthy=False, starts=False) == "done"
    assert kernel.qat("0000:61:00.0").refuses_to_start
    assert do("plug", family="dlb", spec={"vfs": 1}) == "0000:66:00.0"
    assert do("unplug", bdf="0000:66:00.0") == "done"
    assert do("load", module="sgx") == do("unload", module="sgx") == do("udev", wait=True) == "done"
    for wrong, message in (
        ({"do": "dance"}, "Invalid value 'dance'"),
        ({"do": "hold", "name": "nobody"}, "no device, queue or node"),
        ({"do": "fail", "path": "/", "errno": "EWHAT"}, "unknown errno name"),
        ({"do": "plug", "family": "dsa", "spec": {"queues": 4}}, "Expected `array`"),
    ):
        with pytest.raises(OSError, match="Invalid argument"):
            control.write_text(json.dumps(wrong))
        assert message in control.read_text()


DLB_SCRIPT = """
set -e
pf=$(realpath "$(ls -d "$ROOT"/sys/bus/pci/drivers/dlb2/????:??:??.0 | head -n 1)")
[ -w "$pf/sriov_numvfs" ]
[ "$(cat "$pf/sriov_numvfs")" = 0 ] || exit 0
echo 1 > "$pf/sriov_numvfs"
vf=$(basename "$(realpath "$pf/virtfn0")")
printf %s "$vf" > "$ROOT/sys/bus/pci/drivers/dlb2/unbind"
for setting in sched_domains=32 ldb_queues=32 ldb_ports=4 dir_ports=8 ldb_credits=8192 dir_credits=2048 \
    atomic_inflights=2048 hist_list_entries=2048 sn0_slots=2 sn1_slots=2; do
  printf %s "${setting#*=}" > "$pf/vf0_resources/num_${setting%=*}"
done
printf %s "$vf" > "$ROOT/sys/bus/pci/drivers/dlb2/bind"
"""


def test_a_shell_script_gives_a_dlb_function_its_resources(root: Path) -> None:
    result = shell(root, DLB_SCRIPT)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(name for name in os.listdir(root / "dev") if name.startswith("dlb")) == ["dlb0", "dlb1"]
    assert (root / "sys/bus/pci/devices/0000:62:00.0/vf0_resources/num_ldb_credits").read_text() == "8192\n"
    assert shell(root, DLB_SCRIPT).returncode == 0  # existing VFs are unchanged


QAT_SCRIPT = """
for pf in "$ROOT"/sys/bus/pci/devices/*; do
  grep -q 0x4940 "$pf/device" || continue
  [ "$(cat "$pf/qat/state")" = up ] && echo down > "$pf/qat/state"
  echo "sym;asym" > "$pf/qat/cfg_services"
  cat "$pf/qat/cfg_services"
  cat "$pf/sriov_totalvfs" > "$pf/sriov_numvfs"
  for vf in "$pf"/virtfn*; do
    address=$(basename "$(realpath "$vf")")
    printf %s "$address" > "$(realpath "$vf/driver")/unbind"
    printf %s vfio-pci > "$vf/driver_override"
    printf %s "$address" > "$ROOT/sys/bus/pci/drivers/vfio-pci/bind"
  done
  cat "$pf/qat/state"
done
"""


def test_a_shell_script_sets_up_qat_as_the_init_containers_do(root: Path) -> None:
    result = shell(root, QAT_SCRIPT)
    assert (result.stdout, result.stderr) == ("asym;sym\nup\n", "")
    assert len(os.listdir(root / "dev/vfio")) == 16 + len(("devices", "vfio"))


IDXD_SCRIPT = """
set -e
bus=$ROOT/sys/bus/dsa
printf dsa0 > "$bus/devices/dsa0/driver/unbind"
wq=$bus/devices/dsa0/wq0.1
echo 0 > "$bus/devices/dsa0/engine0.0/group_id"
for setting in group_id=0 mode=shared size=16 threshold=15 priority=10 type=user name=app01 driver_name=user; do
  echo "${setting#*=}" > "$wq/${setting%%=*}"
done
printf dsa0 > "$bus/drivers/idxd/bind"
printf wq0.1 > "$bus/drivers/user/bind"
cat "$wq/state"
"""


def test_a_shell_script_sets_up_a_work_queue(root: Path) -> None:
    result = shell(root, IDXD_SCRIPT)
    assert (result.stdout, result.stderr) == ("enabled\n", "")
    assert os.listdir(root / "dev/dsa") == ["wq0.1"]
    links = [os.path.realpath(link) for link in (root / "dev/char").iterdir()]
    assert str(root / "dev/dsa/wq0.1") in links


def test_concurrent_readers_and_a_writer_all_get_responses(root: Path) -> None:
    problems: list[BaseException] = []

    def look() -> None:
        try:
            for _ in range(20):
                host = Host(root)
                assert host.text(f"{QAT}/sriov_numvfs") in ("0", "16")
                host.names("/sys/bus/pci/devices")
        except BaseException as error:  # noqa: BLE001 - told to the test
            problems.append(error)

    readers = [threading.Thread(target=look) for _ in range(4)]
    for reader in readers:
        reader.start()
    for number in ("16", "0", "16", "0"):
        Host(root).write(f"{QAT}/sriov_numvfs", number)
    for reader in readers:
        reader.join()
    assert problems == []


UNPRIVILEGED = """
import os, sys
from accelplane.simulate.kernel import Kernel
from accelplane.simulate.kernel.fuse import FuseUnavailable, serve_fuse
os.setuid(65534)
try:
    with serve_fuse(Kernel(), sys.argv[1]):
        pass
except FuseUnavailable as error:
    print(error)
"""


def test_a_failing_mount_reports_the_reason(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    result = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "Permission denied" in result.stdout or "needs root" in result.stdout


def test_failed_device_nodes_undo_the_mount(kernel: Kernel, root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "dev").mkdir(parents=True)
    (other / "dev/dlb0").touch()
    with pytest.raises(TreeError, match="already exists"), mount_at(Kernel(SPEC), other):
        pass
    assert str(other) not in Path("/proc/self/mounts").read_text()


COMMAND = """
set -e
[ "$(readlink /proc/self/ns/mnt)" != "$OUTSIDE" ]
mount -t tmpfs none /sys
mount -t tmpfs none /dev
mknod /dev/fuse c 10 229
mknod /dev/null c 1 3
mkdir -p /sys/kernel/debug
"$PYTHON" -m accelplane.simulate.kernel "$SPEC" --directory "$WHOLE" --numbers 1:3 --uevents &
until grep -q ready "$WHOLE/control" 2>/dev/null; do kill -0 $!; sleep 0.02; done
ls -d /sys/class/drm/card0 /dev/dri/card0 /sys/bus/pci/devices/0000:61:00.0/qat
echo 16 > /sys/bus/pci/devices/0000:61:00.0/sriov_numvfs
readlink /sys/bus/pci/devices/0000:61:00.0/virtfn0/driver
stat -c '%F %t:%T' /dev/dri/card0
echo '{"do": "plug", "family": "dsa", "spec": {"queues": [{}]}}' > "$WHOLE/control"
cat "$WHOLE/control"
until [ -e /sys/bus/pci/devices/0000:60:01.0/dsa0 ]; do sleep 0.02; done
stat -c %F /dev/dsa/wq0.0
kill $!
wait $!
! ls /sys/bus/pci/devices /dev/dri 2>/dev/null
"""


def test_the_command_mounts_an_emulated_node_over_the_real_paths(tmp_path: Path) -> None:
    if os.geteuid() or not os.path.exists("/dev/fuse"):
        pytest.skip("no root or no /dev/fuse")
    spec = tmp_path / "node.yaml"
    spec.write_text("gpus: [{}]\nqats: [{}]\n")
    (tmp_path / "whole").mkdir()
    outside = os.readlink("/proc/self/ns/mnt")
    result = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", COMMAND],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "SPEC": str(spec),
            "WHOLE": str(tmp_path / "whole"),
            "OUTSIDE": outside,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.stdout.splitlines()[3:] == [
        "../../../bus/pci/drivers/4xxxvf",
        "character special file 1:3",
        "0000:60:01.0",
        "character special file",
    ], result
    assert result.returncode == 0, result.stderr


def test_the_command_rejects_the_sysfs_of_the_host(tmp_path: Path) -> None:
    spec = tmp_path / "node.yaml"
    spec.write_text("{}")
    result = subprocess.run(
        [sys.executable, "-m", "accelplane.simulate.kernel", str(spec), "--directory", str(tmp_path / "whole")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1
    assert "/sys is that of the host" in result.stderr
