"""The record of the ports that are allocated to a container, in places that authors of pods cannot write.

The plugin writes them into the hook's arguments in the CDI file of a device; the runtime copies these into the
container's configuration. It also answers the kubelet with annotations. CRI-O adds those and the pod's annotations to
the configuration, and then sets one of its own to a copy of the kubelet's (its internal/factory/container). containerd
can be configured to add annotations of pods with any name, and always adds its own (its internal/cri/annotations).
"""

import json
from collections.abc import Iterator, Mapping, Sequence

from accelplane.fpga import FpgaError, Json

HOOK = "/opt/intel/fpga-sw/intel-fpga-crihook"
ANY = "any"  # for hooks of runtimes that keep no record: every port among the container's devices

_FLAG = "-ports="
_ANNOTATION = "com.intel.fpga.ports/"
_CRIO_ANNOTATION = "io.kubernetes.cri-o.Annotations"
_CONTAINERD_ANNOTATIONS = "io.kubernetes.cri."


def hook_arguments(ports: Sequence[str]) -> Sequence[str]:
    """Returns the arguments of the hook in the CDI file of a device with these ports, from the program's name on."""
    return HOOK.rpartition("/")[2], f"{_FLAG}{','.join(ports)}"


def annotations(device: str, ports: Sequence[str]) -> Mapping[str, str]:
    """Returns the annotation of a device with these ports, which no other device has."""
    return {f"{_ANNOTATION}{device}": ",".join(ports)}


def allocated_ports(config: Mapping[str, Json]) -> frozenset[str]:
    """Returns the names of the ports in the record of a container's configuration. Raises `FpgaError`.

    Annotations count only with CRI-O, and only if no hook of CDI has a record. Hooks of hooks.d have no arguments.
    """
    hooks = config.get("hooks")
    created = hooks.get("createRuntime") if isinstance(hooks, dict) else None
    entries = created if isinstance(created, list) else []
    own = [hook for hook in entries if isinstance(hook, dict) and hook.get("path") == HOOK]
    recorded = [*_by_cdi(own)] or _by_crio(config.get("annotations"))
    return frozenset(name for names in recorded for name in names.split(",") if name)


def _by_cdi(hooks: Sequence[Mapping[str, Json]]) -> Iterator[str]:
    for hook in hooks:
        arguments = hook.get("args")
        for argument in arguments if isinstance(arguments, list) else ():
            if isinstance(argument, str) and argument.startswith(_FLAG):
                yield argument.removeprefix(_FLAG)


def _by_crio(found: Json) -> Iterator[str]:
    if not isinstance(found, dict) or any(key.startswith(_CONTAINERD_ANNOTATIONS) for key in found):
        return
    text = found.get(_CRIO_ANNOTATION)
    if not isinstance(text, str):
        return
    try:
        kept: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FpgaError(f"annotation {_CRIO_ANNOTATION}: not JSON: {error}") from None
    for key, value in kept.items() if isinstance(kept, dict) else ():
        if key.startswith(_ANNOTATION) and isinstance(value, str):
            yield value
