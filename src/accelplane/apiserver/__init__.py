"""The API server for every process: requests, credentials and errors, without a Kubernetes library."""

from accelplane.apiserver.client import (
    APPLY_PATCH,
    JSON,
    JSON_PATCH,
    MERGE_PATCH,
    ApiServer,
    WatchEvent,
)
from accelplane.apiserver.config import ClientConfig, Source
from accelplane.apiserver.discovery import SERVICE_ACCOUNT, has_no_account, load_config
from accelplane.apiserver.errors import (
    AlreadyExists,
    ApiError,
    Cause,
    Conflict,
    DecodeError,
    Gone,
    NoCredentials,
    NotFound,
    StatusError,
    TooManyRequests,
    Unreachable,
    WatchIdleTimeout,
)
from accelplane.apiserver.paths import object_path, resource_path
from accelplane.apiserver.ratelimit import RateLimit

__all__ = [
    "APPLY_PATCH",
    "JSON",
    "JSON_PATCH",
    "MERGE_PATCH",
    "SERVICE_ACCOUNT",
    "AlreadyExists",
    "ApiError",
    "ApiServer",
    "Cause",
    "ClientConfig",
    "Conflict",
    "DecodeError",
    "Gone",
    "NoCredentials",
    "NotFound",
    "RateLimit",
    "Source",
    "StatusError",
    "TooManyRequests",
    "Unreachable",
    "WatchEvent",
    "WatchIdleTimeout",
    "has_no_account",
    "load_config",
    "object_path",
    "resource_path",
]
