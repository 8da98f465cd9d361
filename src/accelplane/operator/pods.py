"""What the API server would refuse in the pods of a DaemonSet, told where it was written: in the custom resource."""

import re
from collections.abc import Iterator, Mapping

from accelplane.kube.names import is_dns_subdomain, is_label_value, is_qualified_name
from accelplane.kube.quantities import number_of
from accelplane.operator.models import PluginSpec, Resources, Toleration

_STANDARD = re.compile(r"cpu|memory|ephemeral-storage|hugepages-.+")
_OPERATORS = ("", "Exists", "Equal")
_EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
_MOST_ANNOTATIONS = 256 * 1024


def pod_refusals(spec: PluginSpec) -> Iterator[str]:
    """What is wrong with the fields that go into the pods as they are; each names the field."""
    for key, value in spec.node_selector.items():
        if not is_qualified_name(key):
            yield f"nodeSelector has the key {key!a}, expected a label's name"
        if not is_label_value(value):
            yield f"nodeSelector[{key}] is {value!a}, expected a label's value"
    for position, toleration in enumerate(spec.tolerations):
        for problem in _toleration(toleration):
            yield f"tolerations[{position}].{problem}"
    for position, secret in enumerate(spec.image_pull_secrets):
        if not is_dns_subdomain(secret.name):
            yield f"imagePullSecrets[{position}].name is {secret.name!a}, expected the name of a secret"
    if spec.priority_class_name and not is_dns_subdomain(spec.priority_class_name):
        yield f"priorityClassName is {spec.priority_class_name!a}, expected the name of a priority class"
    if spec.resources:
        yield from _resources(spec.resources)
    yield from _annotations(spec.pod_annotations)


def _toleration(toleration: Toleration) -> Iterator[str]:
    if toleration.operator not in _OPERATORS:
        yield f"operator is {toleration.operator!a}, expected Exists or Equal"
    if toleration.effect not in _EFFECTS:
        yield f"effect is {toleration.effect!a}, expected {', '.join(_EFFECTS[1:])} or none"
    if toleration.key and not is_qualified_name(toleration.key):
        yield f"key is {toleration.key!a}, expected a taint's name"
    if not toleration.key and toleration.operator != "Exists":
        yield "key is empty, expected one, or Exists as operator"
    if toleration.operator == "Exists" and toleration.value:
        yield f"value is {toleration.value!a} and operator is Exists, expected no value"
    if not is_label_value(toleration.value):
        yield f"value is {toleration.value!a}, expected a taint's value"
    if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
        yield f"tolerationSeconds is {toleration.toleration_seconds}, expected NoExecute as effect"


def _resources(resources: Resources) -> Iterator[str]:
    for field, amounts in (("limits", resources.limits), ("requests", resources.requests)):
        for name, amount in amounts.items():
            number = number_of(amount)
            if not is_qualified_name(name) or not ("/" in name or _STANDARD.fullmatch(name)):
                yield (
                    f"resources.{field} has the key {name!a}, expected cpu, memory, ephemeral-storage, "
                    "hugepages-<size> or a resource's name with its domain"
                )
            if number is None or number < 0:
                yield f"resources.{field}[{name}] is {amount!a}, expected an amount like 100m or 64Mi"
            elif "/" in name and number.denominator != 1:
                yield f"resources.{field}[{name}] is {amount!a}, expected a whole number"
    for name, amount in resources.requests.items():
        shared = "/" not in name and not name.startswith("hugepages-")
        limit = resources.limits.get(name)
        wanted, most = number_of(amount), None if limit is None else number_of(limit)
        if not shared and wanted != most:
            yield f"resources.requests[{name}] is {amount!a}, expected the limit, which is {limit!a}"
        if wanted is not None and most is not None and wanted > most:
            yield f"resources.requests[{name}] is {amount!a}, expected no more than the limit {limit!a}"


def _annotations(annotations: Mapping[str, str]) -> Iterator[str]:
    for key in annotations:
        if not is_qualified_name(key.lower()):
            yield f"podAnnotations has the key {key!a}, expected an annotation's name"
    size = sum(len(text.encode()) for pair in annotations.items() for text in pair)
    if size > _MOST_ANNOTATIONS:
        yield f"podAnnotations has {size} bytes, expected {_MOST_ANNOTATIONS} or fewer"
