"""What a client did wrong, or what can't be had now, in OpenAI's form."""

from typing import Any


class Refusal(Exception):
    """An answer that is an error: `status` is HTTP's."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.kind = status, message, code, param, kind

    def body(self) -> dict[str, Any]:
        """Return it as OpenAI writes it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad(param: str | None, message: str, code: str = "invalid_value") -> Refusal:
    """Return a refusal of a parameter."""
    return Refusal(400, message, code=code, param=param)


def unsupported(param: str, message: str) -> Refusal:
    """Return a refusal of what would change the answer and can't be done here."""
    return bad(param, message, "unsupported_parameter")


def unavailable(status: int, message: str, code: str) -> Refusal:
    """Return that something can't be had now."""
    return Refusal(status, message, code=code, kind="server_error")
