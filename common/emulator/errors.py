"""What can go wrong in an emulated kernel. A report names the CTA, the warp, the lane and the chain of source lines."""

from flashladder.common.errors import EmulatorError


class PtxSyntaxError(EmulatorError):
    """The text is not PTX as this parser knows it."""


class UnsupportedInstructionError(EmulatorError):
    """An instruction, or one of its modifiers, that the emulator does not execute."""


class UninitialisedRegisterError(EmulatorError):
    """A register that a lane reads before it has written it."""


class MemoryAccessError(EmulatorError):
    """An access out of bounds, misaligned, to memory never written, or a write to memory that is read-only."""


class RaceError(EmulatorError):
    """Two accesses to one word that nothing orders, one to shared memory while a copy or a wgmma is under way, or a
    register of a product in flight that is touched."""


class ConvergenceError(EmulatorError):
    """A warp-wide instruction that some of its lanes do not execute, or whose member mask is wrong."""


class SynchronisationError(EmulatorError):
    """A barrier, an mbarrier or setmaxnreg used as PTX forbids: uninitialised, overrun, with counts that disagree."""


class DeadlockError(EmulatorError):
    """Warps that wait for each other for ever."""


class InstructionBudgetError(EmulatorError):
    """A warp executed more instructions than the budget allows, as an endless loop does."""
