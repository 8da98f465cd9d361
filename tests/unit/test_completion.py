"""Shell completion, of kubectl's plugin too."""

import pytest
from click.testing import CliRunner

from accelplane.cli.commands import SHELLS, accelplane
from accelplane.cli.kubectl import answer, plugin


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ([""], ["inspect", "top", ":4"]),
        (["ins"], ["inspect", ":4"]),
        (["top", "-o", "j"], ["json", ":4"]),
        (["inspect", "--wai"], ["--waiting", ":4"]),
        (["inspect", "--kubeconfig", ""], [":0"]),
        (["nothing", "--h"], ["--help", ":4"]),
        ([], ["inspect", "top", ":4"]),
    ],
)
def test_kubectl_gets_the_completions_of_the_last_word(words: list[str], lines: list[str]) -> None:
    assert [line.partition("\t")[0] for line in answer(words).splitlines()] == lines


@pytest.mark.parametrize("command", ["inspect", "top"])
def test_the_plugin_of_kubectl_has_the_flags_of_a_cluster_only(command: str) -> None:
    result = CliRunner().invoke(plugin, [command, "--help"])
    assert result.exit_code == 0, result.output
    assert "--context" in result.output
    for text in ("--root", "--kubelet-dir", "--wake", "--agent", "--cluster", "this node and"):
        assert text not in result.output
    flags = {line.partition("\t")[0] for line in answer([command, "--"])}
    assert not flags & {"--root", "--cluster"}


def test_the_help_of_no_command_is_cut_off() -> None:
    _, _, commands = CliRunner().invoke(accelplane, ["--help"], terminal_width=80).output.partition("Commands:")
    assert "inspect" in commands
    assert "..." not in commands


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_of_a_shell_calls_accelplane(shell: str) -> None:
    result = CliRunner().invoke(accelplane, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert f"_ACCELPLANE_COMPLETE={shell}_complete" in result.output
