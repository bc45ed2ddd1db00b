"""What every subcommand raises when the values it was given cannot work."""

from __future__ import annotations


class UsageError(ValueError):
    """A value on the command line that cannot work; ends in one line and exit code 2."""
