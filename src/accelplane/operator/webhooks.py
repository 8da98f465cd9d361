"""The admission webhooks for custom resources, which call `defaulting` and `validation`.

Webhook configurations can name kinds that the operator does not manage. Resources of these kinds are denied
with a message that names the kind.
"""

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Raw

from accelplane.kube.admission import ALLOWED, Decision, Hook, Mutator, Review, Validator, deny, denying
from accelplane.kube.jsonpatch import Operation
from accelplane.kube.jsontypes import Json
from accelplane.operator import defaulting, models, validation
from accelplane.operator.controller import PluginController
from accelplane.operator.overlap import overlaps_of
from accelplane.operator.settings import ImagePolicy, Settings


def hooks(controllers: Mapping[str, PluginController], settings: Settings) -> Iterator[Hook]:
    """The two webhooks of every kind. Those of kinds without a controller refuse all resources."""
    for family, model in models.KINDS.items():
        kind = model.__name__.lower()
        paths = [f"/{verb}-deviceplugin-intel-com-v1-{kind}" for verb in ("mutate", "validate")]
        controller = controllers.get(family)
        if controller is None:
            for path in paths:
                yield denying(
                    path,
                    f"{model.__name__} is not enabled: add -devices={family} to the operator",
                )
        else:
            yield _defaulter(paths[0], family, settings.images)
            yield _validator(paths[1], controller, settings)


def _defaulter(path: str, family: str, policy: ImagePolicy) -> Mutator[Raw]:
    def decide(_review: Review, resource: Raw) -> Decision:
        try:
            missing = defaulting.patch(family, resource, policy)
        except msgspec.DecodeError as error:
            return deny(f"{validation.PREFIX}{error}", code=400, reason="BadRequest")
        return Decision(patch=msgspec.convert(missing, list[Operation])) if missing else ALLOWED

    return Mutator(path, Raw, decide)


def _validator(path: str, controller: PluginController, settings: Settings) -> Validator[Raw]:
    def decide(review: Review, resource: Raw) -> Decision:
        document: Json = msgspec.json.decode(resource)
        if not isinstance(document, dict):
            return deny(
                f"{validation.PREFIX}found no object, expected a custom resource", code=400, reason="BadRequest"
            )
        try:
            plugin = models.decode(document)
        except msgspec.DecodeError as error:
            return deny(f"{validation.PREFIX}{error}")
        others = controller.other_resources(plugin.name)
        overlaps = overlaps_of(plugin, others, controller.node_labels()) if others else ()
        verdict = validation.verdict(
            plugin,
            settings.images,
            others=others,
            overlaps=overlaps,
            is_update=review.operation == "UPDATE",
            grants_dra=bool(settings.dra_role),
        )
        if verdict.refusal:
            return Decision(denial=deny(verdict.refusal).denial, warnings=verdict.warnings)
        return Decision(warnings=verdict.warnings)

    return Validator(path, Raw, decide)
