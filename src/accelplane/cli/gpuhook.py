"""`intel-gpu-nfdhook`: prints the labels of GPU capacity for node-feature-discovery (NFD); `gpu-init.sh`.

Older releases of NFD run hooks in the container of their worker, which has no Python. So `gpu-init.sh` installs, as
for SGX (docs/decisions/0011-epc-hook.md), a program that prints the results of the init container. Newer releases read
the feature file that it writes if that directory is mounted.
"""

import logging
import os
import sys
from collections.abc import Sequence

from accelplane.cli import logflags, signals, staticprint
from accelplane.cli.goflags import Flag, parse_or_exit
from accelplane.host import Host, HostError
from accelplane.node.publishers.labels import LabelFile
from accelplane.nodelabels import gpu

log = logging.getLogger(__name__)

HOOK = "intel-gpu-nfdhook"
INIT = "gpu-init.sh"
SOURCES_DIRECTORY = "/etc/kubernetes/node-feature-discovery/source.d"

# Where the worker of NFD has the sysfs of its node.
_HOST_DRM = "/host-sys/class/drm"

_ROOT = Flag("root", "/", "read host-sys/, or without it sys/, under this directory")
FLAGS = (_ROOT, *logflags.FLAGS)
INIT_FLAGS = (
    Flag("source-dir", SOURCES_DIRECTORY, "directory for the hook"),
    Flag("features-dir", gpu.FEATURES_DIRECTORY, "directory for the feature file"),
    _ROOT,
    *logflags.FLAGS,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point of the hook. Returns 0 also after an error, because NFD logs the hook's failure each time."""
    given = parse_or_exit(HOOK, FLAGS, arguments, lenient=True)
    signals.end_as_usual()
    try:
        logflags.start(given, HOOK)
    except (OSError, ValueError) as error:
        print(f"{HOOK}: {error}", file=sys.stderr)
        return 0
    if (labels := _labels(str(given.get("root", "/")))) is not None:
        sys.stdout.write(gpu.feature_text(labels))
        sys.stdout.flush()
    return 0


def install(arguments: Sequence[str] | None = None) -> int:
    """`gpu-init.sh`: installs the hook and the feature file in the directories that exist. Returns the exit status."""
    given = parse_or_exit(INIT, INIT_FLAGS, arguments, lenient=True)
    signals.end_as_usual()
    values = {flag.name: flag.default for flag in INIT_FLAGS} | given
    sources, features = str(values["source-dir"]), str(values["features-dir"])
    try:
        logflags.start(given, INIT)
        if not (os.path.isdir(sources) or os.path.isdir(features)):
            log.critical("neither %s nor %s is a directory; mount one of them", sources, features)
            return 1
        labels = _labels(str(values["root"]))
        if labels is None:
            return 0  # the plugin, whose pod waits for this container, works without labels
        if os.path.isdir(sources):
            staticprint.install(os.path.join(sources, HOOK), gpu.feature_text(labels))
        if os.path.isdir(features):
            file = LabelFile(os.path.join(features, gpu.FEATURE_FILE))
            log.info("%s: %s", file.path, "written" if file.write(labels) else "unchanged")
    except (ValueError, OSError) as error:
        log.critical("%s", logflags.message_of(error))
        return 1
    return 0


def _labels(root: str) -> dict[str, str] | None:
    """The labels of the host, None after an error, which is logged."""
    host = Host(root)
    drm = _HOST_DRM if host.exists(_HOST_DRM) else gpu.DRM
    if not host.exists(drm):
        log.warning("no labels: %s does not exist", drm)
        return None
    try:
        gpus = gpu.read_gpus(host, drm)
    except HostError as error:
        log.warning("no labels: %s", error)
        return None
    for note in host.notes:
        log.warning("%s", note)
    return gpu.gpu_labels(gpus, gpu.LabelOptions.of(os.environ))
