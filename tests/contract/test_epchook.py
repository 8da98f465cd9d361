"""`sgx_epchook` as a process, and its changes of a Node; `sgx-init.sh` and the program that it installs."""

import asyncio
import contextlib
import json
import os
import platform
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from apicalls import EPC_REGISTER, recorded
from hypothesis import given, settings
from hypothesis import strategies as st
from node_api import NodeApi, node_api
from processes import run_main
from thoroughness import examples
from tls_peer import Request, chunked, response, serving
from trees import write
from waiting import until

from accelplane.apiserver import ApiError, StatusError
from accelplane.cli import epchook
from accelplane.cli.epchook import Fatal, Hook
from accelplane.cli.staticprint import program
from accelplane.nodelabels import node_reconciler
from accelplane.nodelabels.node_reconciler import Node

EPC = 98566144
RESOURCE, LABEL = "sgx.intel.com/epc", "sgx.intel.com/capable"
IN_CLUSTER = {"NODE_NAME": "one", "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}


def tree(tmp_path: Path, *sizes: int) -> str:
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        write(root / f"sys/devices/system/node/node{number}/x86/sgx_total_bytes", f"{size}\n")
    return f"-root={root}"


def run_hook(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """An entry point of `epchook`, called in this process with this environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KUBERNETES_", "NODE_NAME"))}
    with patch.dict(os.environ, {**clean, **environment}, clear=True):
        return run_main(getattr(epchook, module), *arguments)


# The process.


@pytest.mark.parametrize(("sizes", "text"), [((), "0"), ((EPC,), str(EPC)), ((EPC, EPC), str(2 * EPC))])
def test_the_hook_prints_the_sum_and_no_end_of_the_line(tmp_path: Path, sizes: tuple[int, ...], text: str) -> None:
    result = run_hook("main", tree(tmp_path, *sizes))
    assert (result.returncode, result.stdout) == (0, f"sgx.intel.com/epc={text}")
    assert "starting" in result.stderr


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["-affirm"], 255, "EPC is not available"),
        (["-affirm", "-register"], 255, "EPC is not available"),
        (["-register"], 255, "NODE_NAME"),
        (["-output=elsewhere"], 255, "expected one of hook, feature-file, node-feature"),
        (["-nonsense"], 2, "-nonsense"),
        (["-register=perhaps"], 2, "register"),
        (["-h"], 0, "Usage of intel-sgx-epchook"),
    ],
)
def test_the_exit_status_is_that_of_the_go_program(tmp_path: Path, words: list[str], status: int, message: str) -> None:
    result = run_hook("main", tree(tmp_path), *words)
    assert (result.returncode, result.stdout) == (status, "")
    assert message in result.stderr


@pytest.mark.parametrize(("module", "status"), [("main", 255), ("install", 1)])
def test_a_missing_root_has_no_epc_size(tmp_path: Path, module: str, status: int) -> None:
    result = run_hook(module, f"-root={tmp_path}/mistyped", f"-features-dir={tmp_path}")
    assert (result.returncode, result.stdout) == (status, "")
    assert "mistyped': not a directory" in result.stderr


def test_registering_outside_of_a_cluster_is_fatal(tmp_path: Path) -> None:
    result = run_hook("main", tree(tmp_path, EPC), "-register", NODE_NAME="one")
    assert (result.returncode, result.stdout) == (255, "")
    assert "not in a cluster" in result.stderr


def test_a_label_without_memory_needs_no_cluster(tmp_path: Path) -> None:
    result = run_hook("main", tree(tmp_path), "-node-label")
    assert (result.returncode, result.stdout) == (0, "sgx.intel.com/epc=0")


def test_a_feature_file_needs_no_cluster_and_prints_nothing(tmp_path: Path) -> None:
    words = (tree(tmp_path, EPC), "-output=feature-file", f"-features-dir={tmp_path}", "-node-label")
    result = run_hook("main", *words)
    assert (result.returncode, result.stdout) == (0, "")
    file = tmp_path / "intel-sgx-epc.txt"
    assert file.read_text() == f"{LABEL}=true\n{RESOURCE}={EPC}\n"
    assert run_hook("main", *words, "-cleanup").returncode == 0
    assert not file.exists()


async def test_as_a_daemon_it_waits_for_its_end(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "accelplane.cli.epchook", tree(tmp_path, EPC), "-daemon", "-cleanup",
        "-output=feature-file", f"-features-dir={tmp_path}", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    file = tmp_path / "intel-sgx-epc.txt"
    await until(file.exists)
    process.terminate()
    await process.communicate()
    assert process.returncode == 0
    assert not file.exists()


# The Node.


@contextlib.asynccontextmanager
async def node_with_hook(tmp_path: Path, epc: int = EPC, **flags: Any) -> Any:
    async with node_api(tmp_path) as (api, peer):
        hook = Hook({name.replace("_", "-"): value for name, value in flags.items()}, epc, IN_CLUSTER)
        if hook.api is not None:
            hook.api = peer.api
        yield api, peer, hook


def operations(api: NodeApi) -> list[tuple[str, list[tuple[str, str, object]]]]:
    return [(path, [(each["op"], each["path"], each.get("value")) for each in body]) for path, body in api.patches]


ADD_EPC = ("add", "/status/capacity/sgx.intel.com~1epc", EPC)
ADD_LABEL = ("add", "/metadata/labels/sgx.intel.com~1capable", "true")


@pytest.mark.parametrize(
    ("flags", "epc", "expected"),
    [
        ({"register": True, "node-label": True}, EPC, [ADD_EPC, ADD_LABEL]),
        ({"register": True}, EPC, [ADD_EPC]),
        ({"node-label": True}, EPC, [ADD_LABEL]),
        ({"register": True, "node-label": True}, 0, [("add", ADD_EPC[1], 0)]),
    ],
)
async def test_all_changes_are_one_patch_of_the_node_status(
    tmp_path: Path, flags: dict[str, bool], epc: int, expected: list[Any]
) -> None:
    async with node_with_hook(tmp_path, epc, **flags) as (api, peer, hook):
        await epchook.once(hook)
        assert operations(api) == [("/api/v1/nodes/one/status", expected)]
        assert [request.method for request in peer.requests] == ["GET", "PATCH"]
        assert peer.requests[1].headers["content-type"] == "application/json-patch+json"


async def test_a_node_without_labels_and_capacity_gets_them(tmp_path: Path) -> None:
    async with node_with_hook(tmp_path, register=True, **{"node-label": True}) as (api, _peer, hook):
        api.node = {"metadata": {"name": "one", "resourceVersion": "1"}, "status": {}}
        await epchook.once(hook)
        assert api.node["status"]["capacity"] == {RESOURCE: str(EPC)}
        assert api.node["metadata"]["labels"] == {LABEL: "true"}


async def test_an_error_is_fatal_without_daemon_mode(tmp_path: Path) -> None:
    async with node_with_hook(tmp_path, register=True) as (api, _peer, hook):
        api.refuse["PATCH"] = [("403 Forbidden", {"reason": "Forbidden", "message": "no"})]
        with pytest.raises(StatusError, match="403"):
            await epchook.once(hook)


async def test_a_daemon_restores_removed_resources(tmp_path: Path) -> None:
    async with node_with_hook(tmp_path, register=True, **{"node-label": True}) as (api, peer, hook):
        keeper = asyncio.create_task(node_reconciler.run(peer.api, "one", hook.reconcile, interval=60))
        try:
            await until(lambda: len(api.patches) == 1)
            await api.change("status", "capacity", RESOURCE, "0")
            await until(lambda: len(api.patches) == 2)
            await api.change("metadata", "labels", LABEL, None)
            await until(lambda: len(api.patches) == 3)
            assert api.node["metadata"]["labels"] == {"a": "b", LABEL: "true"}
            await api.change("metadata", "labels", "of-others", "x")
            await api.change("status", "capacity", RESOURCE, None)
            await until(lambda: len(api.patches) == 4)
            assert api.node["status"]["capacity"] == {"cpu": "4", RESOURCE: str(EPC)}
            assert recorded(peer.requests) == EPC_REGISTER
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


async def test_a_daemon_continues_while_the_api_server_fails(tmp_path: Path) -> None:
    async with node_with_hook(tmp_path, register=True) as (api, peer, hook):
        api.refuse["GET"] = [("500 Internal Server Error", {})]
        api.refuse["PATCH"] = [("503 Service Unavailable", {})]
        keeper = asyncio.create_task(node_reconciler.run(peer.api, "one", hook.reconcile, interval=60))
        try:
            await until(lambda: len(api.patches) == 1)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


async def test_watches_that_end_immediately_are_retried_with_backoff(tmp_path: Path) -> None:
    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        node = {"metadata": {"name": "one", "resourceVersion": "1"}}
        writer.write(chunked() if "watch=" in request.path else response("200 OK", json.dumps(node).encode()))

    async def is_done(_node: Node) -> bool:
        return False

    async with serving(tmp_path, answer) as peer:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await node_reconciler.run(peer.api, "one", is_done, interval=60)
        assert len(peer.requests) <= 2


async def test_with_the_rights_of_the_original_manifest_a_node_is_read_again_instead_of_watched(tmp_path: Path) -> None:
    requests: list[Node] = []

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        node = {"metadata": {"name": "one", "resourceVersion": "1"}}
        refused = response("403 Forbidden", b'{"reason": "Forbidden"}')
        writer.write(refused if "watch=" in request.path else response("200 OK", json.dumps(node).encode()))

    async def is_done(node: Node) -> bool:
        requests.append(node)
        return False

    async with serving(tmp_path, answer) as peer:
        keeper = asyncio.create_task(node_reconciler.run(peer.api, "one", is_done, interval=60))
        try:
            await until(lambda: len(requests) == 2)
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)


@pytest.mark.parametrize("flags", [{}, {"register": True, "node-label": True}])
async def test_cleanup_removes_both_and_nothing_else(tmp_path: Path, flags: dict[str, bool]) -> None:
    async with node_with_hook(tmp_path, cleanup=True, **flags) as (api, _peer, hook):
        api.node["metadata"]["labels"][LABEL] = "true"
        api.node["status"]["capacity"][RESOURCE] = str(EPC)
        await epchook.once(hook)
        assert api.node["metadata"]["labels"] == {"a": "b"}
        assert api.node["status"]["capacity"] == {"cpu": "4"}
        api.patches.clear()
        await epchook.once(hook)
        assert api.patches == []


async def test_cleanup_retries_after_a_conflict(tmp_path: Path) -> None:
    async with node_with_hook(tmp_path, cleanup=True, register=True) as (api, peer, hook):
        api.node["status"]["capacity"][RESOURCE] = str(EPC)
        api.refuse["PATCH"] = [("422 Unprocessable Entity", {})]
        await epchook.once(hook)
        assert RESOURCE not in api.node["status"]["capacity"]
        assert [request.method for request in peer.requests] == ["GET", "PATCH"] * 2


async def test_the_nodefeature_is_owned_by_the_node(tmp_path: Path) -> None:
    flags = {"node-label": True, "output": "node-feature", "namespace": "nfd"}
    path = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/nfd/nodefeatures/one-sgx-epc"
    async with node_with_hook(tmp_path, **flags) as (api, _peer, hook):
        await epchook.once(hook)
        assert api.patches == []
        (instance,) = api.others.values()
        assert list(api.others) == [path]
        assert instance["metadata"]["labels"] == {"nfd.node.kubernetes.io/node-name": "one"}
        assert instance["metadata"]["ownerReferences"][0]["uid"] == "u1"
        assert instance["spec"]["labels"] == {RESOURCE: str(EPC), LABEL: "true"}
        assert instance["spec"]["features"]["attributes"]["local.label"]["elements"][RESOURCE] == str(EPC)
        hook.cleanup = True
        await epchook.once(hook)
        assert api.deleted == [path]


def test_missing_api_configuration_is_reported() -> None:
    with pytest.raises(Fatal, match="NODE_NAME"):
        Hook({"register": True}, EPC, {})
    with pytest.raises(ApiError, match="not in a cluster"):
        Hook({"register": True}, EPC, {"NODE_NAME": "one"})


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("98566144", 98566144), ("98M", 98_000_000), ("94Mi", 98566144), ("4096k", 4_096_000), ("1Ei", 2**60),
     (None, None), ("", None), ("1.5Gi", None), ("100m", None), ("1e3", None), ("-1", None), ("junk", None)],
)  # fmt: skip
def test_amounts_are_compared_as_numbers(text: str | None, number: int | None) -> None:
    assert node_reconciler.amount(text) == number


# sgx-init.sh.


def installed(tmp_path: Path, *places: str) -> subprocess.CompletedProcess[str]:
    for place in places:
        (tmp_path / place).mkdir()
    directories = (f"-source-dir={tmp_path}/source.d", f"-features-dir={tmp_path}/features.d")
    return run_hook("install", tree(tmp_path, EPC), *directories)


on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="installs a program for x86-64")


@on_x86
def test_the_installed_hook_runs_without_an_environment(tmp_path: Path) -> None:
    result = installed(tmp_path, "source.d")
    assert (result.returncode, result.stdout) == (0, "")
    hook = tmp_path / "source.d/intel-sgx-epchook"
    assert stat.S_IMODE(hook.stat().st_mode) == 0o755
    assert hook.stat().st_size < 1000
    assert os.listdir(hook.parent) == [hook.name]
    ran_hook = subprocess.run([hook], capture_output=True, text=True, check=False, env={})
    assert (ran_hook.returncode, ran_hook.stdout, ran_hook.stderr) == (0, f"{RESOURCE}={EPC}", "")


@on_x86
def test_an_older_hook_is_replaced_even_while_it_runs(tmp_path: Path) -> None:
    write(tmp_path / "source.d/intel-sgx-epchook", b"an older one")
    with open(tmp_path / "source.d/intel-sgx-epchook", "rb") as old:
        (tmp_path / "features.d").mkdir()
        assert run_hook("install", tree(tmp_path, EPC), f"-source-dir={tmp_path}/source.d").returncode == 0
        assert old.read() == b"an older one"
    assert (tmp_path / "source.d/intel-sgx-epchook").read_bytes().startswith(b"\x7fELF")


def test_a_feature_file_is_written_if_its_directory_exists(tmp_path: Path) -> None:
    assert installed(tmp_path, "features.d").returncode == 0
    assert (tmp_path / "features.d/intel-sgx-epc.txt").read_text() == f"{RESOURCE}={EPC}\n"


def test_the_installation_fails_without_a_writable_directory(tmp_path: Path) -> None:
    result = installed(tmp_path)
    assert result.returncode == 1
    assert "is a directory; mount one of them" in result.stderr


@on_x86
@settings(max_examples=examples(20))
@given(st.binary(max_size=4096))
def test_the_program_prints_any_text_and_reports_write_errors(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "program"
    path.unlink(missing_ok=True)
    path.write_bytes(program(text))
    path.chmod(0o755)
    result = subprocess.run([path], capture_output=True, check=False)
    assert (result.returncode, result.stdout) == (0, text)
    if text:
        with open(os.open("/dev/full", os.O_WRONLY), "wb") as full:
            assert subprocess.run([path], stdout=full, check=False).returncode == 1


def test_a_text_longer_than_a_pipe_buffer_is_rejected() -> None:
    with pytest.raises(ValueError, match="65537 bytes"):
        program(b"x" * 65537)
