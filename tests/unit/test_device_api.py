"""Which API hands devices out, from the setting `dra-api` and the file's `dra`."""

from pathlib import Path

import pytest
from trees import write

from accelplane.devices import Unit
from accelplane.node import config
from accelplane.node.device_api import Api, DeviceApis
from accelplane.node.settings import ConfigurationError, Settings

GPU = Unit(id="0000:03:00.0", health="card0")
QUEUE = Unit(id="0000:6a:01.0-wq1", parent="0000:6a:01.0", health="wq0.1", attributes={"pciAddress": "0000:6a:01.0"})
VF = Unit(id="0000:6b:00.1", parent="0000:6b:00.0", health="vf1")


@pytest.mark.parametrize(
    ("text", "family", "unit", "expected"),
    [
        ("", "gpu", GPU, "plugin"),
        ("dra", "gpu", GPU, "dra"),
        ("none", "gpu", GPU, "none"),
        ("gpu=dra,qat=plugin", "gpu", GPU, "dra"),
        ("gpu=dra,qat=plugin", "qat", VF, "plugin"),
        ("gpu=dra", "qat", VF, "plugin"),
        ("dra, gpu=none", "gpu", GPU, "none"),
        ("gpu=dra,0000:03:00.0=plugin", "gpu", GPU, "plugin"),
        ("0000:6a:01.0=dra", "dsa", QUEUE, "dra"),
        ("qat=dra,0000:6b:00.0=plugin", "qat", VF, "plugin"),
        ("0000:6b:00.0=plugin,0000:6b:00.1=dra", "qat", VF, "dra"),
    ],
)
def test_the_entry_closest_to_a_unit_counts(text: str, family: str, unit: Unit, expected: Api) -> None:
    apis = DeviceApis.of(text)
    assert apis.of_unit(family, unit) == expected
    assert DeviceApis.of(apis.text) == apis


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", "found 'gpu', expected one of plugin, dra, none"),
        ("gpu=drm", "found 'gpu=drm', expected one of plugin, dra, none"),
        ("0000:3:0.0=dra", "found '0000:3:0.0', expected a plugin's name or a PCI address"),
        ("=dra", "found '', expected a plugin's name or a PCI address"),
    ],
)
def test_other_texts_are_rejected_with_the_option(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match="^-dra-api: " + message):
        Settings.of({"dra-api": text}, "-")


def test_an_unknown_eviction_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match=r"^-dra-evict: found 'all', expected one of gone, sick, never"):
        Settings.of({"dra-evict": "all"}, "-")


def test_the_file_has_the_same_settings(tmp_path: Path) -> None:
    text = """
dra:
  api: {gpu: dra, qat: plugin}
  devices: {"0000:03:00.0": plugin}
  evict: sick
  manage-binding: false
  device-status: true
  take-over: true
"""
    found = config.read(str(write(tmp_path / "accelplane.yaml", text)))
    settings = Settings.of(found.settings, "")
    assert settings.device_apis == DeviceApis.of("gpu=dra,qat=plugin,0000:03:00.0=plugin")
    assert settings.dra_evict == "sick"
    assert (settings.dra_manage_binding, settings.dra_device_status, settings.dra_take_over) == (False, True, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dra: {api: drm}", "dra.api: "),
        ("dra: {evict: all}", "dra-evict: found 'all', expected one of gone, sick, never"),
        ("dra: {evictions: 1}", "dra: found the unknown option 'evictions'"),
        ("dra: {devices: {'0000:3:0.0': dra}}", "dra-api: found '0000:3:0.0', expected"),
    ],
)
def test_a_file_with_other_values_is_rejected_with_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = str(write(tmp_path / "accelplane.yaml", text))
    with pytest.raises(ConfigurationError, match=f"{path}: {message}"):
        config.read(path)


def test_a_plugin_that_is_not_installed_is_rejected() -> None:
    given = config.AgentConfig(dra=config.DraConfig(api={"gqu": "dra"}))
    with pytest.raises(ConfigurationError, match=r"^file: dra\.api\.gqu: no such plugin is installed, expected"):
        config.check_names(given, {}, "file")
