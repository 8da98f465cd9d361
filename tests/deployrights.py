"""The rights of accounts in rendered manifests."""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

from manifests import DEPLOY, Object, render, trees

PREFIXES = re.compile(
    "inteldeviceplugins-|intel-deviceplugins-|intelsgxwebhook-|intelfpgawebhook-|intelfpgaplugin-"
    "|onload-operator-(?!sa$|role$|rb$)"
    # Accounts with DRA have the family as a suffix.
    "|(?<=^accelplane-dra)-[a-z]+$"
)


class Grant(NamedTuple):
    """One verb on one resource: for all objects or one `name`, in the cluster or in the account's namespace."""

    scope: str
    group: str
    resource: str
    name: str
    verb: str


def grants(scope: str, group: str, resources: Iterable[str], verbs: str, named: Iterable[str] = ("",)) -> set[Grant]:
    return {
        Grant(scope, group, resource, name, verb) for resource in resources for name in named for verb in verbs.split()
    }


def granted_rights(objects: list[Object]) -> dict[str, set[Grant]]:
    """The grants of each account with bindings. Names are without the prefix of the installation."""
    roles = {(each["kind"], each["metadata"]["name"]): each for each in objects if each["kind"].endswith("Role")}
    found: dict[str, set[Grant]] = {}
    for binding in objects:
        if not binding["kind"].endswith("RoleBinding"):
            continue
        (subject,) = binding["subjects"]
        if binding["roleRef"]["name"] == "system:image-builder":
            continue  # a role of OpenShift, for all accounts
        assert subject["kind"] == "ServiceAccount"
        scope = "namespace" if binding["kind"] == "RoleBinding" else "cluster"
        assert binding["metadata"].get("namespace", subject["namespace"]) == subject["namespace"]
        own = found.setdefault(PREFIXES.sub("", subject["name"]), set())
        for rule in roles[binding["roleRef"]["kind"], binding["roleRef"]["name"]]["rules"]:
            named = [PREFIXES.sub("", name) for name in rule.get("resourceNames", [""])]
            resources = rule.get("resources") or rule["nonResourceURLs"]
            for group in rule.get("apiGroups", [""]):
                own |= grants(scope, group, resources, " ".join(rule["verbs"]), named)
    return found


_ROOTS = {"operator", "fpga_admissionwebhook", "sgx_admissionwebhook"}


def trees_with_bindings() -> list[str]:
    """All trees that bind roles, except parts of others (those with the placeholder namespace, and `installation`) and
    roots, which are the same as another tree."""
    parts = {tree for tree in trees() if tree.endswith("/installation")} | _ROOTS
    rendered = {tree: render(DEPLOY / tree) for tree in trees() if tree not in parts}
    return [
        tree
        for tree, objects in rendered.items()
        if granted_rights(objects)
        and (tree == "operator/overlays/ocp" or '"namespace": "system"' not in json.dumps(objects))
    ]
