"""Uevents of the simulator, received by the agent's listener."""

import os
import shutil
import subprocess
import sys

import pytest

from accelplane.simulate.uevents import UeventError, uevent

SCRIPT = """
import select
from accelplane.host.uevent import UeventSocket
from accelplane.simulate.uevents import UeventError, uevent
listener = UeventSocket()
try:
    uevent("add", "/devices/pci0000:00/0000:00:02.0/drm/card0", "drm", DEVNAME="dri/card0")
except UeventError as error:
    print("refused:", error)
else:
    assert select.select([listener], [], [], 20)[0]
    (event,) = listener.read()
    print(event.action, event.devpath, event.subsystem, event.fields["DEVNAME"], "SEQNUM" in event.fields)
"""

IN_PODS = """
import ctypes, pathlib, select, subprocess
from accelplane.host.uevent import UeventSocket
from accelplane.simulate.uevents import uevent_everywhere
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
subprocess.run(["ip", "netns", "add", "pod"], check=True)
pathlib.Path("/run/netns/coming").touch()
listeners = [UeventSocket()]
libc = ctypes.CDLL(None)
with open("/proc/self/ns/net") as own, open("/run/netns/pod") as pod:
    assert libc.setns(pod.fileno(), 0) == 0
    listeners.append(UeventSocket())
    assert libc.setns(own.fileno(), 0) == 0
uevent_everywhere("add", "/devices/pci0000:00/0000:00:02.0", "pci")
for listener in listeners:
    assert select.select([listener], [], [], 20)[0]
    print(*(event.devpath for event in listener.read()))
"""


def own_namespace(*wrapper: str, script: str = SCRIPT) -> str:
    command = ["unshare", "--net", *wrapper, sys.executable, "-c", script]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if result.returncode and "Operation not permitted" in result.stderr:
        pytest.skip("needs root")
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_sent_uevent_is_received_like_a_kernel_uevent() -> None:
    assert own_namespace() == "add /devices/pci0000:00/0000:00:02.0/drm/card0 drm dri/card0 True\n"


@pytest.mark.skipif(not shutil.which("ip"), reason="makes a namespace with ip, of iproute2")
def test_a_uevent_is_received_in_the_namespaces_of_pods() -> None:
    received = own_namespace("unshare", "--mount", "--propagation=private", script=IN_PODS)
    assert received == "/devices/pci0000:00/0000:00:02.0\n" * 2


def test_a_missing_privilege_is_reported() -> None:
    answer = own_namespace("setpriv", "--inh-caps=-all", "--bounding-set=-all")
    assert answer.startswith("refused: add@/devices/pci0000:00/0000:00:02.0/drm/card0: Operation not permitted")


@pytest.mark.skipif(not os.path.exists("/proc/sys/net/core/netdev_max_backlog"), reason="already in another namespace")
def test_no_uevent_is_sent_in_the_initial_network_namespace() -> None:
    with pytest.raises(UeventError, match="unshare --net"):
        uevent("add", "/devices/x", "drm")


@pytest.mark.parametrize(
    ("action", "devpath", "fields", "message"),
    [
        ("", "/devices/x", {}, "expected an action such as add"),
        ("add", "devices/x", {}, "a path below /sys"),
        ("add", "/devices/x", {"A": "b\0C=d"}, "without zero bytes"),
        ("add", "/devices/x", {"A=B": "c"}, "expected KEY=value"),
        ("add", "/devices/x", {"A": "b" * 2048}, "expected at most 2048"),
    ],
)
def test_invalid_uevents_raise_an_error(action: str, devpath: str, fields: dict[str, str], message: str) -> None:
    with pytest.raises(UeventError, match=message):
        uevent(action, devpath, "drm", **fields)
