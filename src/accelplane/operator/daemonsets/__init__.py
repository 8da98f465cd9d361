"""The DaemonSet of a custom resource.

    render(plugin, settings, provisioning=…)  -> DaemonSet      complete, ready to be applied
    provisioning_hash(data, binary_data)      -> str            the value of `provisioning` for a ConfigMap
    DaemonSet.as_object()                     -> JsonObject     as JSON

Rendering is a pure function. It uses the images of the spec, so `images.upgrade` is called before. If the releases of
the Go operator differ, the DaemonSet has the form of the newest one, with the fields that only older ones have
(`resourceManager`, annotations of QAT). In addition, only pods that use an account have its token, the init container
of FPGA has the image of the resource from the beginning, the node selector of IAA has its architecture, and `vfio-pci`
of DSA has a separate directory.
"""

from accelplane.operator.daemonsets.objects import DaemonSet
from accelplane.operator.daemonsets.rendering import (
    PROVISIONING_ANNOTATION,
    daemonset_name,
    provisioning_hash,
    render,
)
from accelplane.operator.daemonsets.skeletons import skeleton

__all__ = ["PROVISIONING_ANNOTATION", "DaemonSet", "daemonset_name", "provisioning_hash", "render", "skeleton"]
