"""The commands that the documentation shows run, with directories of the test in place of the machine's."""

import json
from pathlib import Path

import pytest
from documentation import command_lines
from processes import run_command

from accelplane.node.plugins import installed
from accelplane.simulate import SimulatedNode

# They serve until they are ended, need a cluster, or write to hardware.
_NOT_RUN = (["accelplane", "kubelet"], ["accelplane", "provision", "apply"])
_FILES = {
    "/etc/accelplane/agent.yaml": "plugins: {gpu: {shared-dev-num: 2}}\n",
    "/tmp/generic.yaml": "enabled: [generic]\n",
    "./mine.opf": "onload_set EF_SPIN_USEC 10\n",
}


def runnable(words: list[str]) -> bool:
    plugins = words[words.index("--plugins") + 1].split(",") if "--plugins" in words else []
    known = set(plugins) <= installed().types.keys()  # others are plugins of the reader
    return known and "-daemon" not in words and not any(words[: len(each)] == each for each in _NOT_RUN)


FAMILIES = ("gpu", "npu", "qat", "dsa", "iaa", "dlb", "sgx", "fpga")
PROGRAMS = ("accelplane", *(f"intel_{name}_device_plugin" for name in FAMILIES))
COMMANDS = [(where, words) for where, words in command_lines(PROGRAMS) if runnable(words)]


@pytest.fixture
def node(tmp_path: Path) -> SimulatedNode:
    node = SimulatedNode(tmp_path / "node")
    node.plug_gpu()
    return node


@pytest.mark.parametrize(("where", "words"), COMMANDS, ids=[where for where, _words in COMMANDS])
def test_a_command_of_the_documentation_runs(
    where: str, words: list[str], node: SimulatedNode, tmp_path: Path, directory: str
) -> None:
    words = [word.replace("$NODE_NAME", "node-1") for word in words]
    for path, text in _FILES.items():
        (tmp_path / path.rpartition("/")[2]).write_text(text)
        words = [word.replace(path, str(tmp_path / path.rpartition("/")[2])) for word in words]
    words = [word.replace("/etc/accelerators", str(tmp_path)) for word in words]
    profiles = tmp_path / ".openonload/profiles"
    profiles.mkdir(parents=True)
    (profiles / "latency.opf").write_text("onload_set EF_POLL_USEC 100000\n")
    match words[1:2]:
        case ["inspect"]:
            words += ["--root", str(node.root), "--kubelet-dir", directory]
        case ["labels"] | ["provision"]:
            words += [f"--root={node.root}"]
        case ["onload"]:
            pass
        case _:  # an agent
            words += [f"-root={node.root}", f"-kubelet-dir={directory}", "-once"]
    result = run_command(*words, env={"HOME": str(tmp_path)})
    # `inspect` finds no agent.
    assert result.returncode == (words[1] == "inspect"), result.stderr
    assert result.stdout
    if "-once" in words:
        assert all("error" not in found for found in json.loads(result.stdout).values())
