"""Onload profiles as ConfigMaps: the settings that bash exports, notes, errors, limits, search, output."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from accelplane.cli.onloadprofile import main
from accelplane.onload.profiles import configmap, shell
from accelplane.onload.profiles.errors import ProfileError, ProfileNotFound


def evaluate(directory: Path, text: str, **environment: str) -> shell.Evaluated:
    (directory / "x.opf").write_bytes(text.encode())
    clean = {"PATH": os.environ["PATH"], "HOME": str(directory / "home"), **environment}
    return shell.evaluate("x", fragments=False, directories=(str(directory),), environment=clean)


def exported_by_bash(directory: Path, text: str) -> dict[str, str]:
    """The EF_* variables of a program that the user starts after the profile."""
    (directory / "y.opf").write_text(f'onload_set() {{ export "$1=$2"; }}\n{text}\nexec env -0 >&3\n')
    with open(directory / "environment", "w+") as output:
        command = f"exec 3<&{output.fileno()}; . ./y.opf"
        subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", command],
            cwd=directory,
            env={"PATH": os.environ["PATH"]},
            pass_fds=(output.fileno(),),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        output.seek(0)
        pairs = (field.partition("=") for field in output.read().split("\0"))
        return {name: value for name, _, value in pairs if name.startswith("EF_")}


# The text of a profile, its settings.
PROFILES: list[tuple[str, dict[str, str]]] = [
    ("# a comment\nonload_set EF_A 1; onload_set EF_B 2 # x", {"EF_A": "1", "EF_B": "2"}),
    ("export EF_A=1 ; export EF_B=2 ;", {"EF_A": "1", "EF_B": "2"}),
    ("EF_A=1\nEF_B=$EF_A$EF_A\nexport EF_A EF_B", {"EF_A": "1", "EF_B": "11"}),
    ("declare -x EF_A=1\nset -a\nEF_B=2", {"EF_A": "1", "EF_B": "2"}),
    ("onload_set EF_A 1 further words", {"EF_A": "1"}),
    ("onload_set EF_A 1\nonload_set EF_A 2", {"EF_A": "2"}),
    ("onload_set EF_A 1\nEF_A+=2", {"EF_A": "12"}),
    ("onload_set EF_A 1\nexport -n EF_A\nonload_set EF_B 1\nunset EF_B\nexport EF_C=3", {"EF_C": "3"}),
    ("onload_set EF_A ''\nexport EF_B=\nexport EF_C", {"EF_A": "", "EF_B": ""}),
    ("onload_set EF_M 100\nonload_set EF_A $((EF_M / 4))", {"EF_M": "100", "EF_A": "25"}),
    ("[ -z \"$X\" ] && onload_set EF_A 1\nif [ -n \"$X\" ]; then onload_set EF_A 2; fi", {"EF_A": "1"}),
    ("f() { local N=$1; onload_set EF_A \"$N\"; }\nfor N in 1 2; do f $N; done", {"EF_A": "2"}),
    ("onload_set EF_A `echo 1`\nonload_set EF_B ${X:-$(echo 2)}", {"EF_A": "1", "EF_B": "2"}),
    ("onload_set EF_A 'two\nlines\n'\nexport EF_B=$'a\\tb'", {"EF_A": "two\nlines\n", "EF_B": "a\tb"}),
    ("onload_set EF_A ä€😀\nexport EF_B='a \"$B\" \\ #;'", {"EF_A": "ä€😀", "EF_B": 'a "$B" \\ #;'}),
    ("IFS=E\nonload_set EF_A 'a b'\nexport EF_B=2", {"EF_A": "a b", "EF_B": "2"}),
    ("set -eu\nonload_set EF_A 1\nreturn\nonload_set EF_B 2", {"EF_A": "1"}),
    ("lscpu-of-another-node\nfalse\nonload_set EF_A 1\nfalse", {"EF_A": "1"}),
    ("export -a EF_A=(1 2)\nonload_set EF_B 1", {"EF_B": "1"}),
    ("(export EF_A=1)\nexport EF_B=2", {"EF_B": "2"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), PROFILES)
def test_settings_are_what_the_shell_of_the_user_exports(tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    assert evaluate(tmp_path, text).settings == expected
    assert exported_by_bash(tmp_path, text.replace("\nreturn\nonload_set EF_B 2", "")) == expected


def test_onload_set_has_two_forms_and_any_name(tmp_path: Path) -> None:
    text = "onload_set EF_A=x=y\nonload_set EF_B= ''\nonload_set EF_C=1 ''\nonload_set OTHER 1\nexport EF_0=1"
    assert list(evaluate(tmp_path, text).settings.items()) == [
        ("EF_A", "x=y"), ("EF_B", ""), ("EF_C", "1"), ("OTHER", "1"), ("EF_0", "1"),
    ]  # fmt: skip


def test_variables_of_the_user_are_no_settings(tmp_path: Path) -> None:
    user = {"EF_A": "1", "LIMIT": "2", "BASH_ENV": str(tmp_path / "env"), "BASH_FUNC_onload_set%%": "() { exit 1; }"}
    (tmp_path / "env").write_text("export EF_C=1\n")
    found = evaluate(tmp_path, "onload_set EF_B ${LIMIT:-none}", **user)
    assert (found.settings, found.notes) == ({"EF_B": "none"}, ())


# The text of a profile, the only note.
NOTES = [
    ("EF_A=1\nN=2\nonload_set EF_B $N", "profile 'x': EF_A is not exported, so it is no setting"),
    ("export LD_PRELOAD_X=1\nonload_set EF_B 1", "LD_PRELOAD_X is exported but no setting, expected EF_*"),
    ("echo 1 | while read N; do onload_set EF_A $N; done\nonload_set EF_B 1", "EF_A was set in a subshell"),
    ("onload_set EF_A 1\r\n", "x.opf: found lines that end with CR LF, expected LF"),
    ("export -a EF_A=(1)\nonload_set EF_B 1", "EF_A is not exported"),
    ("# onload_set EF_A 1\n", "profile 'x': found no settings, expected onload_set or exported EF_* variables"),
]


@pytest.mark.parametrize(("text", "expected"), NOTES)
def test_what_the_author_may_miss_is_a_note_and_with_strict_an_error(
    tmp_path: Path, text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (note,) = evaluate(tmp_path, text).notes
    assert expected in note
    profile = str(tmp_path / "x.opf")
    assert main(["-p", profile]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith("---\n")
    assert expected.removeprefix("profile 'x': ") in printed.err
    assert main(["-p", profile, "--strict"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert expected.removeprefix("profile 'x': ") in printed.err


def test_lines_with_cr_lf_of_an_imported_profile_are_reported(tmp_path: Path) -> None:
    (tmp_path / "part.opf").write_bytes(b"# x\r\nexport EF_A=1\n")
    found = evaluate(tmp_path, "onload_import part")
    assert found.settings == {"EF_A": "1"}
    assert [note.partition(": ")[0] for note in found.notes] == [f"{tmp_path}/part.opf"]


# The second line of a profile, the message.
ERRORS = [
    ("fail no such card", "x.opf: line 2: the profile fails: no such card"),
    ("f() {\nfail no such card\n}; f", "x.opf: line 3: the profile fails: no such card"),
    ("onload_set EF_B", "x.opf: line 2: onload_set: no value, expected KEY VALUE or KEY=VALUE"),
    ("onload_set 'EF B' 1", "x.opf: line 2: onload_set: found the key 'EF B', expected the name of a variable"),
    ("readonly EF_B; onload_set EF_B 1", "x.opf: line 2: onload_set: EF_B cannot be set"),
    ("onload_import", "x.opf: line 2: onload_import: no name, expected the name of a profile"),
    ("onload_import x", "x.opf: line 2: onload_import: more than 16 nested imports"),
    ("onload_import none", "profile 'none': not found in "),
    ("if true; then", "x.opf: line "),
    ("onload_set EF_B 'open", "unexpected EOF while looking for matching"),
    ("onload_import broken", "broken.opf: line 1: syntax error near unexpected token `)'"),
    ("exit 0", "profile 'x': bash ended with status 0 before the end of the profile"),
    ("set -u; echo $X", "x.opf: line 2: X: unbound variable"),
    ("kill -9 $$", "bash ended with status -9 before"),
    ("onload_set EF_B $'\\xff'", "EF_B: the value is not UTF-8, expected a text"),
    ("printf -v N %300s; onload_set EF_${N// /A} 1", "expected at most 253 characters"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), ERRORS)
def test_a_profile_that_fails_is_an_error_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "broken.opf").write_text(")\n")
    with pytest.raises(ProfileError) as raised:
        evaluate(tmp_path, f"onload_set EF_A 1\n{text}\n")
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["while :; do echo x; done", "while :; do onload_set EF_B 1; done"])
def test_a_profile_has_a_limited_output(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "MAX_OUTPUT", 8192)
    with pytest.raises(ProfileError, match="profile 'x': found more than 8 KiB of output or settings"):
        evaluate(tmp_path, text)


def test_a_profile_has_a_limited_time_and_what_it_started_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "TIMEOUT", 0.5)
    started = time.monotonic()
    with pytest.raises(ProfileError, match="bash did not end within"):
        evaluate(tmp_path, f"(sleep 1; touch {tmp_path}/late) & sleep 30")
    assert time.monotonic() - started < 20
    time.sleep(1)
    assert not (tmp_path / "late").exists()


def test_profiles_need_bash(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="bash: No such file or directory; profiles are bash scripts: install bash"):
        evaluate(tmp_path, "", PATH=str(tmp_path))


# Search


@pytest.mark.parametrize("missing", range(5))
def test_profiles_are_searched_in_the_documented_order(
    tmp_path: Path, missing: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first file that exists has the settings; the last one is the name as a path."""
    home, source = tmp_path / "home/.openonload/profiles", tmp_path / "source"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(source / "onload")])
    source.mkdir()
    (source / "mmaketool").touch(mode=0o755)
    paths = (home / "p.opf", source / "onload_profiles/p.opf", tmp_path / "p.opf", tmp_path / "q/p.opf", tmp_path / "p")
    (tmp_path / "q").mkdir()
    (tmp_path / "q/q.opf").touch()
    for place, path in enumerate(paths[missing:], missing):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"export EF_PLACE={place}\n")
    assert main(["-p", "p,q/q.opf"]) == 0
    assert f'EF_PLACE: "{missing}"' in capsys.readouterr().out


def test_a_program_outside_of_the_source_tree_uses_the_profiles_of_the_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["-p", str(tmp_path / "none")]) == 3
    assert "not found in " in (printed := capsys.readouterr().err)
    assert f"/.openonload/profiles, /usr/libexec/onload/profiles, {tmp_path} and as a path" in printed


def test_imports_are_searched_beside_the_profiles_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "home/.openonload/profiles"
    own.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (own / "mine.opf").write_text("onload_set EF_MINE $1\n")
    (tmp_path / "mine.opf").write_text("onload_set EF_MINE 2\n")
    (tmp_path / "part.opf-fragment").write_text("onload_import mine 5\nonload_set EF_PART 1\n")
    profile = tmp_path / "top.opf"
    profile.write_text("onload_import part\nonload_set EF_TOP 1\nonload_import part\n")
    assert main(["-p", str(profile)]) == 0
    (document, _) = yaml.safe_load_all(capsys.readouterr().out)
    assert document["data"] == {"EF_MINE": "5", "EF_PART": "1", "EF_TOP": "1"}


def test_a_fragment_is_no_first_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "part.opf-fragment").touch()
    (tmp_path / "x.opf").touch()
    assert main(["-p", "part"]) == 3
    assert main(["-p", "x,part"]) == 0


def test_only_regular_files_are_profiles(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.opf")
    with pytest.raises(ProfileNotFound):
        evaluate(tmp_path, "onload_import fifo")


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
        (["-p", "first,missing"], 3, "profile 'missing': not found in "),
        (["-p", "first,bad"], 1, "bad.opf: line 2: syntax error"),
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


def test_output_of_profiles_goes_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "x.opf"
    words = (
        "echo printed",
        "log in the \x1b log",
        "rawecho raw",
        "err bad",
        "vlog no",
        "prefix no",
        "onload_set EF_A 1",
    )
    profile.write_text("\n".join(words))
    assert main(["-p", str(profile), "ignored"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "printed\nin the \\x1b log\nraw\nbad\n"
    assert yaml.safe_load(printed.out.removesuffix("---\n"))["data"] == {"EF_A": "1"}


def test_conversion_does_not_load_the_api_client(tmp_path: Path) -> None:
    (tmp_path / "x.opf").write_text("onload_set EF_A 1\n")
    code = (
        "import sys; from accelplane.cli.onloadprofile import main; status = main(['-p', 'x']);"
        "sys.exit(status or any(name.startswith(('accelplane.kube', 'accelplane.apiserver')) for name in sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "EF_A" in result.stdout
