"""`accelplane dra cleanup`: removes what DRA drivers leave on a node that no longer uses them.

It refuses while claims are prepared or a driver is served, because pods with claims end only while their driver runs.
What the command needs is checked before anything is removed: a second run does not know the drivers any more.
"""

import asyncio
import contextlib
import glob
import logging
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from accelplane.apiserver import (
    ApiError,
    ApiServer,
    NoCredentials,
    NotFound,
    StatusError,
    Unreachable,
    load_config,
    object_path,
    resource_path,
)
from accelplane.dra.boot import BOOT_ID, MARKER
from accelplane.dra.journal import JournalError
from accelplane.dra.model import ClaimRef
from accelplane.dra.resourceslice import API_VERSIONS, GROUP, PLURAL
from accelplane.dra.store import ClaimStore
from accelplane.fpga import FpgaError
from accelplane.host import Host, HostError
from accelplane.kubelet import sockets
from accelplane.node.publishers.labels import dra_label_path

_OWNERS = "accelplane"  # the directory with the owners of units
# What this program has in the directory of a driver, which may have files of another program with the same driver.
_LOCK = "journal.lock"
_NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_OWN_FILES = (_LOCK, "publish.lock", "instance-*.lock", "dra*.sock")


class CleanupError(Exception):
    """Nothing was removed; the text says why."""


class _Metadata(Struct, frozen=True):
    name: str


class _Slice(Struct, frozen=True):
    metadata: _Metadata


class _NodeInfo(Struct, frozen=True):
    boot_id: str = msgspec.field(name="bootID", default="")


class _NodeStatus(Struct, frozen=True):
    node_info: _NodeInfo = msgspec.field(name="nodeInfo", default=_NodeInfo())


class _Node(Struct, frozen=True):
    status: _NodeStatus = _NodeStatus()


def run(
    *, root: str, kubelet_dir: str, cdi_dir: str, nfd_dir: str = "", node: str, kubeconfig: str, force: bool
) -> int:
    """Returns the exit code: 1 if something was not removed. `node` is needed for the slices of the API server."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr, format="%(message)s")
    try:
        drivers = sorted(_drivers(root, kubelet_dir))
        if drivers:
            _check_unserved(kubelet_dir, drivers)
            asyncio.run(_check_node(node, kubeconfig, Host(root).text_or_empty(BOOT_ID)))
        for driver in drivers:
            _remove_claims(driver, kubelet_dir, cdi_dir, Host(root), force=force)
    except (ApiError, CleanupError, JournalError, FpgaError, HostError, OSError) as error:
        print(f"accelplane dra cleanup: {_text(error)}", file=sys.stderr)
        return 1
    failed = False
    for driver in drivers:
        _remove_directory(f"{kubelet_dir}/plugins/{driver}")
        for path in glob.glob(f"{kubelet_dir}/plugins_registry/{glob.escape(driver)}-*.sock"):
            with contextlib.suppress(OSError):
                os.unlink(path)
        if nfd_dir:
            with contextlib.suppress(OSError):
                os.unlink(dra_label_path(nfd_dir, driver))
        print(f"{driver}: removed")
    shutil.rmtree(f"{kubelet_dir}/plugins/{_OWNERS}", ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(f"{cdi_dir}/{MARKER}")
    if not drivers:
        print(f"{kubelet_dir}/plugins: no DRA driver of this program has left anything")
    else:
        try:
            for name in asyncio.run(_remove_slices(node, drivers, kubeconfig)):
                print(f"ResourceSlice {name}: removed")
        except ApiError as error:
            failed = True
            print(
                f"accelplane dra cleanup: ResourceSlices not removed: {error}; the kubelet deletes them 30 s after the "
                "end of the driver",
                file=sys.stderr,
            )
    return 1 if failed else 0


def _text(error: Exception) -> str:
    text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)
    is_local = isinstance(error, (OSError, HostError, JournalError))
    return f"{text}; run the command as root" if is_local and os.geteuid() != 0 else text


def _drivers(root: str, kubelet_dir: str) -> Iterator[str]:
    """The drivers with a journal of this program. Raises `CleanupError` or `OSError`."""
    expected = (
        ("--root", root, "the root directory of the node"),
        ("--kubelet-dir", kubelet_dir, "the directory of the kubelet"),
    )
    for option, directory, words in expected:
        try:
            is_directory = stat.S_ISDIR(os.stat(directory).st_mode)
        except FileNotFoundError as error:
            raise CleanupError(f"{option} {directory}: {error.strerror}, expected {words}") from None
        if not is_directory:
            raise CleanupError(f"{option} {directory}: not a directory, expected {words}")
    plugins = f"{kubelet_dir}/plugins"
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(plugins):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.stat(f"{plugins}/{name}/{_LOCK}")
                yield name


def _remove_directory(directory: str) -> None:
    """Removes the files of this program, and the directory if nothing else is in it."""
    shutil.rmtree(f"{directory}/claims", ignore_errors=True)
    for pattern in _OWN_FILES:
        for path in glob.glob(f"{glob.escape(directory)}/{pattern}"):
            with contextlib.suppress(OSError):
                os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(directory)


def _check_unserved(kubelet_dir: str, drivers: Sequence[str]) -> None:
    for driver in drivers:
        for path in sorted(glob.glob(f"{glob.escape(kubelet_dir)}/plugins/{glob.escape(driver)}/dra*.sock")):
            if (process := sockets.listener(path)) is not None:
                raise CleanupError(
                    f"process {process} serves the driver {driver} at {path}; end the pods with its claims, delete its "
                    "DaemonSet, and run this command again"
                )


def _remove_claims(driver: str, kubelet_dir: str, cdi_dir: str, host: Host, *, force: bool) -> None:
    """Undoes what was done for claims. Without `force` raises `CleanupError` if claims are prepared."""
    store = ClaimStore(driver, f"{kubelet_dir}/plugins/{driver}", cdi_dir, groups=False)
    store.open(host.text_or_empty(BOOT_ID), host)
    try:
        entries = [*store.entries.values()]
        entries += [store.unknown_entry(ClaimRef("", uid, "")) for uid in store.damaged if uid not in store.entries]
        claims = sorted(entry.claim for entry in entries)
        if claims and not force:
            raise CleanupError(
                f"{driver}: claims are prepared: {', '.join(claims)}; delete their pods while the driver runs, or use "
                "--force, which takes the devices of running containers away"
            )
        for entry in entries:
            store.undo(entry, host.fresh())
            print(f"{driver}: claim {entry.claim} undone; its containers keep devices that are open")
        for path in glob.glob(f"{glob.escape(cdi_dir)}/k8s.{glob.escape(driver)}-claim_*"):
            os.unlink(path)
    finally:
        store.close()


async def _check_node(node: str, kubeconfig: str, boot_id: str) -> None:
    """Raises `CleanupError` for another node than this one, or `NoCredentials` if a given kubeconfig cannot be used.

    The kubelet writes the boot ID into its Node. The ResourceSlices of another node must not be removed. Without any
    kubeconfig, as on most nodes, the kubelet removes the slices.
    """
    if not node:
        raise CleanupError("the name of the node is not known; use --node or the variable NODE_NAME")
    if not _NODE_NAME.fullmatch(node):
        raise CleanupError(f"--node {node[:80]!a}: expected the name of a Node, such as worker-1")
    try:
        api = ApiServer(load_config(kubeconfig))
        api.check()
    except NoCredentials:
        if kubeconfig:
            raise
        return
    try:
        found = await api.get(resource_path("", "v1", "nodes", name=node), _Node)
    except (StatusError, Unreachable):
        return  # a deleted Node has no slices, and other errors are reported when slices are removed
    finally:
        api.close()
    expected = found.status.node_info.boot_id
    if boot_id and expected and boot_id != expected:
        raise CleanupError(
            f"--node {node}: the boot ID of the Node is {expected[:80]}, that of this host is {boot_id}; expected the "
            "name of the Node of this host"
        )


async def _remove_slices(node: str, drivers: Sequence[str], kubeconfig: str) -> list[str]:
    """The names of the slices of this node that were deleted. Raises `ApiError`."""
    api = ApiServer(load_config(kubeconfig))
    found: list[str] = []
    try:
        for version in API_VERSIONS:
            path = resource_path(GROUP, version, PLURAL)
            try:
                for driver in drivers:
                    query = {"fieldSelector": f"spec.nodeName={node},spec.driver={driver}"}
                    names: list[str] = []
                    await api.list(
                        path,
                        lambda items, names=names: names.extend(
                            msgspec.json.decode(item, type=_Slice).metadata.name for item in items
                        ),
                        query=query,
                    )
                    for name in names:
                        with contextlib.suppress(NotFound):
                            await api.delete(object_path(path, name))
                        found.append(name)
            except NotFound:
                continue
            return found
    finally:
        api.close()
    return found
