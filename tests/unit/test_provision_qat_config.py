"""Configuration of QAT provisioning: files and environment."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.provision.config import ConfigError
from accelplane.provision.qat import DEFAULT_PF_IDS, SERVICES, QatConfig, parse, read_config


@pytest.mark.parametrize(
    ("text", "services", "auto_reset"),
    [
        ("ServicesEnabled=sym;asym", "sym;asym", ""),
        ("ServicesEnabled=sym;asym\nAutoresetEnabled=on\n", "sym;asym", "on"),
        ("AutoresetEnabled=off", "", "off"),
        ("sym;dc", "sym;dc", ""),
        ("ANYTHING=dc\n", "dc", ""),
        ("\n\n  asym \n", "asym", ""),
        ("# cy for this node\r\nServicesEnabled = asym;sym\r\n", "asym;sym", ""),
        ("ServicesEnabled=\n", "", ""),
        ("", "", ""),
        *((f"ServicesEnabled={services}", services, "") for services in SERVICES),
        *((";".join(reversed(services.split(";"))),) * 2 + ("",) for services in SERVICES),
    ],
)
def test_files_of_both_generations_are_parsed(text: str, services: str, auto_reset: str) -> None:
    assert parse("qat.conf", text) == (services, auto_reset)


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("ServicesEnabled=crypto", 1, "'ServicesEnabled=crypto'"),
        ("\nServicesEnabled=sym,asym", 2, "'ServicesEnabled=sym,asym'"),
        ("ServicesEnabled=sym;sym", 1, "'ServicesEnabled=sym;sym'"),
        ("ServicesEnabled=sym;", 1, "'ServicesEnabled=sym;'"),
        ("ServicesEnabled=sym;dcc", 1, "'ServicesEnabled=sym;dcc'"),
        ("ServicesEnabled=sym=asym", 1, "'ServicesEnabled=sym=asym'"),
        ("sym\nasym", 2, "'asym' as a second line"),
        ("ServicesEnabled=dc\n#\nFOO=sym", 3, "'FOO=sym' as a second line"),
        ("AutoresetEnabled=yes", 1, "'AutoresetEnabled=yes'"),
        ("AutoResetEnabled=on", 1, "'AutoResetEnabled=on'"),
        ("[GENERAL]\nServicesEnabled=dc", 1, "'[GENERAL]'"),
        ("Services\x1bEnabled", 1, "'Services\\x1bEnabled'"),
    ],
)
def test_errors_have_file_line_and_the_expected_values(text: str, line: int, found: str) -> None:
    with pytest.raises(ConfigError) as problem:
        parse("/conf/qat.conf", text)
    assert str(problem.value).startswith(f"/conf/qat.conf:{line}: found {found}")
    assert "expected" in str(problem.value)


@given(st.text() | st.text(alphabet="symadc;=\n# SerivcEnbledAuto"))
def test_any_text_is_a_configuration_or_a_configuration_error(text: str) -> None:
    try:
        services, auto_reset = parse("qat.conf", text)
    except ConfigError:
        return
    assert auto_reset in ("", "on", "off")
    assert services == "" or {*services.split(";")} in [{*accepted.split(";")} for accepted in SERVICES]


def test_the_file_of_the_node_replaces_the_common_one(tmp_path: Path) -> None:
    (tmp_path / "qat.conf").write_text("ServicesEnabled=dc\nAutoresetEnabled=on")
    (tmp_path / "qat-node1.conf").write_text("ServicesEnabled=sym")
    config = read_config(str(tmp_path), {"NODE_NAME": "node1"})
    assert config == QatConfig(services="sym", file=f"{tmp_path}/qat-node1.conf")


@pytest.mark.parametrize(
    ("environment", "config"),
    [
        ({}, QatConfig(pf_ids=DEFAULT_PF_IDS)),
        ({"ENABLED_QAT_PF_PCIIDS": " "}, QatConfig(pf_ids=DEFAULT_PF_IDS)),
        ({"ENABLED_QAT_PF_PCIIDS": "37c8 0x4940"}, QatConfig(pf_ids=("37c8", "0x4940"))),
        ({"QAT_VF_DRIVER": "none"}, QatConfig(vf_driver="")),
        ({"QAT_VF_DRIVER": "igb_uio"}, QatConfig(vf_driver="igb_uio")),
    ],
)
def test_the_environment_selects_devices_and_driver(
    tmp_path: Path, environment: Mapping[str, str], config: QatConfig
) -> None:
    assert read_config(str(tmp_path), environment) == config


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ENABLED_QAT_PF_PCIIDS", "4940 1572"),
        ("ENABLED_QAT_PF_PCIIDS", "4941"),
        ("QAT_VF_DRIVER", "vfio_pci"),
        ("NODE_NAME", "../x"),
    ],
)
def test_invalid_environment_variables_are_rejected(tmp_path: Path, variable: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable}: found "):
        read_config(str(tmp_path), {variable: value})
