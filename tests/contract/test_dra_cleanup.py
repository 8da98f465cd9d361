"""`accelplane dra cleanup`: case 62."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from dranodes import GPU, DraNode
from msgspec.structs import replace
from sliceservers import NODE, SliceServer
from waiting import until

from accelplane.apiserver import ClientConfig, NoCredentials
from accelplane.cli import dracleanup
from accelplane.dra.boot import MARKER


@pytest.fixture
async def node(directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[DraNode]:
    async with SliceServer() as server:
        config: ClientConfig = server.config
        monkeypatch.setattr(dracleanup, "load_config", lambda _kubeconfig: config)
        node = DraNode(directory, tmp_path, server)
        async with node.kubelet:
            yield node


async def clean_up(node: DraNode, *, force: bool = False, options: Mapping[str, str] = {}) -> int:
    settings = node.settings
    return await asyncio.to_thread(
        lambda: dracleanup.run(
            force=force,
            **{
                "root": settings.root,
                "kubelet_dir": settings.kubelet_dir,
                "cdi_dir": settings.cdi_dir,
                "node": NODE,
                "kubeconfig": "",
                **options,
            },
        )
    )


def left(node: DraNode) -> list[str]:
    """What is below the kubelet's `plugins`, files of claims, and the marker of the boot."""
    plugins = Path(node.directory, "plugins")
    found = [str(path.relative_to(plugins)) for path in plugins.rglob("*")]
    return sorted((*found, *(name for name in os.listdir(node.settings.cdi_dir) if name.startswith(("k8s.", MARKER)))))


async def test_it_refuses_while_a_driver_is_served_or_claims_are_prepared(
    node: DraNode, capsys: pytest.CaptureFixture[str]
) -> None:
    async with node.agent_running():
        first, _second = await node.until_registered()
        await node.run_pod("a", node.allocate(first, "a", name="claim"))
        assert await clean_up(node) == 1
        assert f"serves the driver {GPU} at" in capsys.readouterr().err
    assert await clean_up(node) == 1
    assert "claims are prepared: default/claim; delete their pods" in capsys.readouterr().err
    assert node.published()


async def test_it_leaves_nothing_after_the_pods_have_ended(node: DraNode, tmp_path: Path) -> None:
    node.settings = replace(node.settings, nfd_dir=str(tmp_path / "features.d"))
    os.mkdir(node.settings.nfd_dir)
    async with node.agent_running():
        first, _second = await node.until_registered()
        await node.run_pod("a", node.allocate(first, "a"))
        node.kubelet.delete_pod("a")
        await until(lambda: not node.claims())
    assert os.listdir(node.settings.nfd_dir) == [f"accelplane-dra-{GPU}.txt"]
    assert await clean_up(node, options={"nfd_dir": node.settings.nfd_dir}) == 0
    assert left(node) == os.listdir(node.settings.nfd_dir) == []
    assert node.published() == []
    assert await clean_up(node) == 0


async def test_files_of_other_programs_stay(node: DraNode, capsys: pytest.CaptureFixture[str]) -> None:
    async with node.agent_running():
        await node.until_registered()
    checkpoint = Path(node.directory, "plugins", GPU, "preparedClaims.json")
    other = Path(node.directory, "plugins/other.example.com/claims/journal")
    other.parent.mkdir(parents=True)
    for path in (checkpoint, other):
        path.write_text("{}")
    assert await clean_up(node) == 0
    assert await clean_up(node) == 0
    assert "no DRA driver of this program has left anything" in capsys.readouterr().out
    assert {path for path in Path(node.directory, "plugins").rglob("*") if path.is_file()} == {checkpoint, other}


async def test_by_force_claims_are_undone(node: DraNode, capsys: pytest.CaptureFixture[str]) -> None:
    async with node.agent_running():
        first, _second = await node.until_registered()
        await node.run_pod("a", node.allocate(first, "a", name="claim"))
    assert await clean_up(node, force=True) == 0
    assert "claim default/claim undone" in capsys.readouterr().out
    assert left(node) == []


async def test_a_claim_with_a_damaged_journal_file_is_prepared(
    node: DraNode, capsys: pytest.CaptureFixture[str]
) -> None:
    async with node.agent_running():
        first, _second = await node.until_registered()
        await node.run_pod("a", node.allocate(first, "a", name="claim"))
    (file,) = Path(node.directory, "plugins", GPU, "claims").iterdir()
    file.write_text("")
    assert await clean_up(node) == 1
    assert f"claims are prepared: {file.stem}; delete their pods" in capsys.readouterr().err
    assert await clean_up(node, force=True) == 0
    assert f"claim {file.stem} undone" in capsys.readouterr().out
    assert left(node) == []


async def test_without_the_api_server_the_node_is_cleaned_and_the_slices_are_reported(
    node: DraNode, capsys: pytest.CaptureFixture[str]
) -> None:
    async with node.agent_running():
        await node.until_registered()
    await node.server.stop()
    assert await clean_up(node) == 1
    assert "ResourceSlices not removed" in capsys.readouterr().err
    assert left(node) == []


WRONG = {
    "no name of the node": ({"node": ""}, "use --node or the variable NODE_NAME"),
    "a name that is none": ({"node": "a,spec.driver=b"}, "expected the name of a Node"),
    "another root": ({"root": "/nonexistent"}, "/nonexistent: No such file or directory"),
    "a file as root": ({"root": __file__}, "not a directory"),
    "another kubelet": ({"kubelet_dir": "/nonexistent"}, "/nonexistent: No such file or directory"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_with_wrong_options_nothing_is_removed(
    node: DraNode, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options, problem = WRONG[case]
    async with node.agent_running():
        await node.until_registered()
    before = left(node)
    assert await clean_up(node, force=True, options=options) == 1
    assert problem in capsys.readouterr().err
    assert left(node) == before
    assert len(node.published()) == 2


async def test_the_slices_of_another_node_are_not_removed(node: DraNode, capsys: pytest.CaptureFixture[str]) -> None:
    async with node.agent_running():
        await node.until_registered()
    node.server.put("nodes", {"metadata": {"name": NODE}, "status": {"nodeInfo": {"bootID": "another"}}})
    boot_id = Path(node.settings.root, "proc/sys/kernel/random/boot_id")
    boot_id.parent.mkdir(parents=True, exist_ok=True)
    boot_id.write_text("this\n")
    assert await clean_up(node) == 1
    assert "the boot ID of the Node is another, that of this host is this" in capsys.readouterr().err
    assert len(node.published()) == 2


@pytest.mark.parametrize("given", [True, False])
async def test_a_kubeconfig_that_is_given_must_be_usable(
    node: DraNode, given: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most nodes have none, and the kubelet removes the slices."""

    def unusable(_path: str) -> ClientConfig:
        raise NoCredentials("/etc/config", "expected a kubeconfig")

    monkeypatch.setattr(dracleanup, "load_config", unusable)
    async with node.agent_running():
        await node.until_registered()
    assert await clean_up(node, options={"kubeconfig": "/etc/config" if given else ""}) == 1
    assert ("ResourceSlices not removed" in capsys.readouterr().err) is not given
    assert bool(left(node)) is given


async def test_a_directory_that_cannot_be_read_is_an_error(
    node: DraNode, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = f"{node.directory}/plugins"

    def denied(path: str) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(dracleanup.os, "listdir", denied)
    monkeypatch.setattr(dracleanup.os, "geteuid", lambda: 65534)
    assert await clean_up(node) == 1
    assert f"{plugins}: Permission denied; run the command as root" in capsys.readouterr().err
