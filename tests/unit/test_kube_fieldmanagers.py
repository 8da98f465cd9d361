"""The handover of fields between managers."""

from typing import Any

from accelplane.kube.fieldmanagers import transfer_fields

MANAGER = "accelplane-operator"
Object = dict[str, Any]


def entry(manager: str, operation: str, fields: Object, **more: str) -> Object:
    return {"manager": manager, "operation": operation, "apiVersion": "apps/v1", "fieldsV1": fields, **more}


def test_fields_of_former_managers_are_transferred() -> None:
    other = entry("former", "Update", {"f:spec": {"f:a": {}, "f:b": {"f:c": {}}}})
    status = entry("former", "Update", {"f:status": {}}, subresource="status")
    kubectl = entry("kubectl-edit", "Update", {"f:spec": {"f:x": {}}})
    own = entry(MANAGER, "Apply", {"f:spec": {"f:b": {"f:d": {}}}})
    united = {"f:spec": {"f:a": {}, "f:b": {"f:c": {}, "f:d": {}}}}
    expected = [entry(MANAGER, "Apply", united), status, kubectl]
    assert transfer_fields([other, status, kubectl, own], MANAGER, ["former"]) == expected
    assert transfer_fields([other, status, kubectl, own], MANAGER) is None


def test_fields_of_earlier_updates_are_transferred_to_apply() -> None:
    created = entry(MANAGER, "Update", {"f:spec": {"f:a": {}}})
    status = entry(MANAGER, "Update", {"f:status": {}}, subresource="status")
    assert transfer_fields([created, status], MANAGER) == [entry(MANAGER, "Apply", {"f:spec": {"f:a": {}}}), status]
    assert transfer_fields([status, entry(MANAGER, "Apply", {"f:spec": {}})], MANAGER) is None
