"""The base of every error that a user can mend."""


class SpecrunError(Exception):
    """Bad input or an unfit machine. The message is one line: what was got, what was expected, what to do.

    The command line prints it without a traceback. Each stage derives its own errors from this class;
    anything else that escapes is a defect of specrun.
    """


class RequestError(SpecrunError):
    """A generation request makes no sense."""


class UnfitError(SpecrunError):
    """The machine cannot do what was asked: memory, disk or a missing package."""


def first_line(error: Exception) -> str:
    """What another library's error says, short enough to stand in one of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
