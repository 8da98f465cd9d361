"""A cluster for people: ``python -m tests.cluster up``, then kubectl, then ``python -m tests.cluster down``."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .build import ClusterError, assets, build
from .cluster import Cluster
from .hardware import plug_sample_gpu
from .node import Node, NodePlan
from .state import Claim, clusters, find, remove


def main() -> int:
    chosen = _parser().parse_args()
    # SIGHUP must clean up like SIGINT, even if the shell ignores it for its jobs.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        return int(chosen.do(chosen) or 0)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def up(chosen: argparse.Namespace) -> None:
    if not chosen.no_build:
        build(lambda text: print(text, file=sys.stderr, flush=True))
    started = time.monotonic()

    def hardware(node: Node) -> None:
        with tempfile.TemporaryDirectory() as tree:
            plug_sample_gpu(node, Path(tree), cards=chosen.cards)

    plans = [
        NodePlan(name=f"node-{position}", hardware=[hardware] if chosen.cards else [])
        for position in range(1, chosen.nodes + 1)
    ]
    with Cluster.running(plans, name=chosen.name, owned=False, shares=chosen.share) as cluster:
        for archive in chosen.image:
            cluster.import_image(archive)
        if chosen.kwok:
            cluster.add_kwok_nodes(chosen.kwok)
        cluster.leave_running()
    print(f"ready after {time.monotonic() - started:.1f} s; programs in {assets().path}", file=sys.stderr)
    print(f"export KUBECONFIG={cluster.kubeconfig} PATH={assets().path}:$PATH")


def down(chosen: argparse.Namespace) -> None:
    claim = _found(chosen.name)
    remove(claim)
    print(f"{chosen.name}: gone, with everything it had")


def status(_: argparse.Namespace) -> None:
    found = clusters()
    if not found:
        print("no clusters")
    for claim in found:
        name = f"{claim.name}, owned by its test" if claim.owned else claim.name
        print(f"{claim.number}: {name}, export KUBECONFIG={claim.directory / 'kubeconfig'}")
        for machine, process in sorted(claim.machines().items()):
            print(f"   {machine}: process {process}, files and logs in {claim.directory / machine}")


def enter(chosen: argparse.Namespace) -> int:
    claim = _found(chosen.name)
    machines = claim.machines()
    if chosen.machine not in machines:
        raise ClusterError(f"{chosen.machine}: not a machine of {chosen.name}; there are: {', '.join(machines)}")
    # unshare is the parent of the machine's first process.
    parent = machines[chosen.machine]
    first = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()[0]
    namespaces = ["--mount", "--net", "--pid", "--uts", "--ipc", "--wd=/"]
    command = ["nsenter", f"--target={first}", *namespaces, "--", *(chosen.command or ["sh"])]
    return subprocess.run(command, check=False).returncode


def _found(name: str) -> Claim:
    if claim := find(name):
        return claim
    others = ", ".join(claim.name for claim in clusters() if not claim.owned) or "none"
    raise ClusterError(f"no cluster is named {name}; there are: {others}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="up | down | status | enter")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default="dev", help="which cluster, when there are several (default: %(default)s)")

    command = commands.add_parser("up", parents=[named], help="start a cluster and print how to reach it")
    command.add_argument("--nodes", type=int, default=1, metavar="N", help="real nodes (default: %(default)s)")
    command.add_argument(
        "--cards", type=int, default=1, metavar="N", help="simulated GPUs a node (default: %(default)s)"
    )
    command.add_argument("--kwok", type=int, default=0, metavar="N", help="kwok nodes in addition")
    command.add_argument("--image", type=Path, action="append", default=[], help="import this image archive")
    command.add_argument(
        "--share", type=Path, action="append", default=[], metavar="DIR", help="show this directory to the machines"
    )
    command.add_argument("--no-build", action="store_true", help="fail rather than build what is missing")
    command.set_defaults(do=up)

    command = commands.add_parser("down", parents=[named], help="remove a cluster and everything of it")
    command.set_defaults(do=down)

    command = commands.add_parser("status", help="list the clusters of this computer")
    command.set_defaults(do=status)

    command = commands.add_parser("enter", parents=[named], help="run a command in a machine, by default a shell")
    command.add_argument("machine", help="control, node-1, …")
    command.add_argument("command", nargs=argparse.REMAINDER)
    command.set_defaults(do=enter)
    return parser


if __name__ == "__main__":
    sys.exit(main())
