"""Errors that the person at the command line can fix."""


class RequestError(Exception):
    """The request is wrong; the message, printed as it is, says what would be right."""
