"""A kubelet's device manager for machines that have no kubelet: for demos, tests, and plugin authors' laptops.

It behaves towards plugins like kubelets 1.28 to 1.37: it removes sockets at its start, calls the plugin back before it
answers Register, replaces the device list with each message, chooses devices in the same order, writes the checkpoint
and serves the pod resources API. It has no API server and no container runtime: pods come from
`EmbeddedKubelet.run_pod`, and their containers are values. `EmbeddedKubelet.would_crash` has the events that would have
crashed a real kubelet.
"""

from accelplane.kubelet.embedded.dra_model import DRA_BEHAVIOURS, AllocatedClaim, ClaimApi, ClaimApiError, PodStartError
from accelplane.kubelet.embedded.kubelet import BEHAVIOURS, EmbeddedKubelet
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
    "BEHAVIOURS",
    "DRA_BEHAVIOURS",
    "AdmissionError",
    "AllocatedClaim",
    "ClaimApi",
    "ClaimApiError",
    "ContainerStartError",
    "DeviceStatus",
    "EmbeddedKubelet",
    "KubeletError",
    "NoSuchPod",
    "PluginOptions",
    "Pod",
    "PodStartError",
    "Registration",
    "ResourceStatus",
    "RunningContainer",
    "RunningPod",
]
