"""The error of this package."""


class ReleaseError(Exception):
    """A release cannot be made or verified. The message says what was found and what to do."""
