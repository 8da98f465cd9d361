"""Verdicts from readings, without a service."""

from typing import Any

import pytest

from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.plugins.gpu.health import TemperatureState, temperature_limits

LIMITS = temperature_limits(GpuConfig(temp_limit=100, gpu_temp_limit=90, memory_temp_limit=80, temperature_margin=5))


@pytest.mark.parametrize(
    ("temperatures", "problems"),
    [
        ((100.0, 90.0, 80.0), ()),
        ((100.1, 0.0, 0.0), ("global temperature 100.1 °C above 100",)),
        ((100.9, 0.0, 0.0), ("global temperature 100.9 °C above 100",)),
        ((0.0, 90.5, 0.0), ("gpu temperature 90.5 °C above 90",)),
        ((0.0, 0.0, 81.0), ("memory temperature 81.0 °C above 80",)),
        (
            (101.0, 91.0, -999.0),
            ("global temperature 101.0 °C above 100", "gpu temperature 91.0 °C above 90"),
        ),
        ((-999.0, -999.0, -999.0), ()),
        ((float("nan"), float("nan"), float("-inf")), ()),
    ],
)
def test_each_sensor_has_its_own_limit(temperatures: tuple[float, ...], problems: tuple[str, ...]) -> None:
    assert TemperatureState().after(temperatures, LIMITS, bad_verdicts=2).problems == problems


@pytest.mark.parametrize(
    ("readings", "problems"),
    [
        ([101.0, 98.0], ()),
        ([101.0, 101.0, 98.0], ("global temperature 98.0 °C not yet down to 95",)),
        ([101.0, 101.0, 98.0, 98.0], ("global temperature 98.0 °C not yet down to 95",)),
        ([101.0, 101.0, 95.0], ()),
        ([101.0, 101.0, 95.0, 98.0], ()),
        ([101.0, 99.0, 101.0, 98.0], ()),
    ],
)
def test_an_overheated_card_must_cool_by_the_margin(readings: list[float], problems: tuple[str, ...]) -> None:
    state = TemperatureState()
    for temperature in readings:
        state = state.after((temperature, 0.0, 0.0), LIMITS, bad_verdicts=2)
    assert state.problems == problems


@pytest.mark.parametrize("source", [{"health_management": True}, {"xpumd_endpoint": "/run/xpumd.sock"}])
def test_the_options_determine_the_policy_of_each_source(source: dict[str, Any]) -> None:
    plugin = GpuPlugin(GpuConfig(health_fail_closed=True, health_bad_verdicts=3, **source))
    assert (plugin.health_policy.bad_verdicts, plugin.health_policy.fail_closed) == (3, True)


def test_by_default_a_failed_card_is_unhealthy_within_5_s_and_healthy_again_within_10_s() -> None:
    policy = GpuPlugin(GpuConfig(health_management=True)).health_policy
    assert (policy.bad_verdicts, policy.good_verdicts) == (1, 2)
    assert policy.interval < 5
    assert policy.interval + policy.recovery_delay < 10


async def test_without_a_health_source_there_are_no_verdicts() -> None:
    from accelplane.host import Host

    assert await GpuPlugin().health(Host(), []) == {}
