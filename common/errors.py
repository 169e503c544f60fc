"""The errors that a user can cause or mend. Each message names what was given and what would work."""


class FlashLadderError(Exception):
    """Base of every error that a tool shows without a traceback."""


class ConfigError(FlashLadderError):
    """An unknown version or GPU, or a configuration field, value or combination that is not allowed."""


class UnsupportedProblemError(FlashLadderError):
    """A shape, dtype, stride, device or feature that the chosen kernel does not take."""


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


class ResultsError(FlashLadderError):
    """A results file is damaged or cannot be written."""
