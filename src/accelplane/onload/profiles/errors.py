"""Errors of a conversion. Their messages name the file and the line."""


class ProfileError(Exception):
    """A profile cannot be converted. `status` is the exit status of the command."""

    status = 1


class ProfileNotFound(ProfileError):
    """No file has the name of the profile."""

    status = 3
