"""Every exception that qcompiler raises on purpose.

An error names the module or parameter path, the op, the limit, and the way out.  All classes derive from
`QCompilerError`, so `except qc.QCompilerError` catches exactly the errors that qcompiler raises on purpose.
"""

from __future__ import annotations

import errno

LONGEST_MESSAGE = 9_000
"""Characters: names, sizes and lists in a message may come from an untrusted file, and be of any length."""


class QCompilerError(Exception):
    """Base of every error raised by qcompiler. A message that is too long loses its middle."""

    def __init__(self, message: str = "", *args: object) -> None:
        super().__init__(_bounded(message), *args)


def _bounded(message: str) -> str:
    if len(message) <= LONGEST_MESSAGE:
        return message
    left_out = len(message) - LONGEST_MESSAGE
    return f"{message[: LONGEST_MESSAGE - 2000]} … ({left_out:,} characters left out) … {message[-2000:]}"


# --- what the caller passed in ---------------------------------------------------------------------------------------


class ArgumentError(QCompilerError):
    """A call's arguments do not fit the program's signature (structure, shape, dtype or range)."""


class ArgumentStructureError(ArgumentError):
    """The tree of arguments (tuples, lists, dicts) differs from the one at compile time."""


class ArgumentShapeError(ArgumentError):
    """A tensor argument's shape, or a dimension's range, does not fit the signature."""


class ArgumentDtypeError(ArgumentError):
    """A tensor argument has another dtype than the signature states."""


class RecipeError(QCompilerError):
    """A quantisation recipe is malformed, or names a module that the model does not have."""


class BudgetError(QCompilerError):
    """No recipe of the candidates meets a budget, or the budget cannot be read."""


class PromiseError(QCompilerError):
    """The compiled weights take more bits per weight than the recipe promised."""


class WorkdirError(QCompilerError):
    """A working folder is in use by another process, holds something else, or has no room."""


class TokenizerError(QCompilerError):
    """A tokenizer is missing, malformed, or of a kind that is not read."""


class ChatTemplateError(QCompilerError):
    """A chat template is missing or malformed, refused the messages, or exceeded its limits."""


class WeightsError(QCompilerError):
    """Values of weights are missing, or those in a file do not fit the model's parameters."""


class AdapterError(QCompilerError):
    """A LoRA adapter cannot be read, is of a kind that is not merged, or does not fit the weights."""


class MergeError(QCompilerError):
    """Merging an adapter would lose more than the caller allows; `report` is the `MergeReport`."""

    def __init__(self, message: str, *, report: object) -> None:
        super().__init__(message)
        self.report = report


class CalibrationError(QCompilerError):
    """Calibration has no inputs, or found values that are not finite."""


# --- frontends -------------------------------------------------------------------------------------------------------


class FrontendError(QCompilerError):
    """A model could not be brought into the IR."""


class ExportError(FrontendError):
    """torch.export refused the model; the message carries the user's own source line."""


class UnsupportedOperatorError(FrontendError):
    """The model uses an operator that has no lowering."""


class DataDependentShapeError(FrontendError):
    """A tensor's shape depends on tensor data (nonzero, masked_select, .item() in a size)."""


class UnboundedDimError(FrontendError):
    """A dynamic dimension has no maximum."""


class NarrowedDimError(FrontendError):
    """A line of the model narrowed a dynamic dimension (for example excluded the size 1)."""


# --- formats and layouts ---------------------------------------------------------------------------------------------


class FormatError(QCompilerError):
    """Base of the errors of storage formats."""


class UnknownFormatError(FormatError):
    """No format of that name, or a parameter the format does not take."""


class FormatShapeError(FormatError):
    """The format cannot store a matrix of this shape (K not divisible by a row block)."""


class FormatValueError(FormatError):
    """A weight holds NaN or infinity, which no format here can encode."""


class LayoutError(FormatError):
    """A packed tensor has an unknown layout, or another one than requested."""


# --- IR and passes ---------------------------------------------------------------------------------------------------


class PassError(QCompilerError):
    """A pass failed; `reproducer` is the path of a file holding the IR and the command that repeats it."""

    def __init__(self, message: str, *, stage: str, reproducer: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.reproducer = reproducer


class NumericsError(PassError):
    """`verify_each="numerics"` found that a pass changed the program's results beyond its stated bound."""


class InterpreterError(QCompilerError):
    """The reference interpreter has no meaning for an op or a type."""


class DeviceAssignmentError(QCompilerError):
    """Operands of one op are on different devices, without a copy between them."""


class KernelSelectionError(QCompilerError):
    """No kernel of the target fits an op; the message lists every candidate with the reason it was rejected."""


# --- plan and schedule -----------------------------------------------------------------------------------------------


class PlanError(QCompilerError):
    """A plan is malformed."""


class DimError(PlanError):
    """A dimension expression cannot be parsed, divided or evaluated."""


class ScheduleError(PlanError):
    """`verify-schedule` refused a plan. `rule` is the short name of the broken rule."""

    def __init__(self, message: str, *, rule: str) -> None:
        super().__init__(message)
        self.rule = rule


# --- program files ---------------------------------------------------------------------------------------------------


class ProgramFileError(QCompilerError):
    """A .qca file cannot be used."""


class ForeignFileError(ProgramFileError):
    """The file is not a qcompiler program at all."""


class TruncatedFileError(ProgramFileError):
    """The file ends before its directory says it does."""


class CorruptFileError(ProgramFileError):
    """A digest, a schema or an offset in the file is wrong."""


class FileBoundsError(CorruptFileError):
    """A weight in the directory overlaps another or leaves the file."""


class NewerFileError(ProgramFileError):
    """The file was written by a newer qcompiler than this one can read."""


class ChangedFileError(ProgramFileError):
    """A file was cut or overwritten in place while a program used it: its weights are not those that were checked."""


class TargetMismatchError(ProgramFileError):
    """A native build in the file needs another ISA, architecture or driver than this machine has."""


class TrustError(ProgramFileError):
    """Native code in the file may not run: trust was not given, or the given digest does not match."""


class FileWriteError(QCompilerError, OSError):
    """A file could not be written. The old file of that name is unchanged. `errno` is the system's number."""

    @classmethod
    def of(cls, path: str, error: OSError) -> FileWriteError:
        """The system's error, with the name of the file and a way out."""
        hints = {
            errno.ENOSPC: "free some room there, or write elsewhere",
            errno.EDQUOT: "your quota there is used up: free some of it, or write elsewhere",
            errno.EFBIG: "the limit on the size of files (ulimit -f, or the file system's) is too small",
            errno.EROFS: "choose a folder that you may write to",
            errno.EACCES: "choose a folder that you may write to",
            errno.EPERM: "choose a folder that you may write to",
            errno.ENOENT: "make the folder first",
            errno.EIO: "the disk failed; look at the system's log",
        }
        hint = hints.get(error.errno or 0)
        made = cls(f"cannot write {path}: {error.strerror or error}{f'; {hint}' if hint else ''}")
        made.errno, made.strerror, made.filename = error.errno, error.strerror, path
        return made

    def __str__(self) -> str:
        return str(self.args[0])  # instead of OSError's "[Errno …]"


# --- runtime ---------------------------------------------------------------------------------------------------------


class RuntimeFailure(QCompilerError):
    """Base of errors that happen while a program is loaded or run."""


class CompilerMissingError(RuntimeFailure):
    """No host C++ compiler was found; the message names the package that brings one."""


class CompileFailedError(RuntimeFailure):
    """The host compiler refused emitted source; the message carries its output and the path of the source."""


class IndexOutOfRangeError(RuntimeFailure, IndexError):
    """A kernel met an index (a token id, a position) outside the table it reads."""


class SessionBusyError(RuntimeFailure):
    """A second concurrent call on one session."""


class DeviceUnavailableError(RuntimeFailure):
    """The device asked for does not exist on this machine, or this build cannot drive it yet."""


class SassError(RuntimeFailure):
    """Machine code that the counter of instructions cannot read."""


class MissingDependencyError(QCompilerError):
    """An optional dependency is needed for this call; the message holds the pip command."""


class DeviceError(RuntimeFailure):
    """A device refused a call. `code` and `symbol` are CUDA's ("cudaErrorStreamCaptureUnsupported" is 900)."""

    def __init__(self, message: str, code: int, symbol: str) -> None:
        super().__init__(f"{symbol} ({code}): {message}")
        self.code = code
        self.symbol = symbol


class OutOfMemoryError(DeviceError):
    """A device has no memory left for an allocation. On the CPU `code` and `symbol` are the system's (12, "ENOMEM")."""


class CaptureRuleError(RuntimeFailure):
    """A capture broke one of qcompiler's own rules (an empty graph, an allocation while frozen)."""


class SimulationError(RuntimeFailure):
    """The simulated GPU found a bug in a kernel or a schedule. `finding` is the kind: "race", "out-of-bounds", …"""

    def __init__(self, message: str, finding: str) -> None:
        super().__init__(message)
        self.finding = finding
