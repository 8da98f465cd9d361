"""`accelplane labels`: labels of this node for its devices, the same as node-feature-discovery (NFD) sets.

Prints them, writes a feature file for NFD, or applies them to the Node in clusters without NFD; once, or as a daemon
that reconciles after changes of the hardware or of the Node. Server-side apply removes outdated labels, and leaves
labels of other field managers unchanged.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from accelplane import jsontext
from accelplane.apiserver import ApiError, ApiServer
from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Flag, Value, parse_or_exit, with_defaults
from accelplane.cli.untilsignal import until_signal
from accelplane.host import Host, HostError
from accelplane.node.periodic_scan import periodic_scan
from accelplane.node.publishers.labels import LabelFile
from accelplane.node.watcher import Watcher
from accelplane.nodelabels import RuleOutput, discover, evaluate, node_reconciler
from accelplane.nodelabels.gpu import DRM, LabelOptions, gpu_labels, read_gpus
from accelplane.nodelabels.node_reconciler import Node

log = logging.getLogger(__name__)

PROGRAM = "accelplane labels"
FIELD_MANAGER = "accelplane-labels"
EPC = "sgx.intel.com/epc"
FEATURE_FILE = "accelplane-features.txt"
OUTPUTS = ("table", "json", "nfd", "node")
# Uevents that may change features; the SGX driver is in `misc`.
SUBSYSTEMS = frozenset(("pci", "module", "misc"))
SAFETY_INTERVAL = 600.0

FLAGS = (
    Flag("output", "table", "table or json: print; nfd: write a feature file; node: write the Node's labels"),
    Flag("daemon", False, "with -output=nfd or node: update after hardware changes, until SIGTERM or SIGINT"),
    Flag("cleanup", False, "remove what was written (resources with -epc, -gpu): at once, or with -daemon at exit"),
    Flag("epc", False, "also publish the memory for SGX enclaves, on the Node as an extended resource"),
    Flag("gpu", False, "also publish the capacity of GPUs for schedulers, on the Node also as extended resources"),
    Flag("features-dir", "/etc/kubernetes/node-feature-discovery/features.d", "directory of -output=nfd"),
    Flag("node-name", "", "name of the Node, $NODE_NAME when empty"),
    Flag("root", "/", "read sysfs and procfs under this directory"),
    Flag("until-stdin-ends", False, "with -daemon: exit at the end of standard input, for use as a child process"),
    *logflags.FLAGS,
)

_API_INTERVAL = 300.0
_CLEANUP_DEADLINE = 20.0


class Options(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    output: str
    daemon: bool
    cleanup: bool
    epc: bool
    gpu: bool
    features_dir: str
    node_name: str
    root: str
    until_stdin_ends: bool

    @classmethod
    def from_flags(cls, given: Mapping[str, Value], environment: Mapping[str, str]) -> "Options":
        """Raises `ValueError` for an invalid command line."""
        options = msgspec.convert(with_defaults(FLAGS, given, {}), cls)
        options = replace(
            options,
            features_dir=os.path.abspath(options.features_dir),
            node_name=options.node_name or environment.get("NODE_NAME", ""),
            root=os.path.abspath(options.root),
        )
        if options.output not in OUTPUTS:
            raise ValueError(f"-output: found {options.output!a}, expected one of {', '.join(OUTPUTS)}")
        if (options.daemon or options.cleanup) and options.output not in ("nfd", "node"):
            raise ValueError(f"-daemon, -cleanup: found -output={options.output}, expected -output=nfd or -output=node")
        if options.output == "node" and not options.node_name:
            raise ValueError("-node-name: found nothing and NODE_NAME is not set, expected the name of this node")
        if not os.path.isdir(options.root):
            raise ValueError(f"-root: {options.root}: not a directory, expected one with sys/ and proc/ in it")
        return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 for any error."""
    given = parse_or_exit(PROGRAM, FLAGS, arguments)
    if given.get("daemon"):
        signals.end_at_once()
    else:
        signals.end_as_usual()
    try:
        logflags.start(given, PROGRAM.replace(" ", "-"))
        options = Options.from_flags(given, os.environ)
        if options.output in ("table", "json"):
            _print(options)
        else:
            api = ApiServer.in_cluster() if options.output == "node" else None
            asyncio.run(run(options, api))
    except (ApiError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{PROGRAM}: {error.filename or ''}: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


async def run(options: Options, api: ApiServer | None) -> None:
    """Applies labels to the Node at `api`, or writes the feature file. Raises `ApiError` or `OSError`."""
    if not options.daemon:
        await _write_once(options, api)
        return
    await until_signal(_follow(options, api), *([_end_of_input()] if options.until_stdin_ends else ()))
    if options.cleanup:
        try:
            async with asyncio.timeout(_CLEANUP_DEADLINE):
                await _write_once(options, api)
        except TimeoutError:
            raise ValueError(f"cleanup is incomplete after {_CLEANUP_DEADLINE:g} s") from None


async def _end_of_input() -> None:
    """Returns at the end of standard input."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(0, lambda: None if os.read(0, 4096) else ended.set())
    try:
        await ended.wait()
    finally:
        loop.remove_reader(0)


def evaluate_host(host: Host) -> RuleOutput:
    """Returns the labels and resources of the host."""
    return evaluate(discover(host))


def evaluate_with_gpus(host: Host) -> RuleOutput:
    """The same with the labels of GPU capacity, which the rules turn into resources, unless they cannot be read.

    As those of the label hook, there are none without a DRM directory.
    """
    if not host.exists(DRM):
        return evaluate_host(host)
    try:
        found = gpu_labels(read_gpus(host), LabelOptions.of(os.environ))
    except HostError as error:
        host.note(f"no labels of GPU capacity: {error}")
        return evaluate_host(host)
    features = discover(host)
    output = evaluate(replace(features, elements={**features.elements, "local.label": found}))
    return RuleOutput({**output.labels, **found}, output.resources)


def feature_lines(output: RuleOutput, *, epc: bool) -> dict[str, str]:
    """Returns the names and values in a feature file. NFD derives other resources from labels."""
    lines = dict(output.labels)
    if epc and EPC in output.resources:
        lines[EPC] = output.resources[EPC]
    return lines


async def _write_once(options: Options, api: ApiServer | None) -> None:
    output = RuleOutput({}, {}) if options.cleanup else _evaluate_once(options)
    if api is None:
        _file(options).write(feature_lines(output, epc=options.epc))
    else:
        await _reconcile_to(options, api, output)(await node_reconciler.read(api, options.node_name))


async def _follow(options: Options, api: ApiServer | None) -> None:
    watcher = Watcher()
    watcher.start()
    try:
        subsystems = SUBSYSTEMS | {"drm"} if options.gpu else SUBSYSTEMS
        outputs = periodic_scan(
            "labels", options.root, _evaluation(options), watcher, subsystems=subsystems, interval=SAFETY_INTERVAL
        )
        async with contextlib.aclosing(outputs):
            if api is None:
                await _follow_into_file(outputs, _file(options), epc=options.epc)
            else:
                await _follow_on_node(options, api, outputs)
    finally:
        watcher.close()


async def into_file(root: str, directory: str, watcher: Watcher) -> None:
    """Keeps a feature file in `directory` up to date for the agent, and removes it at the end.

    The file of another agent, which replaces this one, is not removed.
    """
    file = LabelFile(os.path.join(directory, FEATURE_FILE))
    outputs = periodic_scan("labels", root, evaluate_host, watcher, subsystems=SUBSYSTEMS, interval=SAFETY_INTERVAL)
    try:
        async with contextlib.aclosing(outputs):
            await _follow_into_file(outputs, file, epc=False)
    finally:
        file.withdraw()


async def _follow_into_file(outputs: AsyncGenerator[RuleOutput, None], file: LabelFile, *, epc: bool) -> None:
    """Writes each output to the feature file. A failed write is logged; the next output is written again."""
    async for output in outputs:
        labels = feature_lines(output, epc=epc)
        try:
            if file.write(labels):
                log.info("%s: wrote %d labels", file.path, len(labels))
        except OSError as error:
            log.error("%s: cannot write labels: %s", file.path, error.strerror or error)


async def _follow_on_node(options: Options, api: ApiServer, outputs: AsyncGenerator[RuleOutput, None]) -> None:
    last: RuleOutput | None = None
    reconciler: asyncio.Task[None] | None = None
    async with asyncio.TaskGroup() as group:
        async for output in outputs:
            if output == last:
                continue
            last = output
            if reconciler is not None:
                reconciler.cancel()
                await asyncio.wait((reconciler,))
            reconcile = _reconcile_to(options, api, output)
            run = node_reconciler.run(api, options.node_name, reconcile, interval=_API_INTERVAL)
            reconciler = group.create_task(run)


def _reconcile_to(options: Options, api: ApiServer, output: RuleOutput) -> node_reconciler.Reconcile:
    labels = node_reconciler.Labels(api, FIELD_MANAGER, output.labels)
    amounts = {
        name: int(amount) for name, amount in output.resources.items() if (options.epc if name == EPC else options.gpu)
    }
    published = options.epc or options.gpu
    resources = node_reconciler.Resources(api, FIELD_MANAGER, amounts) if published else None

    async def reconcile(node: Node) -> bool:
        changed = await labels.reconcile(node)
        return (resources is not None and await resources.reconcile(node)) or changed

    return reconcile


def _file(options: Options) -> LabelFile:
    return LabelFile(os.path.join(options.features_dir, FEATURE_FILE))


def _evaluation(options: Options) -> Callable[[Host], RuleOutput]:
    return evaluate_with_gpus if options.gpu else evaluate_host


def _evaluate_once(options: Options) -> RuleOutput:
    host = Host(options.root)
    output = _evaluation(options)(host)
    for note in host.notes:
        log.warning("%s", note)
    return output


def _print(options: Options) -> None:
    output = _evaluate_once(options)
    if options.output == "json":
        print(jsontext.indented(output))
        return
    if not output.labels:
        print("no rule matches this node")
        return
    rows = [("LABEL", "VALUE"), *sorted(output.labels.items())]
    if output.resources:
        rows += [("", ""), ("RESOURCE", "AMOUNT"), *sorted(output.resources.items())]
    width = max(len(name) for name, _value in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}".rstrip())


if __name__ == "__main__":
    sys.exit(main())
