"""Command lines parsed as in Go, and the flags that the specification lists."""

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.cli import logflags
from accelplane.cli.goflags import (
    Flag,
    FlagError,
    HelpRequested,
    Value,
    flags_of,
    parse,
    parse_or_exit,
    usage,
    with_defaults,
)
from accelplane.plugins import Config, Meta
from accelplane.plugins.gpu import GpuConfig
from accelplane.plugins.npu import NpuConfig

FLAGS = (
    Flag("name", "x", "a text"),
    Flag("n", 1, "a number"),
    Flag("f", 0.5, "a fraction"),
    Flag("b", False, "a switch"),
    Flag("on", True, "a switch that is on"),
    Flag("empty", "", "nothing"),
)


@pytest.mark.parametrize(
    ("arguments", "values", "words"),
    [
        ([], {}, []),
        (["-n", "4"], {"n": 4}, []),
        (["-n=4"], {"n": 4}, []),
        (["--n=4"], {"n": 4}, []),
        (["--n", "4"], {"n": 4}, []),
        (["-n", "-4"], {"n": -4}, []),
        (["-n=1", "-n=2"], {"n": 2}, []),
        (["-name", "-b"], {"name": "-b"}, []),
        (["-name="], {"name": ""}, []),
        (["-name=a=b"], {"name": "a=b"}, []),
        (["-name", ""], {"name": ""}, []),
        (["-name", "--"], {"name": "--"}, []),
        (["-b"], {"b": True}, []),
        (["-b", "false"], {"b": True}, ["false"]),
        (["-b=false"], {"b": False}, []),
        (["-on=0", "-b=T"], {"on": False, "b": True}, []),
        (["word", "-n=1"], {}, ["word", "-n=1"]),
        (["-n=1", "word", "-b"], {"n": 1}, ["word", "-b"]),
        (["--", "-n=1"], {}, ["-n=1"]),
        (["-b", "--"], {"b": True}, []),
        (["-"], {}, ["-"]),
        (["", "-b"], {}, ["", "-b"]),
        (["-f=1e3"], {"f": 1000.0}, []),
        (["-f=.5"], {"f": 0.5}, []),
        (["-f=-7."], {"f": -7.0}, []),
        (["-f=+Inf"], {"f": math.inf}, []),
    ],
)
def test_command_lines_are_parsed_as_in_go(
    arguments: Sequence[str], values: dict[str, Value], words: Sequence[str]
) -> None:
    assert parse(FLAGS, arguments) == (values, words)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-none"], "flag provided but not defined: -none"),
        (["--none=1"], "flag provided but not defined: -none"),
        (["-n"], "flag needs an argument: -n"),
        (["---n=1"], "bad flag syntax: ---n=1"),
        (["-=1"], "bad flag syntax: -=1"),
        (["--=1"], "bad flag syntax: --=1"),
        (["-b="], "invalid value '' for flag -b: expected true or false"),
        (["-b=yes"], "invalid value 'yes' for flag -b"),
        (["-n=four"], "invalid value 'four' for flag -n: expected an integer"),
        (["-f=x"], "invalid value 'x' for flag -f: expected a number"),
        (["-f=1e999"], "does not fit into 64 bits"),
        (["-n=9223372036854775808"], "does not fit into 64 bits"),
        (["-n=" + "1" * 5000], "does not fit into 64 bits"),
    ],
)
def test_errors_have_the_text_of_go(arguments: Sequence[str], message: str) -> None:
    with pytest.raises(FlagError) as caught:
        parse(FLAGS, arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("argument", ["-h", "--h", "-help", "--help", "-h=x"])
def test_help_flags_are_accepted_in_any_spelling(argument: str) -> None:
    with pytest.raises(HelpRequested):
        parse(FLAGS, ["-n=1", argument])


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("00", 0), ("010", 8), ("0_7", 7), ("0x1f", 31), ("0X_1F", 31), ("0o17", 15), ("0b101", 5)),
        *(("1_000", 1000), ("+5", 5), ("-0x5", -5),),
        *((str(number), number) for number in (2**63 - 1, -(2**63))),
        *((text, None) for text in ("", "08", "1__0", "_1", "1_", "0x", " 5", "5 ", "5\n", "٣", "1.0", "1e3", "--5")),
    ],
)  # fmt: skip
def test_integers_are_gos_literals(text: str, number: int | None) -> None:
    if number is None:
        with pytest.raises(FlagError, match="expected an integer"):
            parse(FLAGS, [f"-n={text}"])
    else:
        assert parse(FLAGS, [f"-n={text}"])[0] == {"n": number}


UNSIGNED = (Flag("n", 1, "a number", unsigned=True),)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("010", 8), ("0x1f", 31), ("0o17", 15), ("0b101", 5), ("1_000", 1000), (str(2**64 - 1), 2**64 - 1)),
        *((text, None) for text in ("", "-1", "+1", "-0", "five", "1.0", "1__0", " 5", str(2**64), "1" * 5000)),
    ],
)
def test_unsigned_numbers_are_gos_literals_without_a_sign(text: str, number: int | None) -> None:
    if number is None:
        with pytest.raises(FlagError, match=r"for flag -n: (expected a number without a sign|does not fit)"):
            parse(UNSIGNED, [f"-n={text}"])
    else:
        assert parse(UNSIGNED, ["-n", text])[0] == {"n": number}


class CountingFlags(Config, frozen=True, kw_only=True):
    """Numbers of all kinds."""

    natural: Annotated[int, Meta(ge=0, description="from nothing on")] = 1
    computed: Annotated[int, Meta(description="worked out"), Meta(ge=0)] = msgspec.field(default_factory=lambda: 7)
    positive: Annotated[int, Meta(ge=1)] = 1
    share: Annotated[float, Meta(ge=0)] = 0.5
    names: tuple[str, ...] = ()


def test_options_that_start_at_0_are_unsigned_flags_and_computed_defaults_are_shown() -> None:
    assert flags_of(CountingFlags) == [
        Flag("natural", 1, "from nothing on", unsigned=True),
        Flag("computed", 7, "worked out", unsigned=True),
        Flag("positive", 1),
        Flag("share", 0.5),
    ]
    assert "  -computed uint\n    \tworked out (default 7)" in usage("prog", flags_of(CountingFlags))


@pytest.mark.parametrize("text", ["1", "t", "T", "true", "TRUE", "True", "0", "f", "F", "false", "FALSE", "False"])
def test_booleans_are_parsed_as_in_go(text: str) -> None:
    assert parse(FLAGS, [f"-b={text}"])[0] == {"b": text in ("1", "t", "T", "true", "TRUE", "True")}


ARGUMENTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.builds(
            "{}{}{}{}".format,
            st.sampled_from(["-", "--", "---", ""]),
            st.sampled_from([flag.name for flag in FLAGS] + ["h", "none", ""]),
            st.sampled_from(["=", ""]),
            st.text(max_size=6) | st.sampled_from(["1", "true", "1e9", "nan", "0x", "9" * 5000, "\udcff"]),
        ),
    ),
    max_size=6,
)


@given(ARGUMENTS)
def test_any_arguments_are_parsed_or_rejected(arguments: list[str]) -> None:
    try:
        found, words = parse(FLAGS, arguments)
    except (FlagError, HelpRequested):
        return
    defaults = {flag.name: flag.default for flag in FLAGS}
    assert all(type(value) is type(defaults[name]) for name, value in found.items())
    assert words == arguments[len(arguments) - len(words) :]


@given(st.text(max_size=20), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.booleans())
def test_encoded_values_are_decoded_unchanged(name: str, n: int, f: float, b: bool) -> None:
    arguments = [f"-name={name}", f"--n={n}", "-f", repr(f), f"-b={str(b).lower()}"]
    assert parse(FLAGS, arguments) == ({"name": name, "n": n, "f": f, "b": b}, [])


class TestUsage:
    def test_help_lists_every_flag_with_kind_and_default(self) -> None:
        assert usage("prog", FLAGS) == (
            "Usage of prog:\n"
            "  -b\n"
            "    \ta switch\n"
            "  -empty string\n"
            "    \tnothing\n"
            "  -f float\n"
            "    \ta fraction (default 0.5)\n"
            "  -n int\n"
            "    \ta number (default 1)\n"
            '  -name string\n'
            '    \ta text (default "x")\n'
            "  -on\n"
            "    \ta switch that is on (default true)"
        )  # fmt: skip

    @pytest.mark.parametrize("config", [GpuConfig, NpuConfig])
    def test_help_lists_every_option_of_a_plugin(self, config: type[GpuConfig] | type[NpuConfig]) -> None:
        flags = flags_of(config)
        text = usage("prog", [*flags, *logflags.FLAGS])
        for flag in (*flags, *logflags.FLAGS):
            assert f"\n  -{flag.name}" in text
            assert flag.help, f"-{flag.name} has no help"


class TestProgram:
    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (["-h"], 0, "Usage of prog:"),
            (["-none"], 2, "flag provided but not defined: -none\nUsage of prog:"),
            (["-n=x"], 2, "invalid value 'x' for flag -n"),
            (["-b", "false"], 2, "unexpected argument 'false': flags only, booleans as -flag or -flag=true"),
        ],
    )
    def test_exit_code_and_messages_are_those_of_the_go_program(
        self, arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            parse_or_exit("prog", FLAGS, arguments)
        assert caught.value.code == code
        output = capsys.readouterr()
        assert message in output.err
        assert output.out == ""

    def test_the_program_runs_with_the_given_flags(self) -> None:
        assert parse_or_exit("prog", FLAGS, ["-n=2"]) == {"n": 2}

    def test_arguments_ignored_by_the_go_program_are_ignored(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert parse_or_exit("prog", FLAGS, ["-b", "false", "-n=2"], lenient=True) == {"b": True}
        assert "prog: ignored: false -n=2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "default"),
    [
        *(("prefix", ""), ("enable-monitoring", False), ("health-management", False), ("wsl", False)),
        *(("shared-dev-num", 1), ("temp-limit", 100), ("gpu-temp-limit", 100), ("memory-temp-limit", 100)),
        *(("allocation-policy", "none"), ("xpumd-endpoint", ""), ("bypath", "single")),
        *(("allow-ids", ""), ("deny-ids", "")),
        # not given, both kinds of monitoring resources are published
        ("monitoring-mode", ""),
    ],
)  # fmt: skip
def test_the_gpu_plugin_has_the_go_programs_flags(name: str, default: Value) -> None:
    flags = {flag.name: flag.default for flag in flags_of(GpuConfig)}
    assert (name, flags.get(name)) == (name, default)
    assert type(flags[name]) is type(default)


@pytest.mark.parametrize(
    ("name", "default"),
    [
        *(("v", 0), ("logtostderr", True), ("alsologtostderr", False), ("stderrthreshold", "ERROR"), ("log_dir", "")),
        *(("log_file", ""), ("vmodule", ""), ("skip_headers", False), ("skip_log_headers", False)),
        *(("add_dir_header", False), ("one_output", False), ("log_file_max_size", 1800), ("log_backtrace_at", ":0")),
        *(("legacy_stderr_threshold_behavior", True), ("alsologtostderrthreshold", "INFO")),
    ],
)  # fmt: skip
def test_every_command_has_klogs_flags(name: str, default: Value) -> None:
    flags = {flag.name: flag.default for flag in logflags.FLAGS}
    assert (name, flags.get(name)) == (name, default)
    assert type(flags[name]) is type(default)


@pytest.mark.parametrize(
    ("values", "environment", "expected"),
    [
        ({}, {}, "default"),
        ({}, {"SECRET": "variable"}, "variable"),
        ({}, {"SECRET": "", "OTHER": "x"}, "default"),
        ({"secret": "given"}, {"SECRET": "variable"}, "given"),
        ({"secret": ""}, {"SECRET": "variable"}, ""),
    ],
)
def test_flags_that_are_not_given_take_their_variable_or_default(
    values: dict[str, Value], environment: dict[str, str], expected: str
) -> None:
    flags = (Flag("secret", "default", environment="SECRET"), Flag("port", 9443))
    assert with_defaults(flags, values, environment) == {"secret": expected, "port": 9443}


def test_usage_names_the_variable_of_a_flag() -> None:
    text = usage("program", [Flag("secret", "x", "name of a Secret", environment="SECRET")])
    assert text.endswith('name of a Secret (default "x") (environment SECRET)')
