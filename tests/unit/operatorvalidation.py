"""Results of the operator's validation."""

from typing import Any

from customresources import plugin

from accelplane.operator.settings import RELEASE, ImagePolicy
from accelplane.operator.validation import verdict

POLICY = ImagePolicy(vendor="registry.example.com/accelplane")


def original(family: str, tag: str = "0.31.1") -> str:
    return f"intel/intel-{family}-plugin:{tag}"


def own_image(name: str, tag: str = RELEASE) -> str:
    return f"registry.example.com/accelplane/{name}:{tag}"


def warnings_of(family: str, policy: ImagePolicy = POLICY, **spec: Any) -> str:
    found = verdict(plugin(family, **{"image": own_image(f"intel-{family}-plugin")} | spec), policy)
    assert found.refusal == ""
    return "\n".join(found.warnings)
