"""Checks of what the hooks of plugins return: those of other projects are not type-checked."""

import re
from collections.abc import Collection, Mapping
from typing import get_args

import msgspec
from msgspec.structs import replace

from accelplane.devices import Cause, Verdict

_ANSWERS, _CAUSES = frozenset(("good", "bad", "unknown")), frozenset(get_args(Cause))
_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_NAME = re.compile(rf"(?:[a-z0-9][-a-z0-9.]{{0,252}}/)?{_NAME}")
_LABEL_VALUE = re.compile(rf"(?:{_NAME})?")


def checked_verdicts(found: object, units: Collection[str]) -> tuple[dict[str, Verdict], list[str]]:
    """The verdicts by unit that `Plugin.health` returned for `units`, and the problems of others, which are left out.

    An invalid verdict is "unknown". Another cause than those of `Cause`, which are labels of metrics, is "other".
    Raises `TypeError` if the result is not a mapping.
    """
    verdicts: dict[str, Verdict] = {}
    unknown: list[str] = []
    for unit, verdict in _mapping(found, "verdicts by unit").items():
        if isinstance(unit, str) and unit in units:
            verdicts[unit] = _checked_verdict(verdict)
        else:
            unknown.append(ascii(unit)[:82])
    if not unknown:
        return verdicts, []
    shown = ", ".join(unknown[:8])
    return verdicts, [f"health: found verdicts of {shown}, expected the units of the devices that it was called with"]


def _checked_verdict(found: object) -> Verdict:
    if not isinstance(found, Verdict):
        return Verdict("unknown", f"health: found {ascii(found)[:82]}, expected a Verdict")
    try:
        # msgspec does not validate the fields of an existing value: an answer such as "Bad" would count as good.
        if found.answer in _ANSWERS and found.cause in _CAUSES and type(found.reason) is str:
            return found
        cause = found.cause if found.cause in _CAUSES else "other"
        return msgspec.convert(msgspec.to_builtins(replace(found, cause=cause)), Verdict)
    except (msgspec.MsgspecError, TypeError) as error:
        return Verdict("unknown", f"health: {error}")


def checked_labels(found: object) -> tuple[dict[str, str], list[str]]:
    """The labels that `Plugin.labels` returned, and the problems of invalid ones, which are left out.

    Raises `TypeError` if the result is not a mapping.
    """
    labels: dict[str, str] = {}
    problems: list[str] = []
    for name, value in _mapping(found, "labels").items():
        if not (isinstance(name, str) and _LABEL_NAME.fullmatch(name)):
            problems.append(f"labels: found the name {ascii(name)[:82]}, expected a label name of Kubernetes")
        elif not (isinstance(value, str) and _LABEL_VALUE.fullmatch(value)):
            shown = ascii(value)[:82]
            problems.append(
                f"labels: {name}: found {shown}, expected a text of at most 63 characters of [A-Za-z0-9_.-]"
            )
        else:
            labels[name] = value
    return labels, problems


def _mapping(found: object, expected: str) -> Mapping[object, object]:
    if not isinstance(found, Mapping):
        raise TypeError(f"found {ascii(found)[:82]}, expected a mapping of {expected}")
    return found  # pyright: ignore[reportUnknownVariableType] - of any types
