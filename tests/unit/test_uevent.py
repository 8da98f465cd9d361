"""Uevents: the parser with any bytes, and the listener with uevents of the kernel, of other senders, and overflow."""

import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.host.uevent import Uevent, parse_uevent

WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="=@"), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("message", "event"),
    [
        (
            b"add@/devices/pci0000:00/0000:00:02.0/drm/card0\0ACTION=add\0SUBSYSTEM=drm\0DEVNAME=dri/card0\0",
            Uevent(
                "add",
                "/devices/pci0000:00/0000:00:02.0/drm/card0",
                "drm",
                {"ACTION": "add", "SUBSYSTEM": "drm", "DEVNAME": "dri/card0"},
            ),
        ),
        (b"remove@/x", Uevent("remove", "/x", "", {})),
        (b"change@/a@b\0K=v=w\0\0junk\0", Uevent("change", "/a@b", "", {"K": "v=w"})),
        (b"add@/\xff\0SUBSYSTEM=\xff", Uevent("add", "/\ufffd", "\ufffd", {"SUBSYSTEM": "\ufffd"})),
        (b"", None),
        (b"\0\0", None),
        (b"add", None),
        (b"add@", None),
        (b"@/devices/x", None),
        (b"add@devices/x", None),
        (b"a dd@/x", None),
        (b"add1@/x", None),
        (b"libudev\0\xfe\xed\xca\xfe\0add@/x", None),
    ],
)
def test_uevents_are_distinguished_from_other_messages(message: bytes, event: Uevent | None) -> None:
    assert parse_uevent(message) == event


@given(WORDS.filter(str.isalpha), WORDS, st.dictionaries(WORDS, WORDS))
def test_attributes_of_the_kernel_are_parsed(action: str, path: str, fields: dict[str, str]) -> None:
    message = "\0".join((f"{action}@/{path}", *(f"{key}={value}" for key, value in fields.items()), "")).encode()
    assert parse_uevent(message) == Uevent(action, f"/{path}", fields.get("SUBSYSTEM", ""), fields)


@given(st.binary(max_size=200) | st.binary(max_size=100).map(b"add@/x".__add__))
def test_any_bytes_are_parsed_as_a_uevent_or_ignored(message: bytes) -> None:
    event = parse_uevent(message)
    assert event is None or (event.devpath.startswith("/") and event.action.isalpha())


LISTEN = """
import os, select, socket
from accelplane.host.uevent import UeventSocket
def kernel(action):
    with open("/sys/devices/virtual/mem/null/uevent", "w") as file:
        file.write(action)
def waiting():
    assert select.select([listener], [], [], 20)[0]
    return list(listener.read())
listener = UeventSocket()
"""

needs_namespace = pytest.mark.skipif(
    not shutil.which("unshare")
    or subprocess.run(
        ["unshare", "--net", "test", "-w", "/sys/devices/virtual/mem/null/uevent"], check=False, capture_output=True
    ).returncode
    != 0,
    reason="needs root and a kernel that takes uevents from sysfs",
)


def in_own_namespace(script: str) -> list[str]:
    command = ["unshare", "--net", sys.executable, "-c", LISTEN + script]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@needs_namespace
def test_uevents_of_the_kernel_are_received() -> None:
    assert in_own_namespace(
        """
kernel("change")
for event in waiting():
    print(event.action, event.devpath, event.subsystem, event.fields["DEVNAME"])
print(list(listener.read()))
listener.close()
"""
    ) == ["change /devices/virtual/mem/null mem null", "[]"]


@needs_namespace
def test_uevents_of_other_senders_are_ignored() -> None:
    assert in_own_namespace(
        """
stranger = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15)
stranger.sendto(b"add@/devices/forged\\0SUBSYSTEM=drm\\0", (0, 1))
kernel("change")
events = []
while not any(event.devpath.endswith("null") for event in events):
    events += waiting()
print([event.devpath for event in events])
"""
    ) == ["['/devices/virtual/mem/null']"]


@needs_namespace
def test_lost_uevents_are_reported_and_reading_continues() -> None:
    assert in_own_namespace(
        """
stranger = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 15)
stranger.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
for number in range(20_000):
    stranger.sendto(b"x" * 2000, (0, 1))
kernel("add")
events = []
while select.select([listener], [], [], 0)[0]:
    events += listener.read()
print({event.action for event in events})
kernel("remove")
print([event.action for event in waiting()])
"""
    ) == ["{'overflow'}", "['remove']"]


@needs_namespace
def test_the_number_of_uevents_per_read_is_limited_by_the_caller() -> None:
    assert in_own_namespace(
        """
for number in range(5):
    kernel("change")
assert select.select([listener], [], [], 20)[0]
print(len(list(listener.read(3))), len(list(listener.read(3))))
"""
    ) == ["3 2"]
