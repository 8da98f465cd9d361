"""The handlers of a `FakeApiServer` for all requests except watches.

Facts: Kubernetes API concepts (verbs, patch types, dry run, finalizers, list chunks), API-initiated eviction.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from .documents import JsonObject, deep_copy
from .faults import RecordedRequest
from .managedfields import ApplyConflict, Manager, apply, update
from .patches import PatchError, apply_json_patch, apply_merge_patch
from .selectors import matches
from .storage import Storage

_REASONS = {
    400: "BadRequest", 403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired",
    415: "UnsupportedMediaType", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
}  # fmt: skip


class Failure(Exception):
    """The request fails with this HTTP status."""

    def __init__(self, code: int, message: str, reason: str = "", details: JsonObject | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason or _REASONS.get(code, "")
        self.details = details

    def status(self) -> JsonObject:
        """The Status object of the response."""
        status: JsonObject = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": self.code,
            "reason": self.reason,
            "message": str(self),
        }
        return status | ({"details": self.details} if self.details else {})


@dataclass(frozen=True)
class Resource:
    """The parts of a path."""

    group: str
    version: str
    plural: str
    namespace: str
    name: str
    subresource: str

    @property
    def custom(self) -> bool:
        """Whether the kind is a custom resource."""
        return "." in self.group and not self.group.endswith(".k8s.io")

    @classmethod
    def of(cls, path: str) -> "Resource":
        """Raises `Failure`."""
        parts = path.strip("/").split("/")
        if parts[0] == "api" and len(parts) > 2:
            group, version, *parts = "", *parts[1:]
        elif parts[0] == "apis" and len(parts) > 3:
            _, group, version, *parts = parts
        else:
            raise Failure(404, f"{path}: not found")
        namespace = ""
        if parts[0] == "namespaces" and len(parts) > 2 and parts[2] not in {"status", "finalize"}:
            namespace, parts = parts[1], parts[2:]
        plural, name, subresource = [*parts, "", ""][:3]
        return cls(group, version, plural, namespace, name, subresource)


class Handlers:
    """Executes requests on a storage."""

    def __init__(self, storage: Storage, admit: Callable[[JsonObject], JsonObject]) -> None:
        self._storage = storage
        self._admit = admit

    def handle(self, request: RecordedRequest) -> tuple[int, JsonObject]:
        """The status and the body of the response. Raises `Failure`."""
        resource = Resource.of(request.path)
        if request.method == "GET":
            found = self._get(resource) if resource.name else self._list(resource, request)
            return 200, partial_metadata(found, request.accept)
        if request.method == "POST":
            return 201, self._evict(resource, request) if resource.name else self._create(resource, request)
        if request.method == "DELETE":
            return 200, self._delete(resource, request) if resource.name else self._delete_all(resource, request)
        if request.method == "PATCH" and "apply" in request.content_type:
            return self._apply(resource, request)
        if request.method in {"PATCH", "PUT"}:
            return 200, self._change(resource, request)
        raise Failure(405, f"{request.method}: not allowed", "MethodNotAllowed")

    # Reading

    def _get(self, resource: Resource) -> JsonObject:
        if resource.subresource not in {"", "status"}:
            raise Failure(404, f"subresource {resource.subresource}: not served")
        found = self._storage.get(resource.plural, resource.name, resource.namespace)
        if found is None:
            raise Failure(404, f'{resource.plural} "{resource.name}" not found')
        return found

    def select(self, resource: Resource, request: RecordedRequest) -> list[JsonObject]:
        """The objects that a list or watch selects, in the order of their keys."""
        try:
            return [
                thing
                for key, thing in sorted(self._storage.objects.items(), key=lambda entry: entry[0])
                if key[0] == resource.plural
                and resource.namespace in {"", key[1]}
                and matches(thing, request.parameters)
            ]
        except ValueError as error:
            raise Failure(400, str(error)) from error

    def _list(self, resource: Resource, request: RecordedRequest) -> JsonObject:
        things = self.select(resource, request)
        start, _, version = request.parameters.get("continue", "").partition("@")
        if version and int(version) < self._storage.oldest:
            raise Failure(410, "the continue token is too old")
        first = int(start or 0)
        limit = int(request.parameters.get("limit", "0")) or len(things) or 1
        metadata: JsonObject = {"resourceVersion": str(self._storage.version)}
        if first + limit < len(things):
            metadata["continue"] = f"{first + limit}@{version or self._storage.version}"
        api_version = f"{resource.group}/{resource.version}" if resource.group else resource.version
        # The API server writes null for an empty list of a built-in kind.
        return {
            "kind": "List",
            "apiVersion": api_version,
            "metadata": metadata,
            "items": things[first : first + limit] or None,
        }

    # Writing

    def _create(self, resource: Resource, request: RecordedRequest) -> JsonObject:
        created: JsonObject = deep_copy(request.body)
        metadata: JsonObject = created.setdefault("metadata", {})
        if "name" not in metadata and "generateName" in metadata:
            metadata["name"] = f"{metadata['generateName']}{uuid.uuid4().hex[:5]}"
        if not metadata.get("name"):
            raise Failure(422, "metadata.name: Required value: name or generateName is required")
        if metadata.get("resourceVersion"):
            raise Failure(400, "resourceVersion should not be set on objects to be created")
        if self._storage.get(resource.plural, metadata["name"], resource.namespace) is not None:
            raise Failure(409, f'{resource.plural} "{metadata["name"]}" already exists', "AlreadyExists")
        return self._store_new(resource, request, update({"metadata": {}}, created, _manager(resource, request)))

    def _store_new(self, resource: Resource, request: RecordedRequest, created: JsonObject) -> JsonObject:
        metadata: JsonObject = created["metadata"]
        if resource.namespace and metadata.setdefault("namespace", resource.namespace) != resource.namespace:
            raise Failure(400, "the namespace of the object does not match the namespace of the request")
        created.pop("status", None)
        if resource.custom:
            # Without a controller that observes it, a generation would make a DaemonSet appear unready.
            metadata["generation"] = 1
        created = self._admit(created)
        return created if request.dry_run else self._storage.store(resource.plural, created)

    def _apply(self, resource: Resource, request: RecordedRequest) -> tuple[int, JsonObject]:
        body: JsonObject = request.body
        if "fieldManager" not in request.parameters:
            raise Failure(422, "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
        if body.get("metadata", {}).get("managedFields"):
            raise Failure(400, "metadata.managedFields must be nil")
        known = self._storage.get(resource.plural, resource.name, resource.namespace)
        if known is None and resource.subresource:
            raise Failure(404, f'{resource.plural} "{resource.name}" not found')
        _check_preconditions(known, body.get("metadata", {}))
        manager, force = _manager(resource, request), request.parameters.get("force") == "true"
        if known is None:
            created = apply({"metadata": {"name": resource.name}}, body, manager, force=force)
            return 201, self._store_new(resource, request, created)
        written: JsonObject = {**body, "metadata": body.get("metadata", {})}
        for name in list(written):
            if (name == "status") != (resource.subresource == "status") and name not in {
                "apiVersion",
                "kind",
                "metadata",
            }:
                del written[name]
        if resource.subresource:
            written["metadata"] = {}
        try:
            changed = apply(known, written, manager, force=force)
        except ApplyConflict as error:
            raise _conflict(error, body.get("apiVersion", "")) from error
        return 200, self._write(resource, request, known, changed)

    def _change(self, resource: Resource, request: RecordedRequest) -> JsonObject:
        known = self._get(resource)
        if request.method == "PUT":
            changed: JsonObject = request.body
            if resource.custom and not changed["metadata"].get("resourceVersion"):
                raise Failure(422, "metadata.resourceVersion: Invalid value: 0: must be specified for an update")
        elif "json-patch" in request.content_type:
            try:
                changed = apply_json_patch(known, request.body)
            except PatchError as error:
                raise Failure(
                    422, f"the server rejected our request due to an error in our request: {error}"
                ) from error
        elif "merge-patch" in request.content_type:
            changed = apply_merge_patch(known, request.body)
        else:
            raise Failure(415, f"{request.content_type}: not supported by FakeApiServer")
        _check_preconditions(known, changed["metadata"])
        if resource.subresource:
            changed = {**known, "status": changed.get("status")}
        else:
            changed = {**changed, "status": known["status"]} if "status" in known else _without_status(changed)
        changed = update(known, changed, _manager(resource, request))
        return self._write(resource, request, known, changed)

    def _write(
        self, resource: Resource, request: RecordedRequest, known: JsonObject, changed: JsonObject
    ) -> JsonObject:
        """Stores a changed object, or returns the known one if nothing differs."""
        changed = self._admit(deep_copy(changed))
        metadata, before = changed["metadata"], known["metadata"]
        if "deletionTimestamp" in before:
            metadata["deletionTimestamp"] = before["deletionTimestamp"]
            if set(metadata.get("finalizers") or ()) - set(before.get("finalizers") or ()):
                raise Failure(422, "metadata.finalizers: Forbidden: no new finalizers can be added to a deleted object")
        if "generation" in before:
            metadata["generation"] = before["generation"] + (changed.get("spec") != known.get("spec"))
        if _content(changed) == _content(known):
            return known
        if request.dry_run:
            return changed
        if "deletionTimestamp" in before and not metadata.get("finalizers"):
            self._storage.remove(resource.plural, resource.name, resource.namespace)
            return changed
        return self._storage.store(resource.plural, changed)

    def _delete(self, resource: Resource, request: RecordedRequest) -> JsonObject:
        known = self._get(resource)
        options: JsonObject = request.body or {}
        _check_preconditions(known, options.get("preconditions", {}))
        # The query counts only without DeleteOptions.
        if options.get("dryRun") == ["All"] if options else request.dry_run:
            return {"kind": "Status", "apiVersion": "v1", "status": "Success"}
        if known["metadata"].get("finalizers"):
            if "deletionTimestamp" not in known["metadata"]:
                now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
                metadata: JsonObject = {**known["metadata"], "deletionTimestamp": now}
                if "generation" in metadata:
                    metadata["generation"] += 1
                return self._storage.store(resource.plural, {**known, "metadata": metadata})
            return known
        self._storage.remove(resource.plural, resource.name, resource.namespace)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _delete_all(self, resource: Resource, request: RecordedRequest) -> JsonObject:
        for thing in self.select(resource, request):
            metadata = thing["metadata"]
            one = Resource(
                resource.group, resource.version, resource.plural, metadata.get("namespace", ""), metadata["name"], ""
            )
            self._delete(one, request)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _evict(self, resource: Resource, request: RecordedRequest) -> JsonObject:
        if (resource.plural, resource.subresource) != ("pods", "eviction"):
            raise Failure(404, f"{request.path}: not served")
        pod = Resource("", "v1", "pods", resource.namespace, resource.name, "")
        options: JsonObject = request.body.get("deleteOptions") or {}
        self._delete(pod, RecordedRequest("DELETE", request.path, request.parameters, "", options))
        return {"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201}


def partial_metadata(found: JsonObject, accept: str) -> JsonObject:
    """An object or a list as PartialObjectMetadata, if the request accepts only this."""
    if not accept.startswith("application/json;as=PartialObjectMetadata"):
        return found
    meta: JsonObject = {"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata"}
    if "items" not in found:
        return {**meta, "metadata": found["metadata"]}
    items: Sequence[JsonObject] = found["items"] or ()
    return {
        "apiVersion": "meta.k8s.io/v1",
        "kind": "PartialObjectMetadataList",
        "metadata": found["metadata"],
        "items": [{**meta, "metadata": item["metadata"]} for item in items],
    }


def encode(document: JsonObject) -> bytes:
    return msgspec.json.encode(document)


def _manager(resource: Resource, request: RecordedRequest) -> Manager:
    operation = "Apply" if "apply" in request.content_type else "Update"
    return Manager(request.parameters.get("fieldManager", "unknown"), operation, resource.subresource)


def _check_preconditions(known: JsonObject | None, given: JsonObject) -> None:
    """Raises `Failure` if the given UID or resource version is not the known one."""
    for field in ("uid", "resourceVersion"):
        current = known["metadata"].get(field) if known else None
        if given.get(field) and given[field] != current:
            raise Failure(
                409,
                "the object has been modified; please apply your changes to the latest version and try again"
                if field == "resourceVersion"
                else f"Precondition failed: UID in precondition: {given[field]}, UID in object meta: {current or ''}",
            )


def _conflict(error: ApplyConflict, api_version: str) -> Failure:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f'conflict with "{one.manager.name}"'
            + (f" using {api_version}" if one.manager.operation == "Update" else ""),
            "field": one.field,
        }
        for one in error.conflicts
    ]
    listed = "; ".join(f"{cause['message']}: {cause['field']}" for cause in causes)
    noun = "conflict" if len(causes) == 1 else "conflicts"
    return Failure(409, f"Apply failed with {len(causes)} {noun}: {listed}", details={"causes": causes})


def _without_status(thing: JsonObject) -> JsonObject:
    return {name: part for name, part in thing.items() if name != "status"}


def _content(thing: JsonObject) -> JsonObject:
    """An object without the fields that each write changes."""
    unset: dict[str, Any] = dict.fromkeys(("resourceVersion", "uid", "creationTimestamp"))
    return {**thing, "metadata": {**thing["metadata"], **unset}}
