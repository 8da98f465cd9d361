"""Validation of the spec fields that are copied to the pods of the DaemonSet.

The API server validates these fields only in the DaemonSet, which the operator writes. Admission validates them where
their author sees the error.
"""

import re
from collections.abc import Iterator, Mapping

from accelplane.kube.names import is_dns_subdomain, is_label_value, is_qualified_name
from accelplane.kube.quantities import number_of
from accelplane.operator.models import PluginSpec, Resources, Toleration

_STANDARD = re.compile(r"cpu|memory|ephemeral-storage|hugepages-.+")
_OPERATORS = ("", "Exists", "Equal")
_EFFECTS = ("", "NoSchedule", "PreferNoSchedule", "NoExecute")
# The API server's limit for all annotations of an object.
_MAX_ANNOTATION_BYTES = 256 * 1024
_KEY = "use letters, digits, -, _ and ., with an optional prefix such as example.com/"
_VALUE = "use at most 63 letters, digits, -, _ and ."
_OBJECT = "use only a-z, 0-9, - and ."


def pod_errors(spec: PluginSpec) -> Iterator[str]:
    """One line per error, with the field, the value found and what to write."""
    for key, value in spec.node_selector.items():
        if not is_qualified_name(key):
            yield f"nodeSelector has the key {key!a}, expected a label key such as kubernetes.io/arch; {_KEY}"
        if not is_label_value(value):
            yield f"nodeSelector[{key}] is {value!a}, expected a label value such as true; {_VALUE}"
    for position, toleration in enumerate(spec.tolerations):
        for error in _toleration(toleration):
            yield f"tolerations[{position}].{error}"
    for position, secret in enumerate(spec.image_pull_secrets):
        if not is_dns_subdomain(secret.name):
            yield f"imagePullSecrets[{position}].name is {secret.name!a}, expected the name of a Secret; {_OBJECT}"
    if spec.priority_class_name and not is_dns_subdomain(spec.priority_class_name):
        yield f"priorityClassName is {spec.priority_class_name!a}, expected the name of a PriorityClass; {_OBJECT}"
    if spec.resources:
        yield from _resources(spec.resources)
    yield from _annotations(spec.pod_annotations)


def _toleration(toleration: Toleration) -> Iterator[str]:
    if toleration.operator not in _OPERATORS:
        yield f"operator is {toleration.operator!a}, expected Exists or Equal; write one of them"
    if toleration.effect not in _EFFECTS:
        yield f"effect is {toleration.effect!a}, expected {', '.join(_EFFECTS[1:])}; write one of them or remove it"
    if toleration.key and not is_qualified_name(toleration.key):
        yield f"key is {toleration.key!a}, expected a taint key such as example.com/gpu; {_KEY}"
    if not toleration.key and toleration.operator != "Exists":
        yield "key is empty, expected a taint key; set key, or operator Exists for all taints"
    if toleration.operator == "Exists" and toleration.value:
        yield f"value is {toleration.value!a} and operator is Exists, expected no value; remove value"
    if not is_label_value(toleration.value):
        yield f"value is {toleration.value!a}, expected a taint value; {_VALUE}"
    if toleration.toleration_seconds is not None and toleration.effect != "NoExecute":
        yield (
            f"tolerationSeconds is {toleration.toleration_seconds}, expected none without effect NoExecute; "
            "set effect NoExecute or remove tolerationSeconds"
        )


def _resources(resources: Resources) -> Iterator[str]:
    for field, amounts in (("limits", resources.limits), ("requests", resources.requests)):
        for name, amount in amounts.items():
            number = number_of(amount)
            if not is_qualified_name(name) or not ("/" in name or _STANDARD.fullmatch(name)):
                yield (
                    f"resources.{field} has the key {name!a}, expected cpu, memory, ephemeral-storage, "
                    "hugepages-<size> or <domain>/<resource>; write one of them"
                )
            if number is None or number < 0:
                yield f"resources.{field}[{name}] is {amount!a}, expected a quantity; write for example 100m or 64Mi"
            elif "/" in name and number.denominator != 1:
                yield f"resources.{field}[{name}] is {amount!a}, expected an integer; write for example 1"
    for name, amount in resources.requests.items():
        overcommitted = "/" not in name and not name.startswith("hugepages-")
        limit = resources.limits.get(name)
        desired, most = number_of(amount), None if limit is None else number_of(limit)
        if not overcommitted and desired != most:
            yield (
                f"resources.requests[{name}] is {amount!a} and the limit is "
                f"{'unset' if limit is None else ascii(limit)}, expected equal values; set the limit to the request"
            )
        if desired is not None and most is not None and desired > most:
            yield (
                f"resources.requests[{name}] is {amount!a}, expected at most the limit {limit!a}; "
                "lower the request or raise the limit"
            )


def _annotations(annotations: Mapping[str, str]) -> Iterator[str]:
    for key in annotations:
        if not is_qualified_name(key.lower()):
            yield f"podAnnotations has the key {key!a}, expected an annotation key such as example.com/owner; {_KEY}"
    size = sum(len(text.encode()) for pair in annotations.items() for text in pair)
    if size > _MAX_ANNOTATION_BYTES:
        yield f"podAnnotations has {size} bytes, expected at most {_MAX_ANNOTATION_BYTES}; remove some of them"
