"""Every error of the library. Each one also is the builtin it refines, and each one can be pickled."""

EXIT_USAGE = 2  # of a program that refuses its settings: the user's mistake
EXIT_FAILED = 1  # of a program that failed
EXIT_INTERRUPTED = 75  # of a run that was told to end and saved: the same command goes on (EX_TEMPFAIL)


class AsyncGrpoError(Exception):
    """Base of all errors raised on purpose by this library."""

    exit_code = EXIT_FAILED


class ConfigurationError(AsyncGrpoError, ValueError):
    """A setting or an input file cannot work. The message names the values and the way out."""

    exit_code = EXIT_USAGE


class WorkerLost(AsyncGrpoError, RuntimeError):
    """A worker process died or stopped answering."""


class PromptSetAside(WorkerLost):
    """So many workers were lost over one prompt that it looks like the prompt's own fault."""


class WeightsDidNotLand(AsyncGrpoError, RuntimeError):
    """An engine's weights differ from those that the trainer sent."""


class StalenessViolated(AsyncGrpoError, AssertionError):
    """A token older than `max_staleness` steps was about to be trained on: our bug."""


class NonFiniteGradient(AsyncGrpoError, ArithmeticError):
    """The loss or gradient of a step holds NaN or inf. The step was not taken and the gradient is discarded."""


class DeadlineExceeded(AsyncGrpoError, TimeoutError):
    """A bounded wait ran out. The message names what was waited for, for how long, and who should have answered."""


class CheckpointBroken(AsyncGrpoError, ValueError):
    """A checkpoint is not as it was written, or of a format that this version does not read."""


class RunInterrupted(AsyncGrpoError, RuntimeError):
    """The run was told to end before its time; its checkpoint is saved."""

    exit_code = EXIT_INTERRUPTED


class RunFailed(AsyncGrpoError, RuntimeError):
    """A background task of the run failed; the message carries its error."""
