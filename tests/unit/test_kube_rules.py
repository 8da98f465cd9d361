"""Validation rules: messages of the webhook and entries of the schema."""

import msgspec

from accelplane.kube.rules import Rule, broken, broken_rules, validations


class Inner(msgspec.Struct):
    size: int = 3
    names: tuple[str, ...] = ()


class Spec(msgspec.Struct, rename="camel"):
    log_level: str = "a\nb"
    inner: Inner | None = None


def _messages(spec: Spec, message: str) -> list[str]:
    return [text for _, text in broken_rules(spec, [Rule(message=message, broken=lambda _: True)])]


def test_placeholders_show_the_values_of_fields_in_one_line() -> None:
    message = "logLevel {logLevel}, size {inner.size!s}, names {inner.names!s}"
    assert _messages(Spec(inner=Inner(names=("x", "y"))), message) == [r"logLevel a\nb, size 3, names x,y"]
    assert _messages(Spec(inner=Inner()), "names {inner.names!s}") == ["names empty"]


def test_a_field_of_an_object_that_is_not_set_is_shown_as_unset() -> None:
    assert _messages(Spec(), "size {inner.size!s}") == ["size unset"]


def test_rules_with_cel_are_entries_of_the_schema_and_broken_rules_are_reported() -> None:
    rules = [
        Rule[Spec](message="fixed", broken=lambda _: False, cel="true"),
        Rule[Spec](message="level {logLevel}", broken=lambda spec: bool(spec.log_level), cel="self.logLevel == ''"),
        Rule[Spec](message="webhook only", broken=lambda _: True),
    ]
    assert list(broken(Spec(), rules)) == [r"level a\nb", "webhook only"]
    assert list(validations(rules)) == [
        {"rule": "true", "message": "fixed"},
        {"rule": "self.logLevel == ''", "messageExpression": "'level ' + self.logLevel"},
    ]
