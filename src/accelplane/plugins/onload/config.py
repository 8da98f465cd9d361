"""Options of the Onload plugin, with the names of the original's flags."""

import posixpath
import re
from typing import Annotated

from msgspec import Meta

from accelplane.plugins.base import Config

_MAX_PODS = 100_000  # the kubelet receives messages of up to 4 MiB
_MAX_PATH = 4095
_SEPARATOR = re.compile(r"[\s:]")


class OnloadConfig(Config, frozen=True, kw_only=True, rename="camel"):
    """Options of the Onload plugin. `host_onload_path` is the same path on the host and for the plugin."""

    max_pods: Annotated[int, Meta(description="number of devices to advertise: of containers that may use Onload")] = (
        100
    )
    need_nic: Annotated[bool, Meta(description="require a Solarflare NIC")] = True
    set_preload: Annotated[bool, Meta(description="set LD_PRELOAD in containers, so that Onload is always used")] = True
    mount_onload: Annotated[bool, Meta(description="mount the onload launcher script into containers")] = False
    host_onload_path: Annotated[str, Meta(description="directory of the host with the Onload files")] = "/opt/onload"
    base_mount_path: Annotated[str, Meta(description="prefix of all paths in containers")] = "/opt/onload"
    bin_mount_path: Annotated[str, Meta(description="directory below baseMountPath for the launcher")] = "/usr/bin"
    lib_mount_path: Annotated[str, Meta(description="directory below baseMountPath for the libraries")] = "/usr/lib64"

    def __post_init__(self) -> None:
        if self.set_preload and self.mount_onload:
            raise ValueError("setting both usePreload and mountOnload is not supported; set one of them to false")
        if self.max_pods > _MAX_PODS:
            raise ValueError(f"maxPods is {self.max_pods}, expected {_MAX_PODS} or less")
        for name, path in (
            ("hostOnloadPath", self.host_onload_path),
            ("baseMountPath with libMountPath", self.library_directory),
            ("baseMountPath with binMountPath", self.launcher_directory),
        ):
            if not path.startswith("/") or "\0" in path or len(path) > _MAX_PATH:
                raise ValueError(f"{name} is {path[:80]!a}, expected an absolute path of up to {_MAX_PATH} characters")
        if self.set_preload and _SEPARATOR.search(self.library_directory):
            raise ValueError(
                f"baseMountPath with libMountPath is {self.library_directory[:80]!a}, expected a path without white "
                "space and colons, which separate the libraries in LD_PRELOAD"
            )

    @property
    def library_directory(self) -> str:
        """The directory of the libraries in containers."""
        return join_path(self.base_mount_path, self.lib_mount_path)

    @property
    def launcher_directory(self) -> str:
        """The directory of the launcher in containers."""
        return join_path(self.base_mount_path, self.bin_mount_path)


def join_path(*parts: str) -> str:
    """Joins path components as Go's `filepath.Join`: empty ones are ignored, and the result is clean."""
    path = posixpath.normpath("/".join(part for part in parts if part) or ".")
    # POSIX leaves the meaning of two leading slashes open, so normpath keeps them.
    return "/" + path.lstrip("/") if path.startswith("/") else path
