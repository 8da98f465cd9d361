"""The path of crictl on the host, where the kernel starts it.

The kernel starts the program in the initial namespaces, and reports no error if it does not exist. In the PID
namespace of the host, `/proc/1/root` shows whether it does. Reading it needs CAP_SYS_PTRACE.
"""

import logging
import os
import stat

from accelplane.host import Host, HostError
from accelplane.onloadworker.configuration import WorkerError, absolute_path

log = logging.getLogger(__name__)

HOST_ROOT = "/proc/1/root"
# The first is that of the original. The others are those of k3s, cluster installers and RKE2.
USUAL_PATHS = (
    "/usr/bin/crictl",
    "/usr/local/bin/crictl",
    "/opt/bin/crictl",
    "/bin/crictl",
    "/var/lib/rancher/rke2/bin/crictl",
)


def host_root() -> Host | None:
    """The root directory of the host, None if this process does not see it."""
    try:
        if os.getpid() == 1 or os.path.samestat(os.stat("/proc/1/ns/mnt"), os.stat("/proc/self/ns/mnt")):
            return None
        os.stat(f"{HOST_ROOT}/.")
    except OSError:
        return None
    return Host(HOST_ROOT)


def find_crictl(given: str, host: Host | None) -> str:
    """Returns the path on the host: `given`, or the first usual one that exists there. Raises `WorkerError`.

    Without `host` the path cannot be checked, and the default is that of the original.
    """
    candidates = (absolute_path("-crictl-path", given),) if given else USUAL_PATHS
    if host is None:
        log.warning(
            "%s is not checked: the file system of the host is not visible (expected hostPID and CAP_SYS_PTRACE)",
            candidates[0],
        )
        return candidates[0]
    if found := next((path for path in candidates if _executable(host, path)), ""):
        return found
    raise WorkerError(
        f"crictl: found no executable file on the host, searched {', '.join(candidates)}; install cri-tools there, or "
        "set -crictl-path or ONLOAD_CRICTL_PATH"
    )


def _executable(host: Host, path: str) -> bool:
    try:
        # A link of the host is resolved in the root of the host, as the kernel does when it starts the program.
        status = host.status(host.resolve(path))
    except HostError:
        return False
    return status is not None and stat.S_ISREG(status.st_mode) and bool(status.st_mode & 0o111)
