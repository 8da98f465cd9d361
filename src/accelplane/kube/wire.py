"""Parts of the Kubernetes API as types that several custom resources have, with descriptions for their definitions."""

from typing import Annotated

import msgspec
from msgspec import Meta

Int32 = Annotated[int, Meta(extra_json_schema={"format": "int32"})]
Int64 = Annotated[int, Meta(extra_json_schema={"format": "int64"})]


class Wire(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """Encoded as the API writes it: names in camel case, unset fields left out."""


class Toleration(Wire, frozen=True):
    key: Annotated[str, Meta(description="Key of the taint. Empty with operator Exists: all keys.")] = ""
    operator: Annotated[
        str, Meta(description="Exists (any value) or Equal (the value must match). Equal when not set.")
    ] = ""
    value: Annotated[str, Meta(description="Value of the taint. Empty with operator Exists.")] = ""
    effect: Annotated[
        str,
        Meta(description="Effect of the taint: NoSchedule, PreferNoSchedule or NoExecute. All effects when not set."),
    ] = ""
    toleration_seconds: Annotated[
        Int64 | None,
        Meta(description="Seconds until a pod is evicted, with effect NoExecute. Never evicted when not set."),
    ] = None
