"""The command `jaxvec`. Workers import from here, so nothing is imported here."""


class UsageError(Exception):
    """A wrong argument or a missing package; the message is one line."""
