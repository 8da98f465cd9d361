"""`onload-worker`: lets the kernel module onload start the control plane server in the container of this process."""

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from accelplane.apiserver import ApiServer
from accelplane.cli import logflags, signals
from accelplane.cli.goflags import Flag, Value, parse_or_exit, with_defaults
from accelplane.cli.untilsignal import until_signal
from accelplane.host import Host
from accelplane.onloadworker.configuration import Configuration, WorkerError
from accelplane.onloadworker.container_id import find_container_id
from accelplane.onloadworker.crictl import find_crictl, host_root
from accelplane.onloadworker.parameters import Values
from accelplane.onloadworker.worker import Worker, require_device

log = logging.getLogger(__name__)

FLAGS = (
    Flag("crictl-path", "", "path of crictl on the host; empty: search the usual directories",
         environment="ONLOAD_CRICTL_PATH"),
    Flag("root", "/", "read and write sysfs and devfs under this directory"),
    *logflags.FLAGS,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None, environment: Mapping[str, str] | None = None) -> int:
    """The entry point. Returns the exit status."""
    signals.end_at_once()
    given = parse_or_exit("onload-worker", FLAGS, arguments, lenient=True)
    variables = os.environ if environment is None else environment
    try:
        logflags.start(given, "onload-worker")
    except (OSError, ValueError) as error:
        print(f"onload-worker: {error}", file=sys.stderr)
        return 1
    try:
        asyncio.run(until_signal(_work(with_defaults(FLAGS, given, variables), variables)))
    except WorkerError as error:
        log.error("%s", error)
        return 1
    return 0


async def _work(values: Mapping[str, Value], environment: Mapping[str, str]) -> None:
    """Raises `WorkerError`."""
    root = str(values["root"])
    configuration = Configuration.of(environment)
    require_device(root)
    crictl = find_crictl(str(values["crictl-path"]), host_root())
    container_id = await find_container_id(configuration, Host(root), lambda: ApiServer.in_cluster(environment))
    await Worker(Values(crictl, configuration.arguments(container_id)), root).run()
