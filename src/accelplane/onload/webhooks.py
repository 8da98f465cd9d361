"""The admission webhook for Onload resources, which calls `validation`.

An update that leaves the spec unchanged is admitted with warnings: the operator writes its finalizer also to resources
that were stored before there was a webhook. `Validator` admits all updates of a resource that is being deleted.
"""

from collections.abc import Callable, Iterable, Mapping

import msgspec
from msgspec import Raw

from accelplane.kube.admission import Decision, Hook, Review, Validator, deny
from accelplane.onload import validation
from accelplane.onload.models import Onload, Spec
from accelplane.onload.validation import Labels

PATH = "/validate-onload-amd-com-v1alpha1-onload"


class _OldSpec(msgspec.Struct):
    spec: Spec | None = None


def validator(others: Callable[[], Iterable[Onload]], nodes: Callable[[], Mapping[str, Labels]]) -> Hook:
    """The webhook. The functions return the resources of the cluster, and the labels of its nodes."""

    def decide(review: Review, resource: Raw) -> Decision:
        try:
            onload = msgspec.json.decode(resource, type=Onload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return deny(f"{validation.PREFIX}{error}")
        found = validation.verdict(onload, others=others(), nodes=nodes())
        if not found.refusal:
            return Decision(warnings=found.warnings)
        if _spec_is_unchanged(review, onload):
            return Decision(warnings=(found.refusal, *found.warnings))
        return Decision(denial=deny(found.refusal).denial, warnings=found.warnings)

    return Validator(PATH, Raw, decide)


def _spec_is_unchanged(review: Review, onload: Onload) -> bool:
    if review.operation != "UPDATE":
        return False
    try:
        return msgspec.json.decode(review.old_object, type=_OldSpec).spec == onload.spec
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
