"""CDI devices: the exact content of the file, and all validation rules."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from accelplane.devices import CdiDevice, CdiError, CdiHook, CdiMount, CdiNode
from accelplane.devices.cdi import document
from accelplane.node.publishers.cdi_directory import CdiDirectory

HOOK = CdiHook("createRuntime", "/bin/my-hook")


def written(device: CdiDevice, directory: Path) -> str:
    CdiDirectory(str(directory)).publish([device])
    return (directory / device.file_name).read_text()


def test_the_example_of_the_specification_is_written(tmp_path: Path) -> None:
    device = CdiDevice(kind="intel.com/foo", name="dev1", hooks=[HOOK])
    assert written(device, tmp_path) == (
        "---\n"
        "cdiVersion: 0.5.0\n"
        "containerEdits: {}\n"
        "devices:\n"
        "- containerEdits:\n"
        "    hooks:\n"
        "    - hookName: createRuntime\n"
        "      path: /bin/my-hook\n"
        "  name: dev1\n"
        "kind: intel.com/foo\n"
    )


def test_a_document_has_all_fields_with_keys_in_alphabetical_order(tmp_path: Path) -> None:
    device = CdiDevice(
        kind="intel.cdi.k8s.io/gpu",
        name="card0",
        nodes=[CdiNode("/dev/dri/card0", "/host/dev/dri/card0"), CdiNode("/dev/x", "/dev/x", "rwm")],
        mounts=[CdiMount("efivarfs", "/run/efivars", "efivarfs", ["rw", "nosuid"]), CdiMount("/a", "/b")],
        hooks=[CdiHook("prestart", "/bin/h", ["h", "--x"], ["A=b"], 0)],
        env=["A=1", "yes=no"],
    )
    assert written(device, tmp_path) == (
        "---\n"
        "cdiVersion: 0.5.0\n"
        "containerEdits: {}\n"
        "devices:\n"
        "- containerEdits:\n"
        "    deviceNodes:\n"
        "    - hostPath: /host/dev/dri/card0\n"
        "      path: /dev/dri/card0\n"
        "      permissions: rw\n"
        "    - hostPath: /dev/x\n"
        "      path: /dev/x\n"
        "      permissions: rwm\n"
        "    env:\n"
        "    - A=1\n"
        "    - yes=no\n"
        "    hooks:\n"
        "    - args:\n"
        "      - h\n"
        "      - --x\n"
        "      env:\n"
        "      - A=b\n"
        "      hookName: prestart\n"
        "      path: /bin/h\n"
        "      timeout: 0\n"
        "    mounts:\n"
        "    - containerPath: /run/efivars\n"
        "      hostPath: efivarfs\n"
        "      options:\n"
        "      - rw\n"
        "      - nosuid\n"
        "      type: efivarfs\n"
        "    - containerPath: /b\n"
        "      hostPath: /a\n"
        "  name: card0\n"
        "kind: intel.cdi.k8s.io/gpu\n"
    )


def test_strings_that_resemble_other_yaml_types_stay_strings(tmp_path: Path) -> None:
    text = written(CdiDevice(kind="a/b", name="0", env=["A=ü\n\0", "B=: #"]), tmp_path)
    assert "  name: '0'\n" in text
    assert '"A=\\xFC\\n\\0"' in text
    assert "- 'B=: #'" in text


def test_cdi_names_are_qualified_and_file_names_are_valid() -> None:
    device = CdiDevice(kind="intel.cdi.k8s.io/gpu", name="card0", env=["A=b"])
    assert device.qualified_name == "intel.cdi.k8s.io/gpu=card0"
    assert device.file_name == "intel.cdi.k8s.io-gpu-card0.yaml"


def test_only_hooks_and_mounts_of_other_file_systems_are_indispensable() -> None:
    assert CdiDevice(kind="a/b", name="c", hooks=[HOOK]).indispensable
    assert CdiDevice(kind="a/b", name="c", mounts=[CdiMount("efivarfs", "/run/efivars", "efivarfs")]).indispensable
    assert not CdiDevice(kind="a/b", name="c", mounts=[CdiMount("/etc", "/etc", "none", ["bind"])]).indispensable
    assert not CdiDevice(kind="a/b", name="c", nodes=[CdiNode("/dev/x", "/dev/x")]).indispensable


def test_lists_and_tuples_make_equal_devices() -> None:
    assert CdiDevice(kind="a/b", name="c", env=["A=b"], hooks=[HOOK]) == CdiDevice(
        kind="a/b", name="c", env=("A=b",), hooks=(CdiHook("createRuntime", "/bin/my-hook", [], []),)
    )
    assert CdiMount("/a", "/b", options=["ro"]) == CdiMount("/a", "/b", options=("ro",))


@pytest.mark.parametrize("kind", ["a/b", "intel.cdi.k8s.io/gpu", "A0_-.9/c-_9", "nvidia.com/gpu"])
def test_valid_kinds_are_accepted(kind: str) -> None:
    CdiDevice(kind=kind, name="x", env=["A=b"]).check()


@pytest.mark.parametrize("name", ["0", "a", "card0", "a_b-c.d:e", "0000:3d:00.0"])
def test_valid_names_are_accepted(name: str) -> None:
    CdiDevice(kind="a/b", name=name, env=["A=b"]).check()


INVALID = [
    *((CdiDevice(kind=kind, name="x", env=["A=b"]), "expected vendor/class") for kind in
      ("", "a", "/b", "a/", "0a/b", "a-/b", "a/b/c", "a/-b", "a b/c", "a/b\n", "ä/b", "a=b/c")),
    (CdiDevice(kind="a/b.c", name="x", env=["A=b"]), "found a dot in the class, which needs CDI 0.6.0"),
    *((CdiDevice(kind="a/b", name=name, env=["A=b"]), "alphanumeric at both ends") for name in
      ("", "-a", "a-", "a/b", "../x", "a b", "a\n", "ä", "\udcff", "a\0")),
    (CdiDevice(kind="a/b", name="x"), "a/b=x has no container edits"),
    *((CdiDevice(kind="a/b", name="x", env=[entry]), "expected NAME=value") for entry in ("", "A", "=b")),
    (CdiDevice(kind="a/b", name="x", env=["A=\udcff"]), r"'A=\\udcff' is not UTF-8 text"),
    (CdiDevice(kind="a/b", name="x", nodes=[CdiNode("", "/dev/x")]), "a device node has an empty path"),
    (CdiDevice(kind="a/b", name="x", nodes=[CdiNode("/x", "/x", "rwx")]), "permissions are 'rwx', expected letters"),
    (CdiDevice(kind="a/b", name="x", nodes=[CdiNode("/x", "/\udcff")]), "is not UTF-8 text"),
    (CdiDevice(kind="a/b", name="x", mounts=[CdiMount("", "/b")]), "expected two paths"),
    (CdiDevice(kind="a/b", name="x", mounts=[CdiMount("/a", "")]), "expected two paths"),
    (CdiDevice(kind="a/b", name="x", mounts=[CdiMount("/a", "/b", options=["\udcff"])]), "is not UTF-8 text"),
    (CdiDevice(kind="a/b", name="x", hooks=[CdiHook("poststart ", "/b")]), "expected one of createContainer"),
    (CdiDevice(kind="a/b", name="x", hooks=[CdiHook("poststop", "")]), "hook poststop has an empty path"),
    (CdiDevice(kind="a/b", name="x", hooks=[CdiHook("poststop", "/b", ["\udcff"])]), "is not UTF-8 text"),
]  # fmt: skip


@pytest.mark.parametrize(("device", "why"), INVALID)
def test_an_invalid_device_is_rejected_with_the_rule_and_not_written(
    device: CdiDevice, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CdiError, match=why) as caught:
        device.check()
    assert str(caught.value).isprintable()
    CdiDirectory(str(tmp_path)).publish([device])
    assert list(tmp_path.iterdir()) == []
    assert caplog.messages == [f"not written: {caught.value}"]


def test_every_hook_name_of_the_specification_is_valid() -> None:
    for name in ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop"):
        CdiDevice(kind="a/b", name="x", hooks=[CdiHook(name, "/b")]).check()


def test_errors_name_the_device() -> None:
    with pytest.raises(CdiError, match=re.escape("CDI device a/b=x: ")):
        CdiDevice(kind="a/b", name="x", env=["A"]).check()


def test_a_file_has_several_devices_and_nodes_with_type_and_numbers() -> None:
    node = CdiNode("/dev/dri/card0", "/dev/dri/card0", "rw", "c", 226, 0)
    devices = [CdiDevice(kind="k8s.gpu.intel.com/claim", name=name, nodes=[node]) for name in ("a-card0", "a-card1")]
    content = json.loads(msgspec.json.encode(document(devices)))
    assert content["kind"] == "k8s.gpu.intel.com/claim"
    assert content["devices"] == [
        {
            "containerEdits": {
                "deviceNodes": [
                    {
                        "hostPath": "/dev/dri/card0", "major": 226, "minor": 0, "path": "/dev/dri/card0",
                        "permissions": "rw", "type": "c",
                    }
                ]
            },
            "name": name,
        }
        for name in ("a-card0", "a-card1")
    ]  # fmt: skip


@pytest.mark.parametrize(
    "devices",
    [
        [],
        [CdiDevice(kind="a/b", name="x", env=["A=1"]), CdiDevice(kind="a/c", name="y", env=["A=1"])],
        [CdiDevice(kind="a/b", name="x", env=["A=1"]), CdiDevice(kind="a/b", name="x", env=["A=2"])],
    ],
    ids=["none", "two kinds", "equal names"],
)
def test_a_file_needs_devices_of_one_kind_with_different_names(devices: list[CdiDevice]) -> None:
    with pytest.raises(CdiError, match="expected devices of one kind with different names"):
        document(devices)


@pytest.mark.parametrize("fields", [{"type": "c"}, {"major": 1, "minor": 2}, {"type": "b", "major": -1, "minor": 0}])
def test_a_node_has_type_and_numbers_or_none_of_them(fields: dict[str, Any]) -> None:
    device = CdiDevice(kind="a/b", name="x", nodes=[CdiNode("/dev/x", "/dev/x", **fields)])
    with pytest.raises(CdiError, match="device node /dev/x: expected type, major and minor"):
        document([device])
