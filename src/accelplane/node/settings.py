"""The agent's settings."""

import os
import re
import socket
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from accelplane.node.device_api import DeviceApis
from accelplane.node.option_messages import option_message

_WAKING = ("auto", "always", "never")
_HOLDERS = ("join", "attach", "off")
_EVICT = ("gone", "sick", "never")
_LABEL_PREFIX = re.compile(r"(?:[a-z][a-z_]{0,31})?")


class ConfigurationError(Exception):
    """A flag or the configuration file is invalid; the message has its name, the found and the expected value."""


def _flag(description: str) -> Meta:
    return Meta(description=description)


class Settings(Struct, frozen=True, kw_only=True, rename="kebab", forbid_unknown_fields=True):
    """Each field with a description is a flag. Times are in seconds, directories are absolute paths.

    Every plugin scans after `safety_interval` without an event, or after `unwatched_interval` where inotify or uevents
    are not available.
    """

    root: Annotated[
        str, _flag("read sysfs and devfs under this directory; paths in responses to the kubelet omit it")
    ] = "/"
    kubelet_dir: Annotated[str, _flag("the kubelet's directory; sockets are in device-plugins/ below it")] = (
        "/var/lib/kubelet"
    )
    cdi_dir: Annotated[str, _flag("directory for CDI files, created if missing")] = "/var/run/cdi"
    keep_cdi: Annotated[
        bool, _flag("keep the CDI files at the end, for containers that restart before the next start")
    ] = True
    cdi_groups: Annotated[
        bool, _flag("containers get the groups of their device nodes; needs a container runtime with CDI 0.7.0")
    ] = False
    nfd_dir: Annotated[str, _flag("write node labels as files for node-feature-discovery into this directory")] = ""
    status_socket: Annotated[
        str,
        _flag(
            "Unix socket for `accelplane inspect` and `top`: a path, auto (device-plugins/accelplane/ in the kubelet's "
            "directory) or off"
        ),
    ] = "auto"
    http_address: Annotated[str, _flag("serve /metrics, /healthz, /readyz, /status and /api/v1 at this host:port")] = ""
    http_tls_dir: Annotated[str, _flag("serve the pages over TLS with tls.crt and tls.key of this directory")] = ""
    http_client_ca: Annotated[
        str, _flag("with -http-tls-dir: clients need a certificate of an authority in this PEM file")
    ] = ""
    http_authorized: Annotated[
        bool, _flag("the API server decides by a client's bearer token whether it may read a page")
    ] = False
    http_audience: Annotated[
        str, _flag("with -http-authorized: tokens must be valid for one of these audiences, separated by commas")
    ] = ""
    metrics_waking: Annotated[
        str, _flag("read files that power a sleeping device up: auto (while it is awake), always or never")
    ] = "auto"
    metrics_holders: Annotated[
        str,
        _flag(
            "containers that hold devices: join (metrics of their own), attach (also labels of samples of "
            "devices with one holder) or off"
        ),
    ] = "join"
    metrics_holder_labels: Annotated[
        str, _flag("prefix of the labels namespace, pod and container, for platforms that set these themselves")
    ] = ""
    metrics_node_label: Annotated[bool, _flag("add the label node, from the variable NODE_NAME, to all samples")] = (
        False
    )
    metrics_max_samples: Annotated[int, _flag("largest number of samples of a metrics page, 100 to 1000000")] = 10_000
    metrics_min_interval: Annotated[
        float, _flag("seconds for which a reading of the devices is used again, 0 to 60")
    ] = 1.0
    metrics_clients: Annotated[
        str, _flag("Unix socket of accelplane clients, for the GPU use of containers on the metrics page")
    ] = ""
    health_interval: Annotated[
        float, _flag("seconds between health checks, 1 to 3600; 0: the interval of each plugin")
    ] = 0.0
    scan_grace: Annotated[
        float, _flag("seconds of failing scans after which the plugin's devices become unhealthy, 0 to 3600")
    ] = 30.0
    dra_api: Annotated[
        str,
        _flag(
            "API that hands devices out: plugin (device plugins), dra (dynamic resource allocation) or none; for all, "
            "or by plugin and PCI address: gpu=dra,0000:03:00.0=plugin"
        ),
    ] = ""
    dra_evict: Annotated[
        str, _flag("delete pods whose claimed device is gone (unplugged), sick (gone or unhealthy) or never")
    ] = "gone"
    dra_manage_binding: Annotated[bool, _flag("bind devices to the kernel driver that a claim needs")] = True
    dra_device_status: Annotated[bool, _flag("write the status of claimed devices into their claims")] = False
    dra_take_over: Annotated[bool, _flag("take claims over that another driver of the same name has prepared")] = False
    safety_interval: float = 600.0
    unwatched_interval: float = 60.0

    @classmethod
    def of(cls, options: Mapping[str, object], source: str) -> "Settings":
        """From options by name, with absolute paths. Raises `ConfigurationError` that names `source` and the option."""
        try:
            settings = msgspec.convert(options, cls)
        except msgspec.ValidationError as error:
            raise ConfigurationError(option_message(source, error, cls)) from error
        _check_values(settings, source)
        _check_pages(settings, source)
        names = ("root", "kubelet_dir", "cdi_dir", "nfd_dir", "http_tls_dir", "http_client_ca", "metrics_clients")
        paths = {name: getattr(settings, name) for name in names}
        for name, path in paths.items():
            if not path and name in ("root", "kubelet_dir", "cdi_dir"):
                raise ConfigurationError(f"{source}{name.replace('_', '-')}: found nothing, expected a directory")
        if settings.status_socket not in ("auto", "off"):
            paths["status_socket"] = settings.status_socket
        return replace(settings, **{name: os.path.abspath(path) for name, path in paths.items() if path})

    @property
    def sockets_dir(self) -> str:
        return f"{self.kubelet_dir}/device-plugins"

    @property
    def pod_resources_socket(self) -> str:
        return f"{self.kubelet_dir}/pod-resources/kubelet.sock"

    @property
    def ownership_dir(self) -> str:
        """The directory of the files that say which units belong to dynamic resource allocation."""
        return f"{self.kubelet_dir}/plugins/accelplane"

    @property
    def device_apis(self) -> DeviceApis:
        return DeviceApis.of(self.dra_api)


def _check_pages(settings: Settings, source: str) -> None:
    """Raises `ConfigurationError` for options of the pages that contradict each other."""
    for option in ("http-tls-dir", "http-authorized"):
        if getattr(settings, option.replace("-", "_")) and not settings.http_address:
            raise ConfigurationError(f"{source}{option}: found without http-address, expected both")
    if settings.http_client_ca and not settings.http_tls_dir:
        raise ConfigurationError(
            f"{source}http-client-ca: found without http-tls-dir, expected both: client certificates need TLS"
        )
    if settings.http_audience and not settings.http_authorized:
        raise ConfigurationError(f"{source}http-audience: found without http-authorized, expected both")
    if settings.http_authorized and not settings.http_tls_dir and not is_loopback(_host(settings.http_address)):
        raise ConfigurationError(
            f"{source}http-authorized: found http-address {settings.http_address!a} without TLS, expected http-tls-dir "
            "or a loopback address: others on the network could read the tokens"
        )


def _check_values(given: Settings, source: str) -> None:
    """Raises `ConfigurationError` for an unknown word or a number out of range."""
    for option, valid, expected in (
        ("health-interval", given.health_interval == 0 or 1 <= given.health_interval <= 3600, "0 or 1 to 3600 seconds"),
        ("scan-grace", 0 <= given.scan_grace <= 3600, "0 to 3600 seconds"),
        ("dra-evict", given.dra_evict in _EVICT, f"one of {', '.join(_EVICT)}"),
        ("metrics-waking", given.metrics_waking in _WAKING, f"one of {', '.join(_WAKING)}"),
        ("metrics-holders", given.metrics_holders in _HOLDERS, f"one of {', '.join(_HOLDERS)}"),
        ("metrics-min-interval", 0 <= given.metrics_min_interval <= 60, "0 to 60 seconds"),
        ("metrics-max-samples", 100 <= given.metrics_max_samples <= 1_000_000, "100 to 1000000"),
        ("status-socket", bool(given.status_socket), "auto, off or a path"),
        (
            "metrics-holder-labels",
            _LABEL_PREFIX.fullmatch(given.metrics_holder_labels),
            "at most 32 lower-case letters and _",
        ),
    ):
        if not valid:
            found: object = getattr(given, option.replace("-", "_"))
            shown = ascii(found[:40]) if isinstance(found, str) else f"{found:g}" if isinstance(found, float) else found
            raise ConfigurationError(f"{source}{option}: found {shown}, expected {expected}")
    try:
        DeviceApis.of(given.dra_api)
    except ValueError as error:
        raise ConfigurationError(f"{source}dra-api: {error}") from None


def is_loopback(host: str) -> bool:
    """Whether a host is `localhost` or a loopback address."""
    if host in ("localhost", "::1"):
        return True
    try:
        return socket.inet_pton(socket.AF_INET, host).startswith(b"\x7f")
    except (OSError, ValueError):
        return False


def _host(address: str) -> str:
    """The host of `[host]:port`."""
    return address.rpartition(":")[0].removeprefix("[").removesuffix("]")
