"""What can go wrong on the client's side. Errors that the server answers are in errors.py."""


class ClientFailure(Exception):
    """The base of failures without an answer of the server that the client understands."""


class NotConfigured(ClientFailure):
    """There is no URL or no API key, or one of them cannot be used; the message says how to set it."""


class NoApiKey(NotConfigured):
    """There is no API key, or it has characters that no key has; the message says how to set it."""


class ConnectionFailed(ClientFailure):
    """The server could not be reached, or the connection ended before the answer.

    Attributes:
        may_have_taken_effect: whether the server may have processed the request.
    """

    def __init__(self, message: str, *, may_have_taken_effect: bool = False) -> None:
        super().__init__(message)
        self.may_have_taken_effect = may_have_taken_effect


class BadAnswer(ClientFailure):
    """The answer is not one of Mooring: the URL belongs to something else, or a proxy answered."""


class WaitTimeout(ClientFailure):
    """The instance did not reach the state in time; the message says in which state it is, and why."""


class StreamInterrupted(ClientFailure):
    """A stream ended before its command, its logs or its connection did.

    Attributes:
        code: why, as in docs/errors.md; empty: the connection was lost.
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
