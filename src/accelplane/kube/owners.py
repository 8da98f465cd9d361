"""Who made an object: owner references, by which the garbage collector finds what to delete with its owner."""

from .objects import IsOwnerReference, Object, OwnerReference, Request, api_of, is_namespaced, metadata_of


def owner_reference(owner: Object) -> OwnerReference:
    """The reference by which `owner` is the controller of what carries it."""
    resource = api_of(type(owner)).resource
    metadata = metadata_of(owner)
    if not metadata.uid:
        raise ValueError(f"{resource.kind} {metadata.name}: has no uid yet, so it cannot own anything")
    return OwnerReference(
        apiVersion=f"{resource.group}/{resource.version}" if resource.group else resource.version,
        kind=resource.kind,
        name=metadata.name or "",
        uid=metadata.uid,
        controller=True,
        blockOwnerDeletion=True,
    )


def controller_of(thing: Object) -> IsOwnerReference | None:
    """The reference to the one controller of an object, if it has one."""
    references = metadata_of(thing).ownerReferences or ()
    return next((reference for reference in references if reference.controller), None)


def owner_request(thing: Object, kind: type[Object]) -> Request | None:
    """The key of the object of `kind` that controls `thing`; None when that is something else, or nothing.

    The version of the API does not count: an object that was made by way of an older one keeps its owner.
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
    """Whether `owner` itself controls an object: not one that had its name before."""
    reference = controller_of(thing)
    return reference is not None and reference.uid == metadata_of(owner).uid
