"""Owner references: which object controls another one. The garbage collector deletes objects without owner."""

from .objects import IsOwnerReference, Object, OwnerReference, Request, api_of, is_namespaced, metadata_of


def owner_reference(owner: Object) -> OwnerReference:
    """Returns the reference for objects that `owner` controls. Raises `ValueError` if it has no UID."""
    resource = api_of(type(owner)).resource
    metadata = metadata_of(owner)
    if not metadata.uid:
        raise ValueError(
            f"{resource.kind} {metadata.name}: has no metadata.uid, expected an object from the API server"
        )
    return OwnerReference(
        apiVersion=f"{resource.group}/{resource.version}" if resource.group else resource.version,
        kind=resource.kind,
        name=metadata.name or "",
        uid=metadata.uid,
        controller=True,
        blockOwnerDeletion=True,
    )


def controller_of(thing: Object) -> IsOwnerReference | None:
    """Returns the reference to the controller of an object, or None."""
    references = metadata_of(thing).ownerReferences or ()
    return next((reference for reference in references if reference.controller), None)


def owner_request(thing: Object, kind: type[Object]) -> Request | None:
    """Returns the key of the object of `kind` that controls `thing`; None for another kind or without a controller.

    The version of the reference is ignored: it stays when the owner's kind gets a new version.
    """
    reference = controller_of(thing)
    resource = api_of(kind).resource
    if reference is None or reference.kind != resource.kind:
        return None
    group, _, version = reference.apiVersion.rpartition("/")
    if group != resource.group or not version:
        return None
    return Request(reference.name, (metadata_of(thing).namespace or "") if is_namespaced(kind) else "")


def is_controlled_by(thing: Object, owner: Object) -> bool:
    """Returns whether `owner` controls an object. Another object of the same name has another UID."""
    reference = controller_of(thing)
    return reference is not None and reference.uid == metadata_of(owner).uid
