"""The parts of an Onload installation in containers: device nodes, libraries, the launcher, and `LD_PRELOAD`.

The installation directory may contain a symbolic link to the files of one version. Mounts name the files without that
link: the kubelet keeps the answer to Allocate for the life of a pod, and a container that starts again after another
version was installed must get the files of its own version.
"""

import posixpath
import stat
from collections.abc import Iterator

from accelplane.devices import DeviceNode, Mount
from accelplane.host import Host, HostError, Missing, Unreadable
from accelplane.plugins.onload.config import OnloadConfig, join_path

LIBRARY = "libonload.so"
NODES = tuple(DeviceNode(path, permissions="mrw") for path in ("/dev/onload", "/dev/onload_epoll", "/dev/sfc_char"))
MODULE = "/sys/module/onload"

_PREFIXES = (LIBRARY, "libonload_ext.so")
_MAX_LIBRARIES = 64
# The /dev of a container is a copy made at its start. That of the host has the nodes of modules loaded later. It is
# visible in the PID namespace of the host; in another one the first process has the same /dev.
_HOST_DEV = "/proc/1/root/dev"


def module_problem(host: Host) -> str:
    """Returns why containers cannot use the kernel module, or an empty text."""
    if host.exists("/sys/module") and not host.exists(MODULE):
        return f"{MODULE}: does not exist, the kernel module onload is not loaded"
    directory = _HOST_DEV if host.exists(_HOST_DEV) else "/dev"
    for node in NODES:
        status = host.status(f"{directory}/{posixpath.basename(node.host_path)}")
        if status is None:
            return f"{node.host_path}: no such device node"
        if not stat.S_ISCHR(status.st_mode) and not host.is_plain_stand_in(status):
            return f"{node.host_path}: not a character device"
    return ""


def mounts(host: Host, config: OnloadConfig) -> tuple[Mount, ...]:
    """The mounts of a container. Raises `HostError` for missing files."""
    found = [
        Mount(f"{directory}/{name}", join_path(config.library_directory, name))
        for directory, name in _libraries(host, config)
    ]
    if config.mount_onload:
        directory = host.resolve(join_path(config.host_onload_path, "usr/bin"))
        launcher = f"{directory}/onload"
        if not _is_file(host, launcher):
            raise Missing(launcher, "no such file, expected the onload launcher script")
        found.append(Mount(launcher, join_path(config.launcher_directory, "onload")))
    return tuple(found)


def environment(config: OnloadConfig) -> dict[str, str]:
    """The variables of a container."""
    return {"LD_PRELOAD": join_path(config.library_directory, LIBRARY)} if config.set_preload else {}


def userland_problem(host: Host, config: OnloadConfig) -> str:
    """Returns why containers cannot get the files of Onload, or an empty text."""
    try:
        mounts(host, config)
    except HostError as error:
        return str(error)
    return ""


def _libraries(host: Host, config: OnloadConfig) -> Iterator[tuple[str, str]]:
    """Yields directory and name of each library. Raises `HostError`."""
    directory = host.resolve(join_path(config.host_onload_path, "usr/lib64"))
    names = host.names(directory)
    found = [
        name
        for prefix in _PREFIXES
        for name in names
        if name.startswith(prefix) and _is_file(host, f"{directory}/{name}")
    ]
    if LIBRARY not in found:
        raise Missing(f"{directory}/{LIBRARY}", "no such file, expected the Onload library")
    if len(found) > _MAX_LIBRARIES:
        raise Unreadable(directory, f"found {len(found)} files of Onload, expected {_MAX_LIBRARIES} or less")
    for name in found:
        yield directory, name


def _is_file(host: Host, path: str) -> bool:
    """Whether a container can mount it as a file. The container runtime would create a directory for a missing one."""
    status = host.status(path)
    return status is not None and not stat.S_ISDIR(status.st_mode)
