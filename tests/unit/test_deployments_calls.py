"""Roles grant the calls that programs make, and no others. Charts have the same roles, which their tests compare."""

from apicalls import ACCOUNTS, Call
from deployrights import granted_rights, trees_with_bindings
from manifests import DEPLOY, render


def test_roles_grant_the_calls_of_their_programs_and_no_others() -> None:
    granted: dict[tuple[str, str], set[Call]] = {}
    for tree in trees_with_bindings():
        for account, grants in granted_rights(render(DEPLOY / tree)).items():
            key = tree.partition("/")[0], account
            granted.setdefault(key, set()).update((each.group, each.resource, each.verb) for each in grants)
    assert granted.keys() == ACCOUNTS.keys()
    for key, found in granted.items():
        assert found - ACCOUNTS[key] == set(), f"{key}: granted, but not used"
        assert ACCOUNTS[key] - found == set(), f"{key}: used, but not granted"
