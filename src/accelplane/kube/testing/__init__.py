"""A test double of the API server, for authors of controllers. `docs/kube.md` documents its scope.

    async with FakeApiServer() as server:
        client = Client(server.config, field_manager="test")
        server.put("configmaps", {"metadata": {"name": "one", "namespace": "default"}, "data": {"a": "1"}})
        server.fault("PATCH .*configmaps", 409)

It needs no other packages than `accelplane.kube`. Programs must not import it.
"""

from .faults import Fault, RecordedRequest
from .patches import PatchError, apply_json_patch, apply_merge_patch
from .server import FakeApiServer

__all__ = ["FakeApiServer", "Fault", "PatchError", "RecordedRequest", "apply_json_patch", "apply_merge_patch"]
