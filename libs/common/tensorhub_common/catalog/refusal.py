"""How a handler says no: before it has changed anything."""

from tensorhub_common.errors import TensorHubError


class Refused(Exception):
    """The command changes nothing; its sender is told this error."""

    def __init__(self, error: type[TensorHubError], message: str) -> None:
        """Take the class that the caller shall see, and its sentence."""
        super().__init__(message)
        self.error = error.__name__
        self.message = message
