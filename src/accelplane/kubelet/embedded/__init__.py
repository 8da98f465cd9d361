"""A kubelet's device manager for machines that have no kubelet: for demos, tests, and plugin authors' laptops.

It is held to what plugins can observe of the real one, kubelets 1.28 to 1.37: sockets that are swept away at its start,
registration that calls back before it answers, lists that replace each other, the order in which devices are chosen,
the checkpoint, the pod resources socket. There is no API server and no container runtime behind it: pods come from
`EmbeddedKubelet.run_pod`, and their containers are values.
"""

from accelplane.kubelet.embedded.kubelet import EmbeddedKubelet
from accelplane.kubelet.embedded.model import (
    AdmissionError,
    ContainerStartError,
    DeviceStatus,
    KubeletError,
    NoSuchPod,
    PluginOptions,
    Pod,
    Registration,
    ResourceStatus,
    RunningContainer,
    RunningPod,
)

__all__ = [
    "AdmissionError",
    "ContainerStartError",
    "DeviceStatus",
    "EmbeddedKubelet",
    "KubeletError",
    "NoSuchPod",
    "PluginOptions",
    "Pod",
    "Registration",
    "ResourceStatus",
    "RunningContainer",
    "RunningPod",
]
