"""The agent's settings."""

import os
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr


class ConfigurationError(Exception):
    """A flag or the configuration file is invalid; the text names it, what was found and what was expected."""


class Settings(Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """Each field with a description is a flag. Times are in seconds. Directories are made absolute.

    Every plugin scans after `safety_interval` without an event, or after `unwatched_interval` where inotify or uevents
    are not available.
    """

    root: Annotated[
        str,
        Meta(description="read sysfs and devfs under this directory; paths told to the kubelet do not contain it"),
    ] = "/"
    kubelet_dir: Annotated[
        str, Meta(description="the kubelet's directory; sockets are in device-plugins/ below it")
    ] = "/var/lib/kubelet"
    cdi_dir: Annotated[str, Meta(description="directory for CDI files, created if missing")] = "/var/run/cdi"
    keep_cdi: Annotated[
        bool, Meta(description="keep the CDI files at the end, for containers that restart before the next start")
    ] = True
    nfd_dir: Annotated[
        str, Meta(description="write node labels as files for node-feature-discovery into this directory")
    ] = ""
    http_address: Annotated[
        str, Meta(description="serve /metrics, /healthz, /readyz and /status at this host:port")
    ] = ""
    health_interval: Annotated[
        float, Meta(description="seconds between health checks, 1 to 3600; 0: the interval of each plugin")
    ] = 0.0
    scan_grace: Annotated[
        float, Meta(description="seconds of failing scans after which the plugin's devices become unhealthy, 0 to 3600")
    ] = 30.0
    safety_interval: float = 600.0
    unwatched_interval: float = 60.0

    def __post_init__(self) -> None:
        if self.health_interval != 0 and not 1 <= self.health_interval <= 3600:
            raise ValueError(f"health-interval: found {self.health_interval:g}, expected 0 or 1 to 3600 seconds")
        if not 0 <= self.scan_grace <= 3600:
            raise ValueError(f"scan-grace: found {self.scan_grace:g}, expected 0 to 3600 seconds")
        for name in ("root", "kubelet_dir", "cdi_dir", "nfd_dir"):
            path = getattr(self, name)
            if path:
                force_setattr(self, name, os.path.abspath(path))
            elif name != "nfd_dir":
                raise ValueError(f"{name.replace('_', '-')}: found nothing, expected a directory")

    @classmethod
    def of(cls, options: Mapping[str, object], source: str) -> "Settings":
        """From options by name. Raises `ConfigurationError` that names `source` and the option."""
        try:
            return msgspec.convert(options, cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{source}{error}") from error

    @property
    def sockets_dir(self) -> str:
        return f"{self.kubelet_dir}/device-plugins"

    @property
    def pod_resources_socket(self) -> str:
        return f"{self.kubelet_dir}/pod-resources/kubelet.sock"
