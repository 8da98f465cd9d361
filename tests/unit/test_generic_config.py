"""Options of the generic plugin: limits, and errors that name the option."""

import pytest

from accelplane.node.option_messages import option_message
from accelplane.plugins.generic import GenericConfig
from accelplane.plugins.generic.config import expand


def error_of(*groups: object, name: str = "thing", **options: object) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        GenericConfig.of({"devices": [{"name": name, "groups": groups}], **options})
    return option_message("plugins.generic", raised.value, GenericConfig)


PATH = {"paths": [{"path": "/dev/fuse"}]}


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ({}, "devices[0].groups[0]: found none of them, expected one of paths, usb, pci and rdma in a group"),
        (
            {**PATH, "usb": [{"vendor": "1a86"}]},
            "devices[0].groups[0]: found paths and usb, expected one of paths, usb, pci and rdma in a group",
        ),
        ({"paths": [{}]}, "devices[0].groups[0].paths[0]: Object missing required field `path`"),
        ({"paths": [{"path": "dev/fuse"}]}, "paths[0]: path: found 'dev/fuse', expected an absolute path below /"),
        ({"paths": [{"path": "/"}]}, "path: found '/', expected an absolute path below /"),
        ({"paths": [{"path": "/dev/../etc/shadow"}]}, "'/dev/../etc/shadow', expected a path without . and .."),
        (
            {"paths": [{"path": "/dev/a\n"}, {"path": "/dev/a\nb"}]},
            "paths[1]: path: found '/dev/a\\nb', expected a path",
        ),
        (
            {"paths": [{"path": "/a", "mountPath": "/../b"}]},
            "mountPath: found '/../b', expected a path without . and ..",
        ),
        ({"paths": [{"path": "/a", "mountPath": "b"}]}, "mountPath: found 'b', expected an absolute path"),
        ({"paths": [{"path": "/a", "permissions": "x"}]}, "permissions: "),
        ({"paths": [{"path": "/a", "type": "Pipe"}]}, "Invalid enum value 'Pipe'"),
        ({"paths": [{"path": "/a", "limit": -1}]}, "paths[0].limit: expected an integer >= 0"),
        ({"paths": [{"path": "/a", "optional": True}]}, "all are optional, expected one that is not"),
        ({"paths": [{"path": "/a", "mount-path": "/b"}]}, "paths[0]: found the unknown option 'mount-path'"),
        ({"paths": [{"path": f"/{'a' * 4096}"}]}, "paths[0].path: expected a string of length <= 4096"),
        ({**PATH, "count": 10_001}, "groups[0].count: expected an integer <= 10000"),
        ({"usb": [{"vendor": "0x1a86f"}]}, "usb[0].vendor: "),
        ({"usb": [{"vendor": 1209}]}, "usb[0].vendor: found an integer, expected a string"),
        ({"usb": [{"vendor": "1a86", "subsystems": ["../tty"]}]}, "subsystems: found '../tty', expected a name"),
        ({"pci": [{"vendor": "8086", "device": "1572", "addresses": ["3b:00.0"]}]}, "addresses: found '3b:00.0'"),
        ({**PATH, "env": {"A B": "c"}}, "env: found the name 'A B', expected letters, digits and _"),
        ({**PATH, "env": {"A": "{pathh}"}}, "env.A: found the placeholder {pathh}, expected one of {address}, {name}"),
        ({**PATH, "health": {"command": []}}, "health.command: "),
        ({**PATH, "health": {"command": ["test"]}}, "command: found the program 'test', expected an absolute path"),
        ({**PATH, "health": {"command": ["/a"], "timeoutSeconds": 61}}, "timeoutSeconds: expected an integer <= 60"),
        ({**PATH, "mounts": [{"path": "etc"}]}, "mounts[0]: path: found 'etc', expected an absolute path"),
    ],
)
def test_an_invalid_group_is_rejected_with_the_option(group: object, problem: str) -> None:
    assert problem in error_of(group)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"domain": "Example.com"}, "the part before the slash must be a lower-case DNS name"),
        ({"name": "a/b"}, "the part after the slash must have 1 to 63 characters"),
        ({"name": ""}, "the part after the slash must have 1 to 63 characters"),
        ({"domain": "kubernetes.io"}, "the prefix is reserved by Kubernetes"),
        ({"cdi": "some"}, "invalid value for cdi"),
        ({"cdi": "all", "domain": "9front.org"}, "domain: found '9front.org', expected a letter first"),
        ({"allocation-policy": "fair"}, "invalid value for allocation-policy"),
    ],
)
def test_invalid_names_and_choices_are_rejected(options: dict[str, str], problem: str) -> None:
    assert problem in error_of(PATH, **options)


def test_a_name_that_is_used_twice_is_rejected() -> None:
    with pytest.raises(ValueError, match="found the name 'a' twice, expected one entry with all groups"):
        GenericConfig.of({"devices": [{"name": "a", "groups": [PATH]}] * 2})


@pytest.mark.parametrize(("devices", "groups", "paths"), [(65, 1, 1), (1, 257, 1), (1, 1, 65)])
def test_the_number_of_entries_is_limited(devices: int, groups: int, paths: int) -> None:
    group = {"paths": [{"path": "/dev/fuse"}] * paths}
    with pytest.raises(ValueError, match="of length <="):
        GenericConfig.of({"devices": [{"name": f"a{number}", "groups": [group] * groups} for number in range(devices)]})


def test_braces_that_are_no_placeholders_stay_as_they_are() -> None:
    text = "${path} {} {1..3} {path}"
    assert expand(text, {"path": "/dev/a"}) == "${path} {} {1..3} /dev/a"
