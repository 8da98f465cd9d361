"""Cgroup paths, mounts and fdinfo of processes, and messages, including hostile ones."""

import contextlib

import msgspec
import pytest
from drmclients import ID, POD, STATIC_POD, cgroup, i915, mountinfo, xe
from hypothesis import given
from hypothesis import strategies as st

from accelplane.gpuclients.cgroup import ContainerCgroup, container_cgroup
from accelplane.gpuclients.fdinfo import Cycles, parse_fdinfo
from accelplane.gpuclients.messages import (
    MAX_BYTES,
    ContainerUse,
    DeviceUse,
    MessageError,
    Report,
    Request,
    decode,
    encode,
    encode_report,
)
from accelplane.gpuclients.mountinfo import container_name

UNDERSCORES = POD.replace("-", "_")
INNER = "22222222-2222-2222-2222-222222222222"


@pytest.mark.parametrize(
    ("text", "pod", "container"),
    [
        (cgroup(), POD, ID),
        (f"0::/kubepods.slice/kubepods-pod{UNDERSCORES}.slice/crio-{ID}.scope\n", POD, ID),
        (f"0::/kubepods.slice/kubepods-pod{UNDERSCORES}.slice/crio-{ID}.scope/container\n", POD, ID),
        (f"0::/kubepods.slice/kubepods-pod{UNDERSCORES}.slice/crio-conmon-{ID}.scope\n", POD, ""),
        (f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{STATIC_POD}.slice\n", STATIC_POD, ""),
        (f"0::/kubepods/burstable/pod{POD}/{ID}\n", POD, ID),
        (f"0::/kubepods/pod{STATIC_POD}/{ID}\n", STATIC_POD, ID),
        # cgroup v1: any controller
        (f"9:name=systemd:/\n4:memory:/kubepods/besteffort/pod{POD}/{ID}\n3:cpuset:/\n0::/\n", POD, ID),
        (f"4:cpu,cpuacct:/kubepods/besteffort/pod{POD}/{ID}\n", POD, ID),
        # outside of the reader's cgroup namespace
        (f"0::/../../kubepods-burstable-pod{UNDERSCORES}.slice/cri-containerd-{ID}.scope\n", POD, ID),
        (f"0::/../../../besteffort/pod{POD}/{ID}\n", POD, ID),
        # containerd with the cgroupfs driver on a host with systemd
        (f"1:x:/system.slice/containerd.service/kubepods-pod{UNDERSCORES}.slice:cri-containerd:{ID}\n", POD, ID),
        # kind, and a parent cgroup
        (f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{UNDERSCORES}.slice/{ID}\n", POD, ID),
        (f"0::/node.slice/node-kubepods-burstable-pod{UNDERSCORES}.slice/cri-containerd-{ID}.scope\n", POD, ID),
        # a kubelet in a pod: the last match
        (f"0::/kubepods/pod{POD}/{ID}/kubepods/pod{INNER}/{'cd' * 32}\n", INNER, "cd" * 32),
    ],
)
def test_a_cgroup_names_pod_and_container(text: str, pod: str, container: str) -> None:
    assert container_cgroup(text) == ContainerCgroup(pod, container)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0::/\n",
        "0::/system.slice/containerd.service\n",
        f"0::/kubepods/podpod{POD}/{ID}\n",
        f"0::/kubepods/pod{POD}x/{ID}\n",
        f"0::/kubepods/pod{POD[:-1]}/{ID}\n",
        f"0::/kubepods/pod{POD.upper()}/{ID}\n",
        f"0::/kubepods/pod{UNDERSCORES[:10]}{POD[10:]}/{ID}\n",  # both separators
        f"0::/kubepods/pod\n{POD}/{ID}\n",
        f"0::/user.slice/pod{POD}/{ID}\n",  # not below kubepods
        f"0::kubepods/pod{POD}/{ID}\n",  # not a path
        f"/kubepods/pod{POD}/{ID}\n",  # not a line of /proc/<pid>/cgroup
        f"0::{'/x' * 100}/kubepods/pod{POD}/{ID}\n",
    ],
)
def test_other_cgroups_name_no_pod(text: str) -> None:
    assert container_cgroup(text) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (mountinfo(), "main"),
        # the kubelet's directory is a file system of its own
        (f"1 2 8:1 /pods/{POD}/containers/a-1/0a /dev/termination-log rw - ext4 /dev/x rw\n", "a-1"),
        (mountinfo("11111111-2222-3333-4444-555555555555"), ""),  # another pod's file
        (f"1 2 8:1 /pods/{POD}/containers/../0a /x rw - ext4 /dev/x rw\n", ""),
        (f"1 2 8:1 /pods/{POD}/containers/A/0a /x rw - ext4 /dev/x rw\n", ""),
        (f"1 2 8:1 /pods/{POD}/containers/{'a' * 64}/0a /x rw - ext4 /dev/x rw\n", ""),
        (f"1 2 8:1 / /pods/{POD}/containers/a/0a rw - ext4 /dev/x rw\n", ""),  # a mount point, not a source
        ("1 2 3\n\n", ""),
    ],
)
def test_the_termination_log_names_the_container(text: str, name: str) -> None:
    assert container_name(text, POD) == name


def test_a_file_of_i915_has_busy_nanoseconds_and_memory() -> None:
    client = parse_fdinfo(i915(7, render=5_000_000_000, copy=12, memory=1024))
    assert client is not None
    assert (client.bdf, client.id, client.driver) == ("0000:03:00.0", 7, "i915")
    assert client.busy == {"render": 5_000_000_000, "copy": 12, "video": 0}
    assert client.capacity == {"video": 2}
    assert client.memory["local0"] == {"resident": 1024**2, "total": 2 * 1024**2, "shared": 0}
    assert client.cycles == {}


def test_a_file_of_xe_has_cycles_and_memory() -> None:
    client = parse_fdinfo(xe(9, used=100, total=1000, capacity=4))
    assert client is not None
    assert client.cycles == {"ccs": Cycles(100, 1000)}
    assert (client.busy, client.capacity) == ({}, {"ccs": 4})
    assert client.memory == {"vram0": {"resident": 4 * 1024**2, "total": 8 * 1024**2, "shared": 4096}}


def test_the_old_name_of_resident_memory_is_not_added_to_the_new_one() -> None:
    head = "drm-driver:\ti915\ndrm-client-id:\t1\ndrm-pdev:\t0000:03:00.0\n"
    both = parse_fdinfo(f"{head}drm-memory-local0:\t8 KiB\ndrm-resident-local0:\t8 KiB\n")
    old = parse_fdinfo(f"{head}drm-memory-local0:\t8 KiB\n")
    assert both is not None
    assert old is not None
    assert both.memory == old.memory == {"local0": {"resident": 8192}}


@pytest.mark.parametrize(
    ("found", "written"),
    [
        ("drm-driver:\ti915", "drm-driver:\tI915"),
        ("drm-pdev:\t0000:03:00.0", "drm-pdev:\t0000:03:00.8"),
        ("drm-pdev:\t0000:03:00.0", 'drm-pdev:\t"}'),
        ("drm-client-id:\t7", "drm-client-id:\t-1"),
        ("drm-client-id:\t7", ""),
        ("drm-driver:", "driver:"),
    ],
)
def test_a_file_without_driver_device_or_client_is_no_client(found: str, written: str) -> None:
    assert parse_fdinfo(i915(7)) is not None
    assert parse_fdinfo(i915(7).replace(found, written)) is None


@pytest.mark.parametrize("value", ["-1 ns", "1e9 ns", "12 34 ns", "1", "1 KiB", "٣ ns", "9" * 21 + " ns", "nan ns"])
def test_an_invalid_value_is_omitted(value: str) -> None:
    client = parse_fdinfo(i915(render=5).replace("drm-engine-render:\t5 ns", f"drm-engine-render:\t{value}"))
    assert client is not None
    assert client.busy == {"copy": 0, "video": 0}


@pytest.mark.parametrize("name", ['a"}', "A", "a b", "x" * 33, "", "é"])
def test_an_engine_with_a_hostile_name_is_omitted(name: str) -> None:
    client = parse_fdinfo(i915() + f"drm-engine-{name}:\t5 ns\ndrm-resident-{name}:\t5\n")
    assert client is not None
    assert client.busy.keys() == {"render", "copy", "video"}
    assert client.memory.keys() == {"local0", "system0"}


def test_the_number_of_engines_and_regions_is_limited() -> None:
    names = [f"e{number}" for number in range(100)]
    lines = "".join(f"drm-engine-{name}:\t1 ns\ndrm-total-{name}:\t1\ndrm-shared-{name}:\t1\n" for name in names)
    client = parse_fdinfo(i915() + lines)
    assert client is not None
    assert len(client.busy) == 16
    assert len(client.memory) == 16


_PIECES = st.sampled_from(
    [
        *("drm-", "engine-", "cycles-", "total-", "capacity-", "resident-", "memory-", "render", "vram0", ":\t", " ns"),
        *(
            "0",
            "17",
            " KiB",
            "\n",
            "/kubepods",
            "/pod",
            POD,
            UNDERSCORES,
            ".slice",
            "/..",
            "0::",
            "cri-containerd-",
            ID,
        ),
        *(".scope", "/containers/", "/pods/", "main", " ", "-"),
    ]
)


@given(st.lists(_PIECES | st.text(max_size=5), max_size=40).map("".join))
def test_any_text_is_parsed_or_rejected(text: str) -> None:
    found = container_cgroup(text)
    if found is not None:
        assert found.pod in text.replace("_", "-")
        msgspec.convert([found.pod], type=tuple[str, ...])
        encode(Request((found.pod,)))
    name = container_name(text, POD)
    assert name in text
    head = "drm-driver:\txe\ndrm-client-id:\t1\ndrm-pdev:\t0000:03:00.0\n"
    client = parse_fdinfo(head + text)
    assert client is None or all(value >= 0 for value in client.busy.values())
    parse_fdinfo(text)


# Messages.

USE = ContainerUse(
    pod=POD,
    name="main",
    devices=(
        DeviceUse(
            bdf="0000:03:00.0",
            driver="i915",
            clients=2,
            busy_seconds={"video-enhance": 1.5},
            memory_bytes={"local0": {"resident": 2**60}},
        ),
    ),
)


def test_messages_are_decoded_as_they_were_encoded() -> None:
    for message in (Request((POD, STATIC_POD)), Report(containers=(USE,), incomplete=True, processes=3)):
        encoded = encode(message)
        assert int.from_bytes(encoded[:4], "big") == len(encoded) - 4
        assert decode(encoded[4:], type(message)) == message


def test_a_report_that_is_too_long_is_shortened_and_incomplete() -> None:
    encoded = encode_report(Report(containers=(USE,) * 4000))
    assert len(encoded) <= MAX_BYTES + 4
    report = decode(encoded[4:], Report)
    assert report.incomplete
    assert 1000 <= len(report.containers) < 4000


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (Request, b""),
        (Request, b"{}"),
        (Request, b'{"pods": 3}'),
        (Request, b'{"pods": ["../../etc"]}'),
        (Request, b'{"pods": [' + b",".join([b'"%s"' % POD.encode()] * 1025) + b"]}"),
        (Request, b"[" * 100_000),
        (Report, b'{"containers": [{"pod": "x"}]}'),
        (Report, b'{"containers": [], "processes": -1}'),
        (Report, b"\xff"),
        (Report, encode(Report(containers=(USE,)))[4:].replace(b"video-enhance", b'x\\"}')),
        (Report, encode(Report(containers=(USE,)))[4:].replace(b'"main"', b'"a\\nb"')),
        (Report, encode(Report(containers=(USE,)))[4:].replace(b"1.5", b"-1")),
        (Report, encode(Report(containers=(USE,)))[4:].replace(b"1.5", b"1e999")),
        (Report, encode(Report(containers=(USE,)))[4:].replace(b"03:00.0", b"03:00.9")),
    ],
)
def test_an_invalid_message_is_rejected(kind: type[Request], content: bytes) -> None:
    with pytest.raises(MessageError):
        decode(content, kind)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_rejected(content: bytes) -> None:
    for kind in (Request, Report):
        with contextlib.suppress(MessageError):
            assert decode(content, kind) is not None
