"""The syntax of names, label keys and label values, as the API server validates them."""

import re

_SUBDOMAIN = re.compile(r"(?=.{1,253}\Z)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"(?=.{1,63}\Z)[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")


def is_dns_subdomain(text: str) -> bool:
    """Whether the text is a DNS subdomain name (RFC 1123), which most kinds require as `metadata.name`."""
    return bool(_SUBDOMAIN.fullmatch(text))


def is_qualified_name(text: str) -> bool:
    """Whether the text is a key of labels, annotations, taints or resources: `name` or `prefix.example/name`."""
    prefix, slash, name = text.rpartition("/")
    return bool(_NAME.fullmatch(name)) and (not slash or is_dns_subdomain(prefix))


def is_label_value(text: str) -> bool:
    """Whether the text is a value of a label. It may be empty."""
    return not text or bool(_NAME.fullmatch(text))
