"""The errors that a user can cause or mend. Each message names what was given and what would work."""

import difflib
import re
from collections.abc import Iterable

LEAST_PART = 3  # letters of a name that tell what is meant
ROOM = 200  # characters of names that are listed, though it is clear which one is meant


class FlashLadderError(Exception):
    """Base of every error that a tool shows without a traceback."""


class ConfigError(FlashLadderError):
    """An unknown version or GPU, or a configuration field, value or combination that is not allowed."""


class UnsupportedProblemError(FlashLadderError):
    """A shape, dtype, stride, device or feature that the chosen kernel does not take."""

    def __str__(self) -> str:
        """As every error's, but in Python: torch.compile up to 2.11 traces no other."""
        return str(self.args[0])


class ExpressionError(UnsupportedProblemError):
    """A mask or a score that is no expression, or reads what is not there."""

    @classmethod
    def at(cls, what: str, text: str, span: tuple[int, int], message: str) -> "ExpressionError":
        """The error that shows the line of the text, and marks in it what lies in `span`."""
        begin, end = span
        before = text[:begin].rpartition("\n")[2]
        line = before + text[begin:].partition("\n")[0]
        margin = re.sub(r"[^\t]", " ", before)
        marks = "^" + "~" * (min(end - begin, len(line) - len(before)) - 1)
        return cls(f"{what}: {message}\n  {line}\n  {margin}{marks}")


class ToolchainError(FlashLadderError):
    """A compiler or another tool is missing or too old."""


class BuildError(FlashLadderError):
    """The compiler refused a kernel, or its result breaks a rule of its rung."""


class DeviceError(FlashLadderError):
    """There is no usable GPU, or the GPU reported a fault."""


class EmulatorError(FlashLadderError):
    """The emulated kernel did something wrong, or something that the emulator does not know."""


class VerificationError(FlashLadderError):
    """A kernel's output differs from the exact answer by more than the tolerance."""


class CheatError(VerificationError):
    """A kernel looks faster than it is: a timed call did not do the work."""


class ResultsError(FlashLadderError):
    """A results file is damaged or cannot be written."""


def first_line(error: BaseException) -> str:
    """What an error that is not one of these says, in short; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def unknown(what: str, given: str, known: Iterable[str], in_short: Iterable[str] = ()) -> ConfigError:
    """The error for a name that is not among the known ones, which may be listed in short."""
    return ConfigError(f"no {what} {given}{instead(given, known, in_short=in_short)}")


def instead(given: str, known: Iterable[str], there_are: str = "there are", in_short: Iterable[str] = ()) -> str:
    """What is said after an unknown name: the one that may have been meant, and those there are unless they are many.

    Where none is like it, those there are.
    """
    names = list(known)
    listed = ", ".join(in_short) or ", ".join(names) or "none"
    if not (meant := did_you_mean(given, names)):
        return f"; {there_are} {listed}"
    if sum(map(len, names)) > ROOM:
        return meant
    return f"{meant} {there_are[0].upper()}{there_are[1:]} {listed}"


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" where a known name is like the given one, to be put after a message; otherwise "".

    Where none is like it, those that it is a part of.
    """
    names, text = list(known), given.lower()
    like = difflib.get_close_matches(text, names, n=1)
    if not like and len(text) >= LEAST_PART:
        like = [name for name in names if text in name]
    return f"; did you mean {' or '.join(like)}?" if like else ""
