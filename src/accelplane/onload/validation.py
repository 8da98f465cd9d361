"""Validation of Onload resources at admission: errors and warnings.

    verdict(onload, others=…, nodes=…)    the first error, and all warnings

The rules about fields are in `rules`. The others need Python: patterns of kernel versions, paths, names, and other
resources that select the same nodes.
"""

import posixpath
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from accelplane.kube.names import is_dns_subdomain
from accelplane.kube.rules import broken
from accelplane.onload import rules
from accelplane.onload.models import ControlPlane, DevicePluginSpec, KernelMapping, Onload, Spec, options_of
from accelplane.onload.modules import names_of
from accelplane.onload.names import Names, has_dots, too_long
from accelplane.onload.requirements import overlaps

PREFIX = "invalid resource: "

Labels = Mapping[str, str]

# Directories of nodes. Nothing may be installed into the first ones, nor below the second ones.
_SHARED = frozenset(
    {
        *("/", "/home", "/media", "/mnt", "/opt", "/root", "/srv", "/tmp", "/usr", "/usr/local", "/var", "/var/lib"),  # noqa: S108 - a deny list
        *("/var/log", "/var/opt", "/var/tmp", "/var/home", "/usr/libexec", "/usr/share", "/ostree", "/sysroot"),  # noqa: S108
    }
)
_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run", "/sbin", "/sys"),
    *("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/sbin", "/var/run"),
    *("/var/lib/containerd", "/var/lib/containers", "/var/lib/docker", "/var/lib/etcd", "/var/lib/kubelet"),
)
# Directories of containers that belong to the kernel.
_KERNEL = ("/dev", "/proc", "/sys")
_MAX_PATH = 1024
# The parameter of the kernel module has at most 1024 characters, with the container ID and the path of the server.
_MAX_PARAMETERS = 800
# Longer patterns are left to KMM, which compiles them too.
_MAX_PATTERN = 1024
# RE2, the language of KMM, has none of these.
_NOT_IN_RE2 = re.compile(r"(?<!\\)(?:\\\\)*(\(\?(?:[=!]|<[=!]|>|\(|#|P=)|\\[1-9])")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]")
# Python has none of these.
_ONLY_IN_RE2 = re.compile(r"\\[zpPQEC]|\(\?<[A-Za-z_]|\(\?[a-z]*[U-]|\[\[:|[*+?}][+]")
_REPEAT = re.compile(r"(?:\{|,)([0-9]{1,9})(?=[,}])")
_MAX_REPEAT = 1000


class Verdict(msgspec.Struct, frozen=True):
    """`refusal` is empty when the resource is admitted. The warnings are shown to the author."""

    refusal: str = ""
    warnings: tuple[str, ...] = ()


def verdict(onload: Onload, *, others: Iterable[Onload] = (), nodes: Mapping[str, Labels] | None = None) -> Verdict:
    """Validates a resource after defaulting.

    `others` are the resources of the cluster, and may include it. `nodes` has the labels of each node by name.
    """
    found = tuple(_warnings(onload, others, nodes or {}))
    for error in _errors(onload.spec, names_of(onload)):
        return Verdict(PREFIX + error, found)
    return Verdict(warnings=found)


def _errors(spec: Spec, own: Names) -> Iterator[str]:
    if error := too_long(own):
        yield error
    yield from broken(spec, rules.SPEC)
    yield from broken(spec.device_plugin, rules.DEVICE_PLUGIN)
    for place, mapping in enumerate(spec.onload.kernel_mappings):
        yield from _mapping_errors(mapping, f"onload.kernelMappings[{place}]")
    yield from _path_errors(spec.device_plugin)
    yield from _parameter_errors(spec.onload.control_plane)
    for field, name in (
        ("serviceAccountName", spec.service_account_name),
        ("imagePullSecret.name", spec.image_pull_secret.name if spec.image_pull_secret else ""),
    ):
        if name and not is_dns_subdomain(name):
            yield f"{field} is {name[:80]!a}, expected a name of a-z, 0-9, - and .; change it"
    if spec.image_pull_secret and not spec.image_pull_secret.name:
        yield "imagePullSecret.name is empty, expected the name of a Secret; set it or remove imagePullSecret"
    yield from rules.duration_errors(spec.upgrade)


def _mapping_errors(mapping: KernelMapping, field: str) -> Iterator[str]:
    if not mapping.kernel_module_image:
        yield f"{field}.kernelModuleImage is empty, expected an image with the kernel modules; set it"
    if not mapping.regexp:
        yield f"{field}.regexp is empty, expected a pattern of kernel versions; write .* for all"
    elif error := pattern_error(mapping.regexp):
        yield f"{field}.regexp is {mapping.regexp[:80]!a}, expected a regular expression: {error}; change it"


def _parameter_errors(plane: ControlPlane | None) -> Iterator[str]:
    """The worker passes the parameters to the kernel, which separates them at white space and limits their length."""
    text = " ".join((plane.parameters or ()) if plane is not None else ())
    if not (text.isascii() and text.isprintable()):
        yield f"onload.controlPlane.parameters is {text[:80]!a}, expected printable ASCII characters; change it"
    if len(text) > _MAX_PARAMETERS:
        yield (
            f"onload.controlPlane.parameters has {len(text)} characters, expected at most {_MAX_PARAMETERS}; shorten it"
        )


def pattern_error(pattern: str) -> str:
    """Why KMM cannot compile a pattern; empty if it can, or if that is uncertain."""
    if len(pattern) > _MAX_PATTERN:
        return ""
    if found := _NOT_IN_RE2.search(_CLASS.sub("[]", pattern)):
        return f"{found[1]} is not supported"
    if any(int(count) > _MAX_REPEAT for count in _REPEAT.findall(pattern)):
        return f"a repetition of more than {_MAX_REPEAT} is not supported"
    try:
        with warnings.catch_warnings(action="ignore"):
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return "" if _ONLY_IN_RE2.search(pattern) else str(error)
    return ""


def _path_errors(spec: DevicePluginSpec) -> Iterator[str]:
    options = options_of(spec)
    paths = {
        "hostOnloadPath": options.host_onload_path,
        "baseMountPath": options.base_mount_path,
        "binMountPath": options.bin_mount_path,
        "libMountPath" if spec.lib_mount_path is not None else "libMounthPath": options.lib_mount_path,
    }
    for field, path in paths.items():
        if path is not None and not _is_clean(path):
            yield (
                f"devicePlugin.{field} is {path[:80]!a}, expected an absolute path without empty parts, . and ..; "
                "change it"
            )
    host = (options.host_onload_path or "").rstrip("/") or "/"
    if options.host_onload_path is not None and (host in _SHARED or _is_below(host, _SYSTEM)):
        yield (
            f"devicePlugin.hostOnloadPath is {host}, expected a directory for Onload only; change it, for example to "
            "/opt/onload"
        )
    for field, path in list(paths.items())[2:]:
        inside = posixpath.normpath(f"/{options.base_mount_path or ''}/{path or ''}")
        if _is_below(f"/{inside.lstrip('/')}", _KERNEL):
            yield f"devicePlugin.{field} leads to {inside} in pods, which belongs to the kernel; change it"


def _is_clean(path: str) -> bool:
    text = path if path == "/" else path.removesuffix("/")
    return (
        text.startswith("/")
        and not text.startswith("//")
        and len(path) <= _MAX_PATH
        and path.isprintable()
        and posixpath.normpath(text) == text
    )


def _is_below(path: str, directories: Iterable[str]) -> bool:
    return any(path == each or path.startswith(f"{each}/") for each in directories)


# Warnings


def _warnings(onload: Onload, others: Iterable[Onload], nodes: Mapping[str, Labels]) -> Iterator[str]:
    spec, own = onload.spec, names_of(onload)
    if warning := has_dots(own):
        yield warning
    for place, mapping in enumerate(spec.onload.kernel_mappings):
        field = f"onload.kernelMappings[{place}]"
        last = re.sub(r"\$\{\w*\}", "x", mapping.kernel_module_image).rpartition("/")[2]
        if mapping.kernel_module_image and ":" not in last and "@" not in last:
            yield f"{field}.kernelModuleImage has no tag and no digest, which KMM 2.2 and later rejects; add a tag"
        if mapping.build and not mapping.build.dockerfile_config_map.name:
            yield f"{field}.build.dockerfileConfigMap.name is empty, so KMM cannot build the image; set it"
    yield from (each.message for each in overlaps(onload, others, nodes))
