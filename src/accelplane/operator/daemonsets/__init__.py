"""The DaemonSet that a custom resource asks for.

    render(plugin, settings, provisioning=…)  -> DaemonSet      the whole of it, ready to be applied
    provisioning_hash(data, binary_data)      -> str            what `provisioning` is of a ConfigMap's content
    DaemonSet.as_object()                     -> JsonObject     as JSON

It is a function of its arguments: the images in the spec are taken as they are, so `images.upgrade` comes before. Where
Go's releases differ it is in the form of the newest; what older ones had and newer ones have not (`resourceManager`,
annotations of QAT) is there. Beyond both: pods have an account's token only where they use it, the init container of
FPGA has the resource's image at once, IAA's node selector its architecture, and DSA's `vfio-pci` its own directory.
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
