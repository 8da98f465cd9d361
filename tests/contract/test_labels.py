"""Labels of a node's hardware: printed, for NFD, on the Node, and by the agent."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from apicalls import LABELS, recorded
from conftest import Run
from node_api import node_api
from processes import run_main
from trees import gpu_card, link, write
from waiting import until

from accelplane.cli import labels
from accelplane.cli.labels import Options
from accelplane.host import Host
from accelplane.node.periodic_scan import periodic_scan
from accelplane.node.subprocess_supervisor import supervise
from accelplane.node.watcher import Watcher
from accelplane.nodelabels import node_reconciler

pytestmark = pytest.mark.memory

GPU = "intel.feature.node.kubernetes.io/gpu"
SGX = "intel.feature.node.kubernetes.io/sgx"
EPC = 98566144


def module(root: Path, *names: str) -> None:
    write(root / "proc/modules", "".join(f"{name} 1 0 - Live 0x0\n" for name in names))


def gpu(root: Path, index: int = 0) -> None:
    """A Flex 170 with the files that the rules read."""
    function = gpu_card(root, index, device_id="0x56c0")
    write(function / "class", "0x038000\n")
    link(root / "sys/bus/pci/devices" / function.name, function)


def sgx(root: Path) -> None:
    write(root / "proc/cpuinfo", "processor : 0\nflags : sgx sgx_lc\n")
    write(root / "sys/devices/system/node/node0/x86/sgx_total_bytes", f"{EPC}\n")
    write(root / "sys/class/misc/sgx_enclave/dev", "10:125\n")


def run_labels(*arguments: str) -> "subprocess.CompletedProcess[str]":
    cluster = [name for name in os.environ if name.startswith(("KUBERNETES_", "NODE_NAME"))]
    with patch.dict(os.environ):
        for name in cluster:
            del os.environ[name]
        return run_main(labels.main, *arguments)


# Printed.


def test_without_a_drm_directory_no_labels_of_gpu_capacity_are_printed(tmp_path: Path) -> None:
    sgx(tmp_path)
    labels = run_labels(f"-root={tmp_path}", "-gpu", "-output=json")
    assert "gpu.intel.com/tiles" not in labels.stdout
    (tmp_path / "sys/class/drm").mkdir(parents=True)
    assert '"gpu.intel.com/tiles": "0"' in run_labels(f"-root={tmp_path}", "-gpu", "-output=json").stdout


def test_labels_and_resources_are_printed(tmp_path: Path) -> None:
    gpu(tmp_path)
    module(tmp_path, "i915")
    sgx(tmp_path)
    result = run_labels(f"-root={tmp_path}")
    assert result.returncode == 0
    rows = [line.split() for line in result.stdout.splitlines() if line]
    assert rows[0] == ["LABEL", "VALUE"]
    assert [GPU, "true"] in rows
    assert ["gpu.intel.com/product", "Flex_170"] in rows
    assert rows[-2:] == [["RESOURCE", "AMOUNT"], ["sgx.intel.com/epc", str(EPC)]]
    document = json.loads(run_labels(f"-root={tmp_path}", "-output=json").stdout)
    assert document["labels"][SGX] == "true"
    assert document["resources"] == {"sgx.intel.com/epc": str(EPC)}


def test_a_node_without_matching_rules_prints_a_message(tmp_path: Path) -> None:
    assert run_labels(f"-root={tmp_path}").stdout == "no rule matches this node\n"
    assert json.loads(run_labels(f"-root={tmp_path}", "-output=json").stdout) == {"labels": {}, "resources": {}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-output=paper"], "expected one of table, json, nfd, node"),
        (["-daemon"], "expected -output=nfd or -output=node"),
        (["-output=node"], "-node-name"),
        (["-output=node", "-node-name=one"], "not in a cluster"),
        (["-root=/nowhere"], "/nowhere: not a directory"),
        (["-output=nfd", "-features-dir=/nowhere"], "/nowhere"),
    ],
)
def test_invalid_options_are_rejected_with_a_message(tmp_path: Path, words: list[str], message: str) -> None:
    gpu(tmp_path)
    result = run_labels(f"-root={tmp_path}", *words)
    assert result.returncode == 1
    assert message in result.stderr


# For NFD.


def test_a_feature_file_is_written_and_removed(tmp_path: Path) -> None:
    gpu(tmp_path)
    sgx(tmp_path)
    words = (f"-root={tmp_path}", "-output=nfd", f"-features-dir={tmp_path}")
    assert run_labels(*words).returncode == 0
    file = tmp_path / "accelplane-features.txt"
    assert f"{SGX}=true\n" in file.read_text()
    assert "sgx.intel.com/epc" not in file.read_text()
    assert run_labels(*words, "-epc").returncode == 0
    assert f"sgx.intel.com/epc={EPC}\n" in file.read_text()
    assert run_labels(*words, "-cleanup").returncode == 0
    assert not file.exists()


async def test_a_daemon_updates_the_file_and_exits_at_the_end_of_stdin(tmp_path: Path) -> None:
    root, directory = tmp_path / "root", tmp_path / "features.d"
    directory.mkdir()
    gpu(root)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "accelplane.cli.labels", f"-root={root}", "-output=nfd", f"-features-dir={directory}",
        "-daemon", "-until-stdin-ends", "-cleanup", stdin=asyncio.subprocess.PIPE,
    )  # fmt: skip
    file = directory / "accelplane-features.txt"
    await until(file.exists)
    assert f"{GPU}=true\n" not in file.read_text()
    module(root, "i915")
    await until(lambda: f"{GPU}=true\n" in file.read_text())
    gpu(root, 1)
    await until(lambda: "gpu.intel.com/device.count=2\n" in file.read_text())
    assert process.stdin
    process.stdin.close()
    async with asyncio.timeout(10):
        assert await process.wait() == 0
    assert not file.exists()


# On the Node.


def options(root: Path, **more: Any) -> Options:
    flags = {"output": "node", "node-name": "one", "root": str(root), **more}
    return Options.from_flags(flags, {})


@contextlib.asynccontextmanager
async def keeping(options: Options, api: Any) -> AsyncGenerator[None]:
    task = asyncio.create_task(labels.run(options, api))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_labels_are_applied_to_the_node_by_its_uid(tmp_path: Path) -> None:
    root = tmp_path / "root"
    gpu(root)
    module(root, "i915")
    async with node_api(tmp_path) as (api, peer):
        await labels.run(options(root), peer.api)
        ((path, body),) = api.patches
        assert path == "/api/v1/nodes/one?fieldManager=accelplane-labels"
        assert peer.requests[-1].headers["content-type"] == "application/apply-patch+yaml"
        assert (body["apiVersion"], body["kind"]) == ("v1", "Node")
        assert (body["metadata"]["name"], body["metadata"]["uid"]) == ("one", "u1")
        assert body["metadata"]["labels"][GPU] == "true"
        assert "status" not in body


async def test_epc_is_applied_to_the_node_status_with_the_flag(tmp_path: Path) -> None:
    root = tmp_path / "root"
    sgx(root)
    async with node_api(tmp_path) as (api, peer):
        await labels.run(options(root, epc=True), peer.api)
        assert [path for path, _body in api.patches] == [
            "/api/v1/nodes/one?fieldManager=accelplane-labels",
            "/api/v1/nodes/one/status?fieldManager=accelplane-labels&force=true",
        ]
        assert api.patches[1][1]["status"] == {"capacity": {"sgx.intel.com/epc": str(EPC)}}


async def test_the_calls_are_those_of_the_role(tmp_path: Path) -> None:
    root = tmp_path / "root"
    gpu(root)
    module(root, "i915")
    sgx(root)
    async with node_api(tmp_path) as (api, peer), keeping(options(root, daemon=True, epc=True), peer.api):
        await until(lambda: any("watch=" in request.path for request in peer.requests))
        await until(lambda: len(api.patches) == 2)
    assert recorded(peer.requests) == LABELS


async def test_cleanup_applies_empty_maps(tmp_path: Path) -> None:
    root = tmp_path / "root"
    sgx(root)
    async with node_api(tmp_path) as (api, peer):
        await labels.run(options(root, epc=True, cleanup=True), peer.api)
        assert [body.get("status") for _path, body in api.patches] == [None, {"capacity": {}}]
        assert api.patches[0][1]["metadata"]["labels"] == {}


async def test_a_daemon_restores_removed_labels_and_follows_the_hardware(tmp_path: Path) -> None:
    root = tmp_path / "root"
    gpu(root)
    module(root, "i915")
    async with node_api(tmp_path) as (api, peer), keeping(options(root, daemon=True), peer.api):
        await until(lambda: GPU in api.node["metadata"]["labels"])
        await api.change("metadata", "labels", GPU, None)
        await until(lambda: GPU in api.node["metadata"]["labels"])
        before = len(api.patches)
        module(root)
        await until(lambda: len(api.patches) > before)
        assert GPU not in api.patches[-1][1]["metadata"]["labels"]


def conflict(*keys: str) -> tuple[str, dict[str, Any]]:
    causes = [{"reason": "FieldManagerConflict", "field": f".metadata.labels.{key}", "message": "x"} for key in keys]
    return "409 Conflict", {"reason": "Conflict", "message": "conflict", "details": {"causes": causes}}


async def test_a_conflicting_label_of_another_manager_is_unchanged(tmp_path: Path) -> None:
    async with node_api(tmp_path) as (api, peer):
        api.node["metadata"]["labels"]["x/mine"] = "theirs"
        desired = node_reconciler.Labels(peer.api, "me", {"x/mine": "ours", "x/other": "1"})
        api.refuse["PATCH"] = [conflict("x/mine")]
        assert await desired.reconcile(await node_reconciler.read(peer.api, "one"))
        assert api.node["metadata"]["labels"] == {"a": "b", "x/mine": "theirs", "x/other": "1"}
        assert not await desired.reconcile(await node_reconciler.read(peer.api, "one"))
        # After the other manager has removed it, the label is set.
        await api.change("metadata", "labels", "x/mine", None)
        assert await desired.reconcile(await node_reconciler.read(peer.api, "one"))
        assert api.node["metadata"]["labels"]["x/mine"] == "ours"


async def test_another_conflict_is_raised(tmp_path: Path) -> None:
    async with node_api(tmp_path) as (api, peer):
        api.refuse["PATCH"] = [("409 Conflict", {"reason": "Conflict", "message": "uid mismatch"})]
        with pytest.raises(node_reconciler.StatusError, match="uid mismatch"):
            await node_reconciler.Labels(peer.api, "me", {"x": "1"}).reconcile(
                await node_reconciler.read(peer.api, "one")
            )


# In the agent.


async def test_the_agent_writes_the_same_labels_for_nfd(run: Run, tmp_path: Path) -> None:
    gpu(tmp_path / "tree")
    directory = tmp_path / "features.d"
    directory.mkdir()
    process = run("accelplane", "node", "--labels=nfd", f"--nfd-dir={directory}", "--plugins=npu")
    file = directory / "accelplane-features.txt"
    await until(file.exists)
    module(tmp_path / "tree", "xe")
    await until(lambda: f"{GPU}=true\n" in file.read_text())
    assert await process.terminate() == 0
    assert not file.exists()


async def test_a_failing_labeller_does_not_stop_the_agent(run: Run) -> None:
    clean = {"KUBERNETES_SERVICE_HOST": "", "NODE_NAME": "one"}
    process = run("accelplane", "node", "--labels=node", "--plugins=npu", env=clean)
    await process.wait_for_log("accelplane labels: not in a cluster")
    await process.wait_for_log("labels: exited with status 1; retrying in 1 s")
    await process.wait_for_log("retrying in 2 s")
    assert await process.terminate() == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--labels=paper"], "expected one of off, nfd, node"),
        (["--labels=nfd"], "found without -nfd-dir"),
    ],
)
async def test_invalid_label_options_are_rejected(run: Run, words: list[str], message: str) -> None:
    process = run("accelplane", "node", *words)
    assert await process.exit_code() == 1
    assert message in process.log()


async def test_a_supervised_process_is_restarted_and_stopped_with_its_supervisor(tmp_path: Path) -> None:
    log = tmp_path / "lives"
    life = f"import os, sys; open({str(log)!r}, 'a').write(f'{{os.getpid()}}\\n'); os.read(0, 1)"
    task = asyncio.create_task(supervise("life", [sys.executable, "-c", life]))
    await until(log.exists)
    await until(lambda: len(log.read_text().split()) == 1)
    os.kill(int(log.read_text().split()[0]), 9)
    await until(lambda: len(log.read_text().split()) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for pid in map(int, log.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_missing_supervised_program_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    task = asyncio.create_task(supervise("labels", ["/nowhere/at-all"]))
    await until(
        lambda: "labels: cannot start /nowhere/at-all: No such file or directory; retrying in 1 s" in caplog.text
    )
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_directories_read_by_a_scan_are_watched(tmp_path: Path) -> None:
    watcher = Watcher()
    watcher.start()

    def text(host: Host) -> str:
        host.note("odd")
        return host.text("/sys/x/value") if host.exists("/sys/x/value") else ""

    try:
        (tmp_path / "sys").mkdir()
        found = periodic_scan("test", str(tmp_path), text, watcher, subsystems=frozenset(), interval=60)
        async with contextlib.aclosing(found), asyncio.timeout(10):
            assert await anext(found) == ""
            write(tmp_path / "sys/x/value", "1\n")
            while await anext(found) != "1":
                pass
            write(tmp_path / "sys/x/value", "2\n")
            while await anext(found) != "2":
                pass
    finally:
        watcher.close()


async def test_periodic_scans_run_without_events(tmp_path: Path) -> None:
    watcher = Watcher()
    found = periodic_scan("test", str(tmp_path), lambda _host: 1, watcher, subsystems=frozenset(), interval=0.01)
    async with contextlib.aclosing(found):
        assert [await anext(found) for _ in range(3)] == [1, 1, 1]
