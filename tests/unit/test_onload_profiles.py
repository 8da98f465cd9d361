"""Onload profiles as ConfigMaps: the supported part of the shell's language, limits, search, output, bash.

Bash itself executes the same profiles (`--exec`) and must find the same settings.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from accelplane.cli.onloadprofile import main
from accelplane.onload.profiles import configmap, files, shell
from accelplane.onload.profiles.arithmetic import ArithmeticProblem, evaluate
from accelplane.onload.profiles.errors import ProfileError, ProfileNotFound
from accelplane.onload.profiles.evaluation import MAX_IMPORTS, MAX_VALUE, Evaluation
from accelplane.onload.profiles.lexer import commands


def search(directory: Path) -> files.Search:
    return files.search(["x"], home=str(directory / "home"), program_directory="")._replace(
        directories=(str(directory),)
    )


def settings(directory: Path, text: str, *, strict: bool = True) -> dict[str, str]:
    (directory / "x.opf").write_text(text)
    evaluation = Evaluation(search(directory), strict=strict)
    evaluation.run("x", fragments=False)
    return evaluation.settings


def of_bash(directory: Path, text: str) -> dict[str, str]:
    (directory / "x.opf").write_text(text)
    return shell.run(search(directory), "x", fragments=False, environment={"PATH": os.environ["PATH"]})


# The text of a profile, its settings. Bash finds the same.
SUPPORTED: list[tuple[str, dict[str, str]]] = [
    ("", {}),
    ("# a comment\n\n  # another\n", {}),
    ("onload_set EF_A 1\nonload_set EF_B 2", {"EF_A": "1", "EF_B": "2"}),
    ("onload_set EF_A=1", {"EF_A": "1"}),
    ("onload_set EF_A=1 ''", {"EF_A": "1"}),
    ("onload_set EF_A 1 further words", {"EF_A": "1"}),
    ("onload_set EF_A 1; onload_set EF_B 2 # x", {"EF_A": "1", "EF_B": "2"}),
    ("onload_set EF_A 1\nonload_set EF_A 2", {"EF_A": "2"}),
    ("onload_set EF_A a#b", {"EF_A": "a#b"}),
    ("onload_set \\\n  EF_A\\\nB 1", {"EF_AB": "1"}),
    ("""onload_set EF_A 'a "$B" \\ #;'""", {"EF_A": 'a "$B" \\ #;'}),
    ("""onload_set EF_A "a \\" \\$B \\\\ \\x 'c' $" """, {"EF_A": "a \" $B \\ \\x 'c' $"}),
    ("onload_set EF_A \\'\\ x", {"EF_A": "' x"}),
    ("onload_set EF_A 'two\nlines'\nonload_set EF_B 1", {"EF_A": "two\nlines", "EF_B": "1"}),
    ('onload_set EF_A "a\\\nb"', {"EF_A": "ab"}),
    ("""onload_set EF_'A'"B" c'd'"e"f""", {"EF_AB": "cdef"}),
    ("N=4\nonload_set EF_A $N", {"EF_A": "4"}),
    ("N=4 M=5\nonload_set EF_A ${N}x$M", {"EF_A": "4x5"}),
    ("export N=4\nonload_set EF_A $N", {"EF_A": "4"}),
    ("N='a b  c'\nonload_set EF_A $N\nonload_set EF_B \"$N\"", {"EF_A": "a", "EF_B": "a b  c"}),
    ("N='a b '\nonload_set EF_$N", {"EF_a": "b"}),
    ("N=' '\nonload_set EF_A x$N", {"EF_A": "x"}),
    ("N=\nonload_set EF_A $N 3", {"EF_A": "3"}),
    ("A=1 B=$A$A\nonload_set EF_A $B", {"EF_A": "11"}),
    ("onload_set EF_A $((1 + 2 * 3))", {"EF_A": "7"}),
    ("N=100\nonload_set EF_A $(( N / 4 ))\nonload_set EF_B $(($N / 3))", {"EF_A": "25", "EF_B": "33"}),
    ("N=1+1\nonload_set EF_A $(( $N * 2 ))", {"EF_A": "3"}),
    ('onload_set EF_A "x$(( (1 + 2) * $((2)) ))y"', {"EF_A": "x6y"}),
    ("log hello; vlog x; err y; rawecho z; prefix; :; true; echo out\nonload_set EF_A 1", {"EF_A": "1"}),
    ("onload_set EF_A ä€😀", {"EF_A": "ä€😀"}),
    ("onload_set EF_A !x-%/,.@:+^_]}", {"EF_A": "!x-%/,.@:+^_]}"}),
    ("onload_set EF_A a~b", {"EF_A": "a~b"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), SUPPORTED)
def test_a_profile_is_evaluated_as_bash_does(tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    assert settings(tmp_path, text) == expected
    assert of_bash(tmp_path, text) == expected


# Settings that the replaced script loses or changes.
BETTER: list[tuple[str, dict[str, str], dict[str, str]]] = [
    ("onload_set EF_A ''", {"EF_A": ""}, {"EF_A": "EF_A"}),
    ("onload_set EF_A=x=y", {"EF_A": "x=y"}, {"EF_A": "x"}),
    ("onload_set EF_M 100\nonload_set EF_A $(($EF_M / 4))", {"EF_M": "100", "EF_A": "25"}, {"EF_M": "100"}),
    ("onload_set EF_M 100\nonload_set EF_A $EF_M", {"EF_M": "100", "EF_A": "100"}, {"EF_M": "100", "EF_A": "EF_A"}),
]


@pytest.mark.parametrize(("text", "own", "original"), BETTER)
def test_settings_lost_by_the_original_are_kept(
    tmp_path: Path, text: str, own: dict[str, str], original: dict[str, str]
) -> None:
    assert settings(tmp_path, text) == own
    assert of_bash(tmp_path, text) == original


# The first line that is not supported, its description. The others are evaluated.
SKIPPED = [
    ("A=1 onload_set EF_B 2", "variables for one command"),
    ("test -e /x && onload_set EF_B 2", "&&"),
    ("onload_set EF_B 1 || fail", "||"),
    ("lscpu", "the command 'lscpu'"),
    ("echo x >&2", ">&"),
    ("onload_set EF_B 1 2>/dev/null", ">"),
    ("onload_set EF_B * ", "* without quotes"),
    ("onload_set EF_B {1,2}", "{ without quotes"),
    ("onload_set EF_B ~", "~ without quotes"),
    ("onload_set EF_B $1", "$1"),
    ("onload_set EF_B $HOSTNAME", "$HOSTNAME is not known"),
    ("A=1; A+=1", "+="),
    ("onload_set EF_B $(( NOT_SET ))", "NOT_SET is not set"),
    ("onload_set EF_B $(( 1 / 0 ))", "division by 0"),
    ("onload_set EF_B", "has no value"),
    ("onload_set 'EF B' 1", "the key is 'EF B'"),
    ("onload_import ''", "has no name"),
    ("N='*'; onload_set EF_B $N", "without quotes"),
    ("export -n X", "export"),
]


@pytest.mark.parametrize(("text", "problem"), SKIPPED)
def test_an_unsupported_command_is_skipped_with_a_note_or_an_error(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "x.opf").write_text(f"onload_set EF_A 1\n{text}\nonload_set EF_C 3\n")
    evaluation = Evaluation(search(tmp_path), strict=False)
    evaluation.run("x", fragments=False)
    assert evaluation.settings == {"EF_A": "1", "EF_C": "3"}
    (note,) = evaluation.notes
    assert f"{tmp_path}/x.opf: line 2: " in note
    assert problem in note
    with pytest.raises(ProfileError, match=re.escape(problem)) as raised:
        Evaluation(search(tmp_path), strict=True).run("x", fragments=False)
    assert "line 2: " in str(raised.value)
    assert "--exec" in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "if true; then\nonload_set EF_B 2\nfi",
        "true && { onload_set EF_B 1; onload_set EF_C 2; }",
        "true ||\nif true; then onload_set EF_B 2; fi",
        "! true",
        "[[ -n x ]] && onload_set EF_B 1",
        "(onload_set EF_B 1)",
        "f() { onload_set EF_B 1; }",
        "cat <<X\nonload_set EF_B 1\nX",
        "onload_set EF_B $(nproc)",
        "onload_set EF_B `nproc`",
        "onload_set EF_B ${A:-1}",
        "onload_set EF_B $'\\n'",
        "onload_set EF_B 'open",
        'onload_set EF_B "open',
        "onload_set EF_B $((1 +\n1))",
        "onload_set EF_B " + "$((" * 9000,
        "exit 0",
        "return",
        "set -e",
        ". ./other.opf",
        "eval onload_set EF_B 1",
        "; onload_set EF_B 1",
        "true;; true",
    ],
)
def test_a_command_with_unknown_length_or_effect_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ProfileError, match=rf"{re.escape(str(tmp_path))}/x\.opf: line 2: .*--exec"):
        settings(tmp_path, f"onload_set EF_A 1\n{text}\nonload_set EF_D 4\n", strict=False)


def test_settings_that_depend_on_a_skipped_command_are_skipped_too(tmp_path: Path) -> None:
    text = (
        "N=1\nM=1\nlscpu && N=2 && onload_set EF_M 5\nonload_set EF_A $N\nonload_set EF_B $EF_M\nonload_set EF_C $M\n"
    )
    assert settings(tmp_path, text, strict=False) == {"EF_C": "1"}


def test_a_profile_can_fail(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="line 2: the profile fails: no such card"):
        settings(tmp_path, "onload_set EF_A 1\nfail no such card")
    with pytest.raises(ProfileError, match="status 1"):
        of_bash(tmp_path, "fail no such card")


@pytest.mark.parametrize(
    "text",
    [
        "onload_import x",
        "\n".join(["onload_import empty"] * (MAX_IMPORTS + 1)),
        "A=aaaaaaaaaaaaaaaa\n" + "A=$A$A\n" * 40,
        "onload_set EF_A " + "a" * (MAX_VALUE + 1),
        "A=" + "a" * MAX_VALUE + "\n" + "log $A$A\n" * 200,
        "A=" + "a" * MAX_VALUE + "\n" + ": " + "$A " * 300,
        "#" * (files.MAX_SIZE + 1),
        "onload_set EF_A a\0b",
    ],
)
def test_limits_of_a_profile(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.opf").touch()
    with pytest.raises(ProfileError):
        settings(tmp_path, text, strict=False)


@pytest.mark.parametrize("expression", ["(" * 100 + "1" + ")" * 100, "2**" * 100 + "1", "1+" * 5000 + "1"])
def test_limits_of_an_expression(expression: str) -> None:
    with pytest.raises(ArithmeticProblem):
        evaluate(expression, {})


def test_files_that_are_not_profiles_are_reported(tmp_path: Path) -> None:
    fifo, binary = tmp_path / "fifo", tmp_path / "binary.opf"
    os.mkfifo(fifo)
    binary.write_bytes(b"onload_set EF_A \xff")
    with pytest.raises(ProfileNotFound):
        search(tmp_path).find(str(fifo), fragments=False)
    with pytest.raises(ProfileError, match="fifo: not a regular file, expected a profile"):
        files.read(str(fifo))
    with pytest.raises(ProfileError, match=r"binary\.opf: byte 16 is not UTF-8"):
        files.read(str(binary))
    with pytest.raises(ProfileError, match="No such file"):
        files.read(str(tmp_path / "none"))


# Search


def test_profiles_are_searched_in_the_documented_order(tmp_path: Path) -> None:
    paths = files.search(["p", "/dir/q.opf"], home="/home/me", program_directory="")
    own, system = "/home/me/.openonload/profiles", "/usr/libexec/onload/profiles"
    assert list(paths.candidates("p", fragments=False)) == [
        f"{own}/p.opf", f"{system}/p.opf", "./p.opf", "/dir/p.opf", "p",
    ]  # fmt: skip
    assert list(paths.candidates("p", fragments=True))[:4] == [
        f"{own}/p.opf", f"{own}/p.opf-fragment", f"{system}/p.opf", f"{system}/p.opf-fragment",
    ]  # fmt: skip
    tool = tmp_path / "mmaketool"
    tool.touch(mode=0o755)
    beside = files.search(["p"], home="/home/me", program_directory=str(tmp_path))
    assert beside.directories == (f"{tmp_path}/onload_profiles", ".")


@pytest.mark.parametrize("execute", [False, True])
def test_imports_are_searched_beside_the_profiles_of_the_command_line(
    tmp_path: Path, execute: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "home/.openonload/profiles"
    own.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (own / "mine.opf").write_text("onload_set EF_MINE 1\n")
    (tmp_path / "mine.opf").write_text("onload_set EF_MINE 2\n")
    (tmp_path / "part.opf-fragment").write_text("onload_import mine\nonload_set EF_PART 1\n")
    profile = tmp_path / "top.opf"
    profile.write_text("onload_import part\nonload_set EF_TOP 1\nonload_import part\n")
    assert main(["-p", str(profile), *(["--exec"] if execute else [])]) == 0
    (document, _) = yaml.safe_load_all(capsys.readouterr().out)
    assert document["data"] == {"EF_MINE": "1", "EF_PART": "1", "EF_TOP": "1"}


def test_a_fragment_is_no_first_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.opf-fragment").touch()
    (tmp_path / "x.opf").touch()
    for more in ([], ["--exec"]):
        assert main(["-p", "part", *more]) == 3
        assert main(["-p", "x,part", *more]) == 0


# Output


def test_the_document_is_that_of_the_original(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "latency.opf"
    profile.write_text("onload_set EF_POLL_USEC 100000\nonload_set EF_TCP_FASTSTART_INIT 0\n")
    assert main(["-p", str(profile)]) == 0
    assert capsys.readouterr().out == (
        "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: onload-latency-profile\n  labels:\n"
        "    app.kubernetes.io/part-of: onload\ndata:\n"
        '  EF_POLL_USEC: "100000"\n  EF_TCP_FASTSTART_INIT: "0"\n---\n'
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("latency", "onload-latency-profile"),
        ("/x/latency-best.opf", "onload-latency-best-profile"),
        ("My_Profile.OPF", "onload-my-profile.opf-profile"),
        ("a..b.-c-.opf", "onload-a.b.c-profile"),
        ("x.opf-fragment", "onload-x.opf-fragment-profile"),
    ],
)
def test_the_name_of_a_configmap_is_valid(path: str, name: str) -> None:
    assert configmap.object_name(path) == name


@pytest.mark.parametrize("path", ["___", "...opf", "a" * 300])
def test_a_profile_with_an_invalid_name_is_an_error(path: str) -> None:
    with pytest.raises(ProfileError, match="rename the file"):
        configmap.object_name(path)


@given(st.dictionaries(st.from_regex(r"[-._a-zA-Z0-9]{1,20}", fullmatch=True), st.text()))
def test_yaml_has_the_settings_unchanged(data: Mapping[str, str]) -> None:
    values = {key: value.encode("utf-8", "ignore").decode() for key, value in data.items()}
    assert yaml.safe_load(configmap.document("x", values))["data"] == values


def test_help_is_no_error_except_under_the_name_of_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"], "accelplane onload profile") == 0
    assert capsys.readouterr().out.startswith("Usage: accelplane onload profile ")
    assert main(["--help"]) == 1
    assert "Usage: " in capsys.readouterr().err


def test_a_document_larger_than_a_configmap_is_an_error() -> None:
    with pytest.raises(ProfileError, match="at most 1048576"):
        configmap.document("x", {f"EF_{number}": "x" * 32768 for number in range(33)})


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 1, "found no profile, expected --profile PROFILE"),
        (["-p"], 1, "expected names"),
        (["--profile="], 1, "expected names"),
        (["-p", "a,,b"], 1, "expected names"),
        (["-x", "-p", "a"], 1, "-x: unknown option"),
        (["word"], 1, "found no profile, expected --profile PROFILE"),
        (["-p", "a", "--strict", "--exec"], 1, "expected one of them"),
        (["-p", "first,missing"], 3, "profile 'missing': not found; looked for "),
        (["-p", "first,bad"], 1, "bad.opf: line 1: if"),
        (["--exec", "-p", "first", "-p", "missing"], 3, "profile missing: not found"),
        (["--profile", "first,sub/FIRST.opf"], 1, "both have the ConfigMap onload-first-profile"),
    ],
)
def test_errors_print_nothing_to_stdout(tmp_path: Path, words: list[str], status: int, message: str) -> None:
    (tmp_path / "first.opf").write_text("onload_set EF_A 1\n")
    (tmp_path / "bad.opf").write_text("if true\n")
    program = Path(sys.executable).with_name("profile_to_configmap.sh")
    printed = subprocess.run([program, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (printed.returncode, printed.stdout) == (status, "")
    assert message in printed.stderr
    assert ("Usage: " in printed.stderr) == (status == 1 and "onload" not in message and "line" not in message)


def test_the_command_and_the_drop_in_are_the_same_program(tmp_path: Path) -> None:
    (tmp_path / "x.opf").write_text("onload_set EF_A 1\n")
    programs = Path(sys.executable).parent
    printed = [
        subprocess.run([*words, "-p", "x"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for words in ([programs / "accelplane", "onload", "profile"], [programs / "profile_to_configmap.sh"])
    ]
    assert printed[0] == printed[1]
    assert "onload-x-profile" in printed[0]


def test_output_of_profiles_goes_to_stderr(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "x.opf"
    profile.write_text("echo on stdout\nlog in the \x1b log\nonload_set EF_A 1\n")
    for more in ([], ["--exec"]):
        assert main(["-p", str(profile), "ignored", *more]) == 0
        printed = capfd.readouterr()
        assert "stdout" not in printed.out
        assert "in the" in printed.err
    assert main(["-p", str(profile)]) == 0
    assert "\x1b" not in capfd.readouterr().err


def test_conversion_does_not_load_the_api_client(tmp_path: Path) -> None:
    (tmp_path / "x.opf").write_text("onload_set EF_A 1\n")
    code = (
        "import sys; from accelplane.cli.onloadprofile import main; status = main(['-p', 'x']);"
        "sys.exit(status or any(name.startswith(('accelplane.kube', 'accelplane.apiserver')) for name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "EF_A" in result.stdout


@pytest.mark.parametrize("content", [b"EF_A\0\xff\0", b"E A\0x\0"])
def test_settings_of_bash_that_no_configmap_supports_are_errors(tmp_path: Path, content: bytes) -> None:
    key, value, _ = content.split(b"\0")
    (tmp_path / "x.opf").write_bytes(b"onload_set '" + key + b"' '" + value + b"'")
    with pytest.raises(ProfileError):
        shell.run(search(tmp_path), "x", fragments=False, environment={"PATH": os.environ["PATH"]})
    with pytest.raises(ProfileError, match="install bash"):
        shell.run(search(tmp_path), "x", fragments=False, environment={"PATH": str(tmp_path)})


# Untrusted input

NAMES = st.sampled_from(["A", "B", "C"])
PIECES = st.sampled_from(
    [
        "a", "1", "=", " ", "  ", "\t", "\\", "'", '"', "$A", "${B}", "$((A+1))", "$(( $B * 2 ))", "#", "x#", ";", "\n",
        "\\\n", "*", "~", "{", "}", "!", "$", "&&", "|", "(", ")", "<", ">", "-", "é", "$'", "`", "%", "0x1", "\\$",
        "onload_set EF_A 1\n", "onload_set ", "EF_B ", "A=3\n", "B=", "C='x y'\n", "onload_set EF_C $C\n", "log x\n",
        "onload_set EF_D \"$C$A\"\n", ": ", "if ", "done",
    ]
)  # fmt: skip
PROFILES = st.lists(PIECES, max_size=25).map(lambda pieces: "A=1\nB=2\nC=\n" + "".join(pieces))


@given(PROFILES)
@example("A=1\nonload_set EF_A $A$A'x'\\y")
def test_profiles_accepted_by_strict_evaluate_as_in_bash(text: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        try:
            found = settings(Path(name), text)
        except ProfileError:
            return
        assert found == of_bash(Path(name), text)


@given(st.text() | PROFILES)
def test_any_text_is_parsed_to_settings_or_an_error(text: str) -> None:
    for command in commands(text):
        assert 1 <= command.line <= text.count("\n") + 1
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(ProfileError):
        assert isinstance(settings(Path(name), text.encode("utf-8", "ignore").decode(), strict=False), dict)


SYMBOLS = ("(", ")", "+", "-", "*", "/", "%", "**", "<<", ">>", "&", "|", "^", "~", "!", "&&", "||", "?", ":")
TERMS = st.sampled_from(
    ["0", "1", "2", "7", "10", "010", "0x1F", "A", "B", *SYMBOLS, *("==", "!=", "<", ">", "<=", ">=")]
)


@given(st.lists(TERMS, min_size=1, max_size=12))
@example(["-", "2", "**", "2"])
@example(["2", "**", "3", "**", "2"])
@example(["-", "7", "/", "2"])
@example(["1", "?", "2", ":", "3", "?", "4", ":", "5"])
@example(["0", "&&", "1", "/", "0"])
@example(["7", "<<", "62"])
def test_an_expression_has_the_value_that_bash_computes(terms: list[str]) -> None:
    expression = " ".join(terms)
    result = subprocess.run(
        ["bash", "-c", f"A=5 B=-3; echo $(( {expression} ))"], capture_output=True, text=True, check=False
    )
    try:
        value = evaluate(expression, {"A": "5", "B": "-3"})
    except ArithmeticProblem:
        return
    assert (result.returncode, result.stdout) == (0, f"{value}\n")
