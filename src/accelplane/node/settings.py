"""How the agent was asked to run: the values of its flags, one for each thing."""

from msgspec import Struct


class ConfigurationError(Exception):
    """The agent was asked for something that cannot be; the text says what, where, and what to do."""


class Settings(Struct, frozen=True, kw_only=True):
    """Directories are absolute paths on this machine, times are in seconds.

    `root` holds the host's file trees; `nfd_dir` is where label files go, none are written when empty. With
    `keep_cdi` the CDI files outlive the agent, for containers that restart while it is away. Every plugin looks again
    after `safety_interval` without any event, or after `blind_interval` where not all events can be had. Health is
    checked every `health_interval`; if None, at the interval of the plugin's health policy.
    """

    root: str = "/"
    kubelet_dir: str = "/var/lib/kubelet"
    cdi_dir: str = "/var/run/cdi"
    keep_cdi: bool = True
    nfd_dir: str = ""
    http_address: str = ""
    health_interval: float | None = None
    scan_grace: float = 30.0
    safety_interval: float = 600.0
    blind_interval: float = 60.0

    @property
    def sockets_dir(self) -> str:
        return f"{self.kubelet_dir}/device-plugins"

    @property
    def pod_resources_socket(self) -> str:
        return f"{self.kubelet_dir}/pod-resources/kubelet.sock"
