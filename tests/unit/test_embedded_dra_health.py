"""Health reports at the embedded kubelet expire."""

import pytest

from accelplane.kubelet import drahealth_v1_pb2 as pb
from accelplane.kubelet.embedded.dra_health import DraHealth


def report(*devices: str, timeout: int = 0) -> pb.NodeWatchResourcesResponse:
    return pb.NodeWatchResourcesResponse(
        devices=[
            pb.DeviceHealth(
                device=pb.DeviceIdentifier(pool_name="node-1", device_name=name),
                health=pb.HEALTHY,
                health_check_timeout_seconds=timeout,
            )
            for name in devices
        ]
    )


@pytest.mark.parametrize(("timeout", "lasts"), [(0, 30), (-5, 30), (300, 300)])
def test_a_report_expires(timeout: int, lasts: int) -> None:
    now = 0.0
    health = DraHealth(lambda: None, announced_only=True, clock=lambda: now)
    health.record("gpu.example.com", report("a", timeout=timeout))
    now = lasts
    assert health.status("gpu.example.com", "node-1", "a")[0] == "Healthy"
    now = lasts + 1
    assert health.status("gpu.example.com", "node-1", "a")[0] == "Unknown"


def test_a_device_that_is_not_reported_again_keeps_its_health_until_it_expires() -> None:
    now = 0.0
    health = DraHealth(lambda: None, announced_only=True, clock=lambda: now)
    health.record("gpu.example.com", report("a", "b"))
    now = 20
    health.record("gpu.example.com", report("b"))
    assert health.status("gpu.example.com", "node-1", "a")[0] == "Healthy"
    now = 31
    assert [health.status("gpu.example.com", "node-1", name)[0] for name in "ab"] == ["Unknown", "Healthy"]
