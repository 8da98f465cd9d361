"""How readings become verdicts, without a service."""

import pytest

from accelplane.devices import HealthPolicy
from accelplane.plugins.gpu import GpuConfig, GpuPlugin
from accelplane.plugins.gpu.health import Heat, limits_of

LIMITS = limits_of(GpuConfig(temp_limit=100, gpu_temp_limit=90, memory_temp_limit=80, temperature_margin=5))


@pytest.mark.parametrize(
    ("temperatures", "complaints"),
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
def test_each_sensor_has_its_own_limit(temperatures: tuple[float, ...], complaints: tuple[str, ...]) -> None:
    assert Heat().after(temperatures, LIMITS, enough=2).complaints == complaints


@pytest.mark.parametrize(
    ("story", "complaints"),
    [
        ([101.0, 98.0], ()),
        ([101.0, 101.0, 98.0], ("global temperature 98.0 °C not yet down to 95",)),
        ([101.0, 101.0, 98.0, 98.0], ("global temperature 98.0 °C not yet down to 95",)),
        ([101.0, 101.0, 95.0], ()),
        ([101.0, 101.0, 95.0, 98.0], ()),
        ([101.0, 99.0, 101.0, 98.0], ()),
    ],
)
def test_a_card_given_up_for_its_heat_must_cool_by_the_margin(story: list[float], complaints: tuple[str, ...]) -> None:
    heat = Heat()
    for temperature in story:
        heat = heat.after((temperature, 0.0, 0.0), LIMITS, enough=2)
    assert heat.complaints == complaints


def test_the_policy_is_what_the_options_say() -> None:
    plugin = GpuPlugin(GpuConfig(health_fail_closed=True, health_bad_verdicts=3))
    assert plugin.health_policy == HealthPolicy(bad_verdicts=3, fail_closed=True)


async def test_without_a_health_source_nothing_is_judged() -> None:
    from accelplane.host import Host

    assert await GpuPlugin().health(Host(), []) == {}
