"""Plugins are entry points of installed packages. One that cannot be loaded affects no other plugin."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from trees import write

from accelplane.node.plugins import installed
from accelplane.node.settings import ConfigurationError
from accelplane.node.status import SkippedPlugin
from accelplane.plugins import Plugin
from accelplane.plugins.gpu import GpuPlugin
from accelplane.plugins.npu import NpuPlugin

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package with one plugin: its name, the entry point's target, the module's text."""
    monkeypatch.syspath_prepend(tmp_path)

    def add(name: str, target: str, text: str, package: str = "third") -> None:
        information = tmp_path / f"{package}_{name}-1.0.dist-info"
        write(information / "METADATA", f"Metadata-Version: 2.1\nName: {package}-{name}\nVersion: 1.0\n")
        write(information / "entry_points.txt", f"[accelplane.plugins]\n{name} = {target}\n")
        module = target.partition(":")[0]
        write(tmp_path / f"{module}.py", text)
        monkeypatch.delitem(sys.modules, module, raising=False)

    return add


GOOD = """
from accelplane.plugins.base import Plugin
class ThirdPlugin(Plugin):
    namespace = "third.example.com"
"""


def test_built_in_families_are_entry_points() -> None:
    found = installed().types
    assert found["gpu"] is GpuPlugin
    assert found["npu"] is NpuPlugin
    assert list(found) == sorted(found)


def test_built_in_families_own_the_namespaces_of_intel_and_other_plugins_do_not() -> None:
    shared = {name for name, plugin in installed().types.items() if not plugin.exclusive_namespace}
    # amd.com, of which other programs serve GPUs, and the domain of the configuration
    assert shared == {"generic", "onload"}
    assert not Plugin.exclusive_namespace


def test_only_requested_plugins_are_loaded() -> None:
    assert dict(installed(["npu"]).types) == {"npu": NpuPlugin}
    assert list(installed(["npu", "gpu"]).types) == ["gpu", "npu"]
    assert dict(installed([]).types) == {}


def test_an_installed_third_party_plugin_is_available(install: Install) -> None:
    install("third", "third_good:ThirdPlugin", GOOD)
    assert installed(["third"]).types["third"].namespace == "third.example.com"
    assert {"gpu", "npu", "third"} <= set(installed().types)


def test_an_unknown_name_is_rejected_with_the_installed_names() -> None:
    with pytest.raises(ConfigurationError, match=r"-plugins: found 'gqu', 'x\\n', expected .*gpu, .*npu"):
        installed(["gpu", "x\n", "gqu"])


BAD = [
    ("third_raises:X", "raise RuntimeError('broken module')", "broken module"),
    ("third_lacks:Missing", "", "has no attribute 'Missing'"),
    ("third_other:X", "X = 7", "third_other:X is not a subclass of accelplane.plugins.Plugin"),
    ("third_class:X", "class X: pass", "third_class:X is not a subclass of accelplane.plugins.Plugin"),
    ("third_exits:X", "raise SystemExit('no license')", "no license"),
    ("third_imports:X", "import no_such_module_anywhere", "no_such_module_anywhere"),
]


@pytest.mark.parametrize(("target", "text", "why"), BAD)
def test_a_plugin_that_cannot_be_loaded_is_logged_and_skipped_with_the_reason(
    install: Install, target: str, text: str, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    install("third", target, text)
    found = installed(["gpu", "npu", "third"])
    assert "third" not in found.types
    assert {"gpu", "npu"} <= set(found.types)
    assert caplog.messages == ["plugin third cannot be loaded and is skipped"]
    assert why in caplog.text
    (skipped,) = found.skipped
    assert skipped.name == "third"
    assert skipped.reason.startswith(f"{target} cannot be loaded: ")
    assert why in skipped.reason


def test_a_package_does_not_replace_a_built_in_plugin(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    install("gpu", "third_gpu:ThirdPlugin", GOOD)
    assert installed().types["gpu"] is GpuPlugin
    reason = (
        "found third_gpu:ThirdPlugin of the package third-gpu, but accelplane.plugins.gpu:GpuPlugin of the package "
        "accelplane has the same name; expected distinct names of entry points"
    )
    assert caplog.messages == [f"plugin gpu is skipped: {reason}"]
    assert installed(["npu", "gpu"]).skipped == [SkippedPlugin("gpu", reason)]
    assert installed(["npu"]).skipped == []


def test_of_two_plugins_with_one_name_the_first_package_by_name_is_used(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    for package in ("zoe", "abel"):
        install("third", f"{package}_module:ThirdPlugin", GOOD, package)
    assert installed().types["third"].__module__ == "abel_module"
    assert "found zoe_module:ThirdPlugin of the package zoe-third, but abel_module:ThirdPlugin of" in caplog.text
