""" The error that a command reports in one line """


class UsageError(ValueError):
    """A mistake that the user can correct. Commands print its message and exit with code 2, without a traceback."""
