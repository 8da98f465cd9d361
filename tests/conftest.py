"""How much hypothesis tries: little by default, more with `ACCELPLANE_FUZZ=2000` in the environment."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "accelplane",
    max_examples=int(os.environ.get("ACCELPLANE_FUZZ", "50")),
    deadline=None,  # two shared cores: the time of one example says nothing
    database=None,
    # The fixtures in question are paths and empty directories that every example fills for itself.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("accelplane")
