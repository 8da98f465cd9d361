"""The agent's YAML file: any content is parsed, or rejected with file, key and error."""

import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import write

from accelplane.devices import HealthPolicy
from accelplane.node import config, foreign_yaml
from accelplane.node.config import AgentConfig
from accelplane.node.plugins import Installed, installed
from accelplane.node.settings import ConfigurationError
from accelplane.plugins import Config, Plugin
from accelplane.plugins.gpu import GpuConfig

FUZZ_WORDS = st.lists(
    st.sampled_from(
        [
            *("enabled", "plugins", "gpu", "npu", "shared-dev-num", "health-interval", "scan-grace", "prefix", "wsl"),
            *(": ", ":\n  ", "\n", "\n- ", "[", "]", "{", "}", ", ", "&a ", "*a", "<<", "!!int ", "!!bool ", "!!set "),
            *("!!float ", "!!timestamp ", "!!binary ", "!!python/object:os.system ", "? ", "| ", "> ", "'", '"', "# "),
            *("1", "-1", "1.5", ".nan", ".inf", "true", "null", "~", "2001-01-01", "0o7", "1:1:1", "\t", "\0", "é"),
            *("---\n", "...\n", "%YAML 9.9\n", "%TAG ! x\n", "\ufeff", "9" * 5000),
        ]
    ),
    max_size=25,
).map("".join)


def read(tmp_path: Path, text: str | bytes) -> AgentConfig:
    return config.read(str(write(tmp_path / "accelplane.yaml", text)))


def test_a_complete_file_is_parsed(tmp_path: Path) -> None:
    text = """
enabled: [gpu, npu]
plugins:
  gpu: &options
    shared-dev-num: 4
    prefix: /x
  npu:
health-interval: 5
scan-grace: 0.5
"""
    found = read(tmp_path, text)
    assert found.enabled == ["gpu", "npu"]
    assert (found.health_interval, found.scan_grace) == (5.0, 0.5)
    plugins = config.choose(found, installed(found.enabled), "file").plugins
    assert plugins["gpu"].config == GpuConfig(shared_dev_num=4, prefix="/x")
    assert plugins["npu"].config == type(plugins["npu"]).config_type()


@pytest.mark.parametrize("text", ["", "---\n", "# nothing\n", "{}", "null"])
def test_an_empty_file_sets_no_options(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == AgentConfig()


def test_anchors_and_merges_are_understood(tmp_path: Path) -> None:
    found = read(tmp_path, "plugins: {gpu: &g {shared-dev-num: 2}, npu: {<<: *g, accept-unknown-ids: true}}")
    assert found.plugins == {"gpu": {"shared-dev-num": 2}, "npu": {"shared-dev-num": 2, "accept-unknown-ids": True}}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("enabeld: [gpu]", "found the unknown option 'enabeld'"),
        ("enabled: gpu", r"enabled: found a string, expected a list or nothing"),
        ("enabled: [gpu, 3]", r"enabled\[1\]: found an integer, expected a string"),
        ("plugins: [gpu]", "plugins: found a list, expected a mapping"),
        ("plugins: {gpu: 3}", r"plugins\[...\]: found an integer, expected a mapping or nothing"),
        ("health-interval: 0.9", "health-interval: found 0.9, expected 0 or 1 to 3600 seconds"),
        ("health-interval: 3601", "health-interval: found 3601, expected 0 or 1 to 3600 seconds"),
        ("health-interval: .nan", "health-interval: found nan, expected 0 or 1 to 3600 seconds"),
        ("health-interval: fast", "health-interval: found a string, expected a number or nothing"),
        ("scan-grace: -1", "scan-grace: found -1, expected 0 to 3600 seconds"),
        ("scan-grace: .inf", "scan-grace: found inf, expected 0 to 3600 seconds"),
        ("7", "found an integer, expected a mapping"),
        ("a: b: c", "not YAML: .* line 1, column 5"),
        ("a: [", "not YAML: "),
        ("a: *b", "not YAML: found undefined alias"),
        ("!!int ''", "not YAML: a tag does not fit its value"),
        ("!!bool maybe", "not YAML: a tag does not fit its value"),
        ("!!python/object/apply:os.system [true]", "not YAML: could not determine a constructor"),
        ("\0", "not YAML: unacceptable character"),
        ("[" * 100, "not YAML: nested deeper than 64 levels"),
        ("a: " + "9" * 5000, "not YAML: "),
        ("a: 1\n---\na: 2", "not YAML: expected a single document"),
        ("? [a]\n: b", "not YAML: .*unhashable"),
    ],
)
def test_an_error_is_reported_with_its_file_and_line(tmp_path: Path, text: str, fault: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{tmp_path}/accelplane.yaml: .*{fault}") as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_text_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not YAML"):
        read(tmp_path, b"a: \xff\xfe")


def test_a_too_large_or_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"accelplane.yaml: more than 1048576 bytes"):
        read(tmp_path, "#" * (1024 * 1024 + 1))
    with pytest.raises(ConfigurationError, match=r"none.yaml: No such file or directory"):
        config.read(f"{tmp_path}/none.yaml")
    with pytest.raises(ConfigurationError, match="Is a directory"):
        config.read(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"shared-dev-num": "4"}, ".shared-dev-num: found a string, expected an integer"),
        ({"shared_dev_num": 4}, ": found the unknown option 'shared_dev_num', expected one of prefix, "),
        ({"shared-dev-num": 0}, ": .*must greater than zero"),
        ({"wsl": 1}, ".wsl: found an integer, expected true or false"),
        ({"prefix": None}, ".prefix: found nothing, expected a string"),
    ],
)
def test_an_error_in_the_options_of_a_plugin_is_reported_with_the_plugin(options: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^the file: plugins.gpu{fault}"):
        config.choose(AgentConfig(plugins={"gpu": options}), installed(["gpu"]), "the file")


class Optional(Config, frozen=True, kw_only=True):
    """An option of a plugin of another project."""

    count: int = 1


class Required(Config, frozen=True, kw_only=True):
    """An option without default, against the contract."""

    count: int


class Working(Plugin[Optional]):
    namespace = "working.example.com"


class WithoutDefault(Plugin[Required]):
    namespace = "required.example.com"


class Raising(Plugin[Optional]):
    namespace = "raising.example.com"

    def __init__(self, config: Optional | None = None) -> None:
        raise KeyError("board")


class Exiting(Plugin[Optional]):
    namespace = "exiting.example.com"

    def __init__(self, config: Optional | None = None) -> None:
        sys.exit("no license")


class WithoutNamespace(Plugin[Optional]):
    pass


class WithTextKinds(Plugin[Optional]):
    namespace = "kinds.example.com"
    cdi_kinds = "kinds.example.com/board"


class Restless(Plugin[Optional]):
    namespace = "restless.example.com"

    @property
    def health_policy(self) -> HealthPolicy:
        return HealthPolicy(interval=0)


class WithNames(Plugin[Optional]):
    namespace = "names.example.com"
    attribute_defaults: ClassVar[Any] = ("serial",)


class WithHyphen(Plugin[Optional]):
    namespace = "names.example.com"
    attribute_defaults: ClassVar[Any] = {"serial-number": ""}


class WithQuantity(Plugin[Optional]):
    namespace = "names.example.com"
    capacity_defaults: ClassVar[Any] = {"memory": "16Gi"}


class WithManyDefaults(Plugin[Optional]):
    namespace = "names.example.com"
    attribute_defaults: ClassVar[Any] = {f"a{number}": 0 for number in range(21)}


class WithoutConfig(Plugin[Optional]):
    namespace = "incomplete.example.com"

    def __init__(self, config: Optional | None = None) -> None:
        pass


BROKEN = [
    (WithoutDefault, "plugins.broken: "),
    (Raising, "plugins.broken: KeyError: 'board'"),
    (Exiting, "plugins.broken: SystemExit: no license"),
    (WithoutNamespace, "plugins.broken: TypeError: namespace of the plugin is None, expected a domain"),
    (WithoutConfig, "plugins.broken: TypeError: config of the plugin is None, expected super().__init__(config)"),
    (WithTextKinds, "plugins.broken: TypeError: cdi_kinds of the plugin is 'kinds.example.com/board', expected a list"),
    (WithNames, "plugins.broken: TypeError: attribute_defaults of the plugin is ('serial',), expected a mapping"),
    (WithHyphen, "plugins.broken: TypeError: attribute_defaults has the name 'serial-number', expected at most 32 "),
    (WithQuantity, "plugins.broken: TypeError: capacity_defaults has memory: '16Gi', expected a whole number"),
    (WithManyDefaults, "plugins.broken: TypeError: attribute_defaults and capacity_defaults are 21, expected at most"),
    (Restless, "plugins.broken: TypeError: health_policy.interval is 0, expected seconds above 0"),
]


@pytest.mark.parametrize(("broken", "problem"), BROKEN)
def test_a_plugin_that_cannot_be_created_is_skipped_and_the_others_run(
    broken: type[Plugin[Config]], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = config.choose(AgentConfig(), Installed({"broken": broken, "working": Working}), "the file")
    assert list(found.plugins) == ["working"]
    (skipped,) = found.skipped
    assert skipped.text.startswith(f"plugin broken is skipped: the file: {problem}")
    (message,) = caplog.messages
    assert message.startswith(f"plugin broken cannot be created and is skipped: the file: {problem}")


@pytest.mark.parametrize(("broken", "problem"), BROKEN)
def test_it_is_an_error_if_no_other_plugin_can_be_created(broken: type[Plugin[Config]], problem: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(problem)):
        config.choose(AgentConfig(), Installed({"broken": broken}), "the file")


def test_a_configuration_with_which_a_running_plugin_cannot_be_created_is_rejected() -> None:
    types = Installed({"broken": Raising, "working": Working})
    with pytest.raises(ConfigurationError, match=r"^f: plugins.broken: KeyError: 'board'"):
        config.choose(AgentConfig(plugins={"broken": {"count": 2}}), types, "f", running=("broken",))


def test_options_that_are_rejected_at_the_start_affect_no_other_plugin() -> None:
    types = Installed({"broken": WithTextKinds, "working": Working})
    found = config.choose(AgentConfig(plugins={"broken": {"count": "x"}}), types, "f")
    assert list(found.plugins) == ["working"]
    assert [each.text for each in found.skipped] == [
        "plugin broken is skipped: f: plugins.broken.count: found a string, expected an integer"
    ]


def test_options_of_an_uninstalled_plugin_are_an_error() -> None:
    types = installed(["gpu", "npu"]).types
    config.check_names(AgentConfig(plugins={"gpu": None}), types, "f")
    with pytest.raises(
        ConfigurationError, match=r"^f: plugins.gqu: no such plugin is installed, expected one of gpu, npu"
    ):
        config.check_names(AgentConfig(plugins={"gqu": None}), types, "f")


@given(FUZZ_WORDS.map(str.encode) | st.binary(max_size=100) | st.text(max_size=100).map(str.encode))
def test_any_file_is_parsed_or_rejected(tmp_path: Path, text: bytes) -> None:
    try:
        found = read(tmp_path, text)
        config.check_names(found, installed().types, "file")
        config.choose(found, installed(), "file")
    except ConfigurationError as error:
        assert "\n" not in str(error).replace(str(tmp_path), "")  # noqa: PT017 - refused, in one line


class TestForeignYaml:
    def test_the_result_is_that_of_the_safe_loader(self) -> None:
        text = b"a: [1, 2.5, yes, ~, 2001-01-01, 'x']\nb: &b {c: d}\ne: {<<: *b, f: g}\n"
        content = foreign_yaml.load(text)
        assert content["a"][:4] == [1, 2.5, True, None]
        assert content["e"] == {"c": "d", "f": "g"}
        assert foreign_yaml.load(b"") is None

    @pytest.mark.parametrize("piece", [b"[", b"- ", b"{a: ", b"? ", b"[{a: "])
    def test_nesting_is_limited(self, piece: bytes) -> None:
        with pytest.raises(foreign_yaml.YamlError, match="nested deeper than 64 levels"):
            foreign_yaml.load(piece * 150_000)

    def test_merges_are_limited(self) -> None:
        lines = ["a1: &a1 {x: 1}"]
        lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(2, 30)]
        with pytest.raises(foreign_yaml.YamlError, match="merges make more than 10000 entries"):
            foreign_yaml.load("\n".join(lines).encode())
        with pytest.raises(foreign_yaml.YamlError, match="merges more than 100 mappings"):
            foreign_yaml.load(b"a: &a {x: 1}\nb: {<<: [" + b", ".join([b"*a"] * 101) + b"]}")

    def test_recursive_aliases_are_rejected(self) -> None:
        content = foreign_yaml.load(b"&a [*a]")
        assert content[0] is content
        assert foreign_yaml.load(b"&x {<<: *x, a: 1}") == {"a": 1}
