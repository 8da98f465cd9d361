"""`accelplane labels`: what this node is for, as the labels that node-feature-discovery (NFD) would give it.

Printed, given to NFD as a feature file, or written to the Node where there is no NFD; once, or as a daemon that
follows the hardware and puts right what somebody else changed. Labels on the Node are owned by server-side apply, so
that those that hold no longer go, and nobody else's are touched.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from accelplane.apiserver import ApiError, ApiServer
from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Flag, Value, parse_or_exit
from accelplane.features import Outcome, judged, look, upkeep
from accelplane.features.upkeep import Node
from accelplane.host import Host
from accelplane.node.periodic_scan import periodic_scan
from accelplane.node.publishers.labels import LabelFile
from accelplane.node.watcher import Watcher

log = logging.getLogger(__name__)

PROGRAM = "accelplane labels"
FIELD_MANAGER = "accelplane-labels"
FEATURE_FILE = "accelplane-features.txt"
OUTPUTS = ("table", "json", "nfd", "node")
# Uevents that may change what the rules look at; `misc` is where the driver of SGX shows itself.
SUBSYSTEMS = frozenset(("pci", "module", "misc"))
SAFETY_INTERVAL = 600.0

FLAGS = (
    Flag("output", "table", "table or json: print; nfd: write a feature file; node: write the Node's labels"),
    Flag("daemon", False, "with -output=nfd or node: follow the hardware until SIGTERM or SIGINT"),
    Flag("cleanup", False, "remove what was written, the resource only with -epc: at once, or with -daemon at the end"),
    Flag("epc", False, "also make the memory for SGX enclaves known, on the Node as an extended resource"),
    Flag("features-dir", "/etc/kubernetes/node-feature-discovery/features.d", "directory of -output=nfd"),
    Flag("node-name", "", "name of the Node, $NODE_NAME when empty"),
    Flag("root", "/", "read sysfs and procfs under this directory"),
    Flag("until-stdin-ends", False, "with -daemon: end when standard input does, as for a process that another keeps"),
    *logflags.FLAGS,
)

_API_INTERVAL = 300.0
_CLEANUP_DEADLINE = 20.0


class UsageError(Exception):
    """The command line asks for what cannot be."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done."""

    output: str
    daemon: bool
    cleanup: bool
    epc: bool
    features_dir: str
    node_name: str
    root: str
    until_stdin_ends: bool

    @classmethod
    def of(cls, given: Mapping[str, Value], environment: Mapping[str, str]) -> "Plan":
        """Raises `UsageError`."""
        values = {flag.name: flag.default for flag in FLAGS} | dict(given)
        plan = cls(
            output=str(values["output"]),
            daemon=bool(values["daemon"]),
            cleanup=bool(values["cleanup"]),
            epc=bool(values["epc"]),
            features_dir=os.path.abspath(str(values["features-dir"])),
            node_name=str(values["node-name"]) or environment.get("NODE_NAME", ""),
            root=os.path.abspath(str(values["root"])),
            until_stdin_ends=bool(values["until-stdin-ends"]),
        )
        if plan.output not in OUTPUTS:
            raise UsageError(f"-output: {plan.output!a}: expected one of {', '.join(OUTPUTS)}")
        if (plan.daemon or plan.cleanup) and plan.output not in ("nfd", "node"):
            raise UsageError("-daemon and -cleanup go with -output=nfd or -output=node")
        if plan.output == "node" and not plan.node_name:
            raise UsageError("-node-name is not given and NODE_NAME not set, expected the name of this node")
        if not os.path.isdir(plan.root):
            raise UsageError(f"-root: {plan.root}: not a directory, expected one with sys/ and proc/ in it")
        return plan


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 for whatever went wrong."""
    given = parse_or_exit(PROGRAM, FLAGS, sys.argv[1:] if arguments is None else arguments)
    if given.get("daemon"):
        signals.end_at_once()
    else:
        signals.end_as_usual()
    try:
        logflags.start(given, PROGRAM.replace(" ", "-"))
        plan = Plan.of(given, os.environ)
        if plan.output in ("table", "json"):
            _print(plan)
        else:
            api = ApiServer.in_cluster() if plan.output == "node" else None
            asyncio.run(run(plan, api))
    except (UsageError, ApiError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{PROGRAM}: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


async def run(plan: Plan, api: ApiServer | None) -> None:
    """Writes to the Node at `api`, or, without one, the feature file. Raises `ApiError`, or `OSError`."""
    if not plan.daemon:
        await _write_once(plan, api)
        return
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in signals.ENDING:
        loop.add_signal_handler(number, stop.set)
    if plan.until_stdin_ends:
        loop.add_reader(0, lambda: None if os.read(0, 4096) else stop.set())
    work = asyncio.create_task(_follow(plan, api))
    ended = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, ended):
            task.cancel()
        await asyncio.gather(work, ended, return_exceptions=True)
        if plan.until_stdin_ends:
            loop.remove_reader(0)
    if plan.cleanup:
        try:
            async with asyncio.timeout(_CLEANUP_DEADLINE):
                await _write_once(plan, api)
        except TimeoutError:
            raise UsageError(f"not everything could be removed within {_CLEANUP_DEADLINE:g} s") from None


def found(host: Host) -> Outcome:
    """What the rules say of the host."""
    return judged(look(host))


def shown(outcome: Outcome, *, epc: bool) -> dict[str, str]:
    """The lines of a feature file."""
    return {**outcome.labels, **(outcome.resources if epc else {})}


async def _write_once(plan: Plan, api: ApiServer | None) -> None:
    host = Host(plan.root)
    outcome = Outcome({}, {}) if plan.cleanup else found(host)
    for note in host.notes:
        log.warning("%s", note)
    if api is None:
        _file(plan).write(shown(outcome, epc=plan.epc))
    else:
        await _settling(plan, api, outcome)(await upkeep.read(api, plan.node_name))


async def _follow(plan: Plan, api: ApiServer | None) -> None:
    watcher = Watcher()
    watcher.start()
    try:
        outcomes = periodic_scan("labels", plan.root, found, watcher, subsystems=SUBSYSTEMS, interval=SAFETY_INTERVAL)
        async with contextlib.aclosing(outcomes):
            if api is None:
                await _follow_into_file(outcomes, _file(plan), epc=plan.epc)
            else:
                await _follow_on_node(plan, api, outcomes)
    finally:
        watcher.close()


async def into_file(root: str, directory: str, watcher: Watcher) -> None:
    """Keeps a feature file in `directory` as the host below `root` is, for the agent; it is removed at the end."""
    file = LabelFile(os.path.join(directory, FEATURE_FILE))
    outcomes = periodic_scan("labels", root, found, watcher, subsystems=SUBSYSTEMS, interval=SAFETY_INTERVAL)
    try:
        async with contextlib.aclosing(outcomes):
            await _follow_into_file(outcomes, file, epc=False)
    finally:
        file.remove()


async def _follow_into_file(outcomes: AsyncGenerator[Outcome, None], file: LabelFile, *, epc: bool) -> None:
    """Keeps the feature file as the last outcome says; what cannot be written is told, and tried at the next one."""
    async for outcome in outcomes:
        labels = shown(outcome, epc=epc)
        try:
            if file.write(labels):
                log.info("%s: %d labels written", file.path, len(labels))
        except OSError as error:
            log.error("%s: labels not written: %s", file.path, error.strerror or error)


async def _follow_on_node(plan: Plan, api: ApiServer, outcomes: AsyncGenerator[Outcome, None]) -> None:
    last: Outcome | None = None
    keeper: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as group:
        async for outcome in outcomes:
            if outcome == last:
                continue
            last = outcome
            if keeper is not None:
                keeper.cancel()
                await asyncio.wait((keeper,))
            keep = upkeep.keep(api, plan.node_name, _settling(plan, api, outcome), interval=_API_INTERVAL)
            keeper = group.create_task(keep)


def _settling(plan: Plan, api: ApiServer, outcome: Outcome) -> upkeep.Settle:
    labels = upkeep.Labels(api, FIELD_MANAGER, outcome.labels)
    amounts = {name: int(amount) for name, amount in outcome.resources.items()}
    resources = upkeep.Resources(api, FIELD_MANAGER, amounts) if plan.epc else None

    async def settle(node: Node) -> bool:
        changed = await labels.settle(node)
        return (resources is not None and await resources.settle(node)) or changed

    return settle


def _file(plan: Plan) -> LabelFile:
    return LabelFile(os.path.join(plan.features_dir, FEATURE_FILE))


def _print(plan: Plan) -> None:
    host = Host(plan.root)
    outcome = found(host)
    for note in host.notes:
        log.warning("%s", note)
    if plan.output == "json":
        print(msgspec.json.format(msgspec.json.encode(outcome), indent=2).decode())
        return
    if not outcome.labels:
        print("no rule holds for this node")
        return
    rows = [("LABEL", "VALUE"), *sorted(outcome.labels.items())]
    if outcome.resources:
        rows += [("", ""), ("RESOURCE", "AMOUNT"), *sorted(outcome.resources.items())]
    width = max(len(name) for name, _value in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
