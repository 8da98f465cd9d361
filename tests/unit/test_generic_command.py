"""The flags, variables and file of `generic-device-plugin`."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from generictrees import digest, usb
from trees import write

from accelplane.cli import genericplugin
from accelplane.plugins.generic.config import DeviceSpec

pytestmark = pytest.mark.memory

FUSE = '{"name": "fuse", "groups": [{"count": 2, "paths": [{"path": "/dev/fuse"}]}]}'
SERIAL = "name: serial\ngroups:\n  - paths:\n      - path: /dev/ttyUSB*\n  - paths:\n      - path: /dev/ttyACM*\n"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No variables and files of the machine, and the logging of before."""
    for name in ("DOMAIN", "LISTEN", "LOG_LEVEL", "PLUGIN_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.disable(logging.NOTSET)


@pytest.fixture
def node(tmp_path: Path) -> Path:
    root = tmp_path / "node"
    for name in ("fuse", "ttyUSB0", "ttyACM0", "ttyS0"):
        write(root / "dev" / name, "")
    return root


def resources(capsys: pytest.CaptureFixture[str], node: Path, *arguments: str) -> dict[str, Any]:
    """The devices by ID of each resource, from `--once`."""
    code = genericplugin.main([*arguments, "--root", str(node), "--once"])
    output, errors = capsys.readouterr()
    assert code == 0, errors
    return json.loads(output)["generic"]["resources"]


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert genericplugin.main([*arguments, "--once"]) == 1
    return capsys.readouterr().err.strip()


def counts(found: dict[str, Any]) -> dict[str, int]:
    return {name: len(devices) for name, devices in found.items()}


def test_each_flag_is_a_resource_in_json_or_yaml(capsys: pytest.CaptureFixture[str], node: Path) -> None:
    found = resources(capsys, node, "--device", FUSE, f"--device={SERIAL}")
    assert counts(found) == {"squat.ai/fuse": 2, "squat.ai/serial": 2}
    assert digest("0/dev/ttyUSB0") in found["squat.ai/serial"]


def test_the_domain_is_that_of_the_flag_the_variable_the_file_or_the_default(
    capsys: pytest.CaptureFixture[str], node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path / "config.yaml", f"domain: file.example\ndevices: [{FUSE}]\n")
    given = ("--config", str(config))
    assert counts(resources(capsys, node, *given)) == {"file.example/fuse": 2}
    monkeypatch.setenv("DOMAIN", "variable.example")
    assert counts(resources(capsys, node, *given)) == {"variable.example/fuse": 2}
    assert counts(resources(capsys, node, *given, "--domain", "flag.example")) == {"flag.example/fuse": 2}


@pytest.mark.parametrize("key", ["device", "devices", "Devices"])
def test_a_file_in_the_working_directory_is_read(capsys: pytest.CaptureFixture[str], node: Path, key: str) -> None:
    Path("config.yaml").write_text(f"{key}: [{FUSE}]\nlog-level: debug\n")
    assert counts(resources(capsys, node)) == {"squat.ai/fuse": 2}


def test_devices_of_flags_replace_those_of_the_file(capsys: pytest.CaptureFixture[str], node: Path) -> None:
    Path("config.yaml").write_text(f"devices: [{FUSE}]\n")
    assert counts(resources(capsys, node, "--device", SERIAL)) == {"squat.ai/serial": 2}


def test_options_of_the_plugin_and_of_the_agent_are_flags_too(capsys: pytest.CaptureFixture[str], node: Path) -> None:
    found = resources(capsys, node, "--device", FUSE, "--cdi=all", "-allocation-policy", "packed", "-v=2")
    assert found["squat.ai/fuse"][digest("0/dev/fuse")]["cdi"]["kind"] == "squat.ai/generic"


def test_usb_ids_without_quotes_are_hexadecimal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    usb(tmp_path, "1-1", "1209:4617", serial="A")
    device = "{name: sdr, groups: [{usb: [{vendor: 1209, product: 4617, serial: A}]}]}"
    assert counts(resources(capsys, tmp_path, "--device", device)) == {"squat.ai/sdr": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "at least one device must be specified, by -device or in the file of -config"),
        (("--device", "{"), "-device[0]: not YAML: "),
        (("--device", FUSE, "--device", "name: a"), "-device[1]: Object missing required field `groups`"),
        (("--device", "[]"), "-device[0]: found a list, expected a mapping"),
        (
            ("--device", "{name: a, groups: [{usb: [{vendor: 0403}]}]}"),
            "-device[0].groups[0].usb[0].vendor: found an integer, expected a string",
        ),
        (("--device", f"name: {'x' * 65536}"), "-device[0]: found 65542 characters, expected at most 65536"),
        (("--device", FUSE, "--domain", "Squat"), "the part before the slash must be a lower-case DNS name"),
        (("--device", FUSE, "--log-level", "loud"), "-log-level: found 'loud', expected one of all, debug, info, warn"),
        (
            ("--device", FUSE, "--plugin-directory", "/var/lib/plugins"),
            "-plugin-directory: found '/var/lib/plugins', expected an absolute path that ends with /device-plugins",
        ),
        (("--device", FUSE, "--cdi", "some"), "invalid value for cdi, valid values: auto, all, only, off"),
        (("--config", "/no/file"), "/no/file: No such file or directory, expected the YAML file of --config"),
    ],
)
def test_errors_name_the_flag(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    found = error(capsys, *arguments)
    assert message in found
    assert found.startswith("generic-device-plugin: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("devices: fuse", "devices: found 'fuse', expected a list"),
        ("- a", "config.yaml: found a list, expected a mapping"),
        ("devices: [", "config.yaml: not YAML: "),
        ("domain: [a]", "config.yaml: domain: found ['a'], expected a string"),
        ("devices: [{name: a, groups: [{paths: [{path: dev}]}]}]", "devices[0].groups[0].paths[0]: path: found 'dev'"),
    ],
)
def test_errors_of_the_file_name_the_option(capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    Path("config.yaml").write_text(text)
    assert message in error(capsys)


def test_fields_are_decoded_as_by_go(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "NAME": " serial ",
        "count": 3,
        "comment": "of the original's help",
        "Groups": [
            {"Paths": [{"Path": "/dev/a", "mountpath": "/dev/b", "limit": None, "colour": 1}], "usb": None},
            {"usbs": [{"vendor": 1234, "product": "000F"}], "count": 2, "health": {"Command": ["/a"]}},
        ],
    }
    assert genericplugin.compatible(given, DeviceSpec, "-device[0]") == {
        "name": "serial",
        "groups": [
            {"count": 3, "paths": [{"path": "/dev/a", "mountPath": "/dev/b"}]},
            {"usb": [{"vendor": "1234", "product": "000F"}], "count": 2, "health": {"command": ["/a"]}},
        ],
    }
    assert [record.getMessage().partition(", expected")[0] for record in caplog.records] == [
        "-device[0]: ignored the unknown field 'comment'",
        "-device[0].groups[0].paths[0]: ignored the unknown field 'colour'",
    ]


@pytest.mark.parametrize(
    ("level", "shown"),
    [("all", "diwe"), ("debug", "diwe"), ("info", "iwe"), ("warn", "we"), ("error", "e"), ("none", "")],
)
def test_log_levels_are_those_of_the_original(
    capsys: pytest.CaptureFixture[str], node: Path, level: str, shown: str
) -> None:
    resources(capsys, node, "--device", FUSE, "--log-level", level)
    for letter, number in (("d", 16), ("i", 20), ("w", 30), ("e", 40)):
        logging.getLogger("accelplane").log(number, letter)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert "".join(line["msg"] for line in lines) == shown
