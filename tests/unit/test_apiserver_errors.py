"""The errors of requests to the API server, created from all kinds of responses."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelplane.apiserver import errors
from accelplane.apiserver.errors import status_error


@pytest.mark.parametrize(
    ("code", "reason", "kind", "permanent"),
    [
        (403, "Forbidden", errors.StatusError, True),
        (404, "NotFound", errors.NotFound, True),
        (404, "", errors.NotFound, True),
        (408, "Timeout", errors.StatusError, False),
        (409, "Conflict", errors.Conflict, False),
        (409, "AlreadyExists", errors.AlreadyExists, True),
        (410, "Expired", errors.Gone, False),
        (410, "", errors.Gone, False),
        (422, "Invalid", errors.StatusError, True),
        (429, "TooManyRequests", errors.TooManyRequests, False),
        (500, "", errors.StatusError, False),
    ],
)
def test_reason_and_code_of_a_status_select_the_class(
    code: int, reason: str, kind: type[errors.StatusError], permanent: bool
) -> None:
    body = msgspec.json.encode({"code": code, "reason": reason, "message": "no"})
    result = status_error("GET /x", code, body)
    assert type(result) is kind
    assert result.permanent is permanent
    assert str(result) == f"GET /x: {code}{' ' if reason else ''}{reason}: no"
    assert result.retry_after == 0


def test_a_status_error_has_the_causes_of_its_status() -> None:
    status = {"reason": "Conflict", "details": {"causes": [{"reason": "FieldManagerConflict", "field": ".spec"}]}}
    result = status_error("PATCH /x", 409, msgspec.json.encode(status))
    assert result.causes == (errors.Cause(reason="FieldManagerConflict", field=".spec"),)


def test_an_error_event_has_the_code_of_its_status() -> None:
    assert type(status_error("WATCH /x", 0, b'{"code": 410}')) is errors.Gone
    assert status_error("WATCH /x", 0, b"{}").code == 500


def test_text_of_a_proxy_is_the_message() -> None:
    result = status_error("GET /x", 502, b"<html>no</html>\n", phrase="Bad Gateway")
    assert (result.reason, result.message) == ("", "Bad Gateway <html>no</html>")
    assert str(status_error("GET /x", 403, b"", phrase="Forbidden")) == "GET /x: 403: Forbidden"


def test_retry_after_is_read_from_the_header_and_from_the_status() -> None:
    assert status_error("x", 429, b"{}", retry_after="7").retry_after == 7
    assert status_error("x", 500, b'{"details": {"retryAfterSeconds": 3}}').retry_after == 3
    assert status_error("x", 429, b'{"details": {"retryAfterSeconds": -3}}').retry_after == 0
    assert status_error("x", 429, b"", retry_after="Wed, 21 Oct 2026 07:28:00 GMT").retry_after == 0


@given(code=st.integers(400, 599), body=st.binary(max_size=300), after=st.text(max_size=10))
def test_every_body_makes_an_error_of_the_response_code(code: int, body: bytes, after: str) -> None:
    assert status_error("GET /x", code, body, retry_after=after).code == code


@given(st.binary(min_size=3000, max_size=5000))
def test_messages_and_reasons_are_of_limited_length(text: bytes) -> None:
    assert len(status_error("GET /x", 500, text).message) < 10_000
    status = msgspec.json.encode({"message": "m" * 5000, "reason": "r" * 5000})
    assert len(str(status_error("GET /x", 500, status))) < 3000
