"""Ownership of fields (`metadata.managedFields`) as pure functions.

An object that was created or updated by PUT or POST has its fields owned by an entry with the operation `Update`. A
server-side apply never removes fields of such an entry, not even of the same manager. Before the first apply the
entry is transferred: `transfer_fields` returns the managed fields to write.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec import to_builtins

from .jsontypes import as_mapping
from .objects import HasManagedFields, Object

Entry = Mapping[str, object]


def managed_fields(thing: Object) -> Sequence[Entry]:
    """The managed fields of an object; empty if it has none, or if a cache has removed them."""
    metadata = thing.metadata
    found = metadata.managedFields if isinstance(metadata, HasManagedFields) else None
    return [to_builtins(entry) for entry in found or ()]


def transfer_fields(entries: Sequence[Entry], manager: str, former: Collection[str] = ()) -> list[Entry] | None:
    """Returns managed fields in which `manager` has applied the fields that it or a `former` manager updated.

    None if there is nothing to transfer. Entries of subresources stay.
    """
    former_entries = [
        each for each in entries if not each.get("subresource") and _is_transferable(each, manager, former)
    ]
    if not former_entries:
        return None
    own_entries = [each for each in entries if _is_applied_by(each, manager)]
    owned: Mapping[str, object] = {}
    for each in (*own_entries, *former_entries):
        owned = _united(owned, as_mapping(each.get("fieldsV1")) or {})
    entry = {**former_entries[0], "manager": manager, "operation": "Apply", "fieldsV1": owned}
    return [entry, *(each for each in entries if each not in former_entries and each not in own_entries)]


def _is_transferable(entry: Entry, manager: str, former: Collection[str]) -> bool:
    return entry.get("manager") in former or (entry.get("manager") == manager and entry.get("operation") == "Update")


def _is_applied_by(entry: Entry, manager: str) -> bool:
    return entry.get("manager") == manager and entry.get("operation") == "Apply" and not entry.get("subresource")


def _united(one: Mapping[str, object], other: Mapping[str, object]) -> Mapping[str, object]:
    """The union of two sets of fields."""
    united = dict(one)
    for key, value in other.items():
        first, second = as_mapping(united.get(key)), as_mapping(value)
        united[key] = value if first is None or second is None else _united(first, second)
    return united
