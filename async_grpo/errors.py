"""All errors of the library. Each is also a builtin error, and each can be pickled."""

EXIT_USAGE = 2  # exit code of a program that refuses its settings
EXIT_FAILED = 1  # exit code of a program that failed
EXIT_INTERRUPTED = (
    75  # exit code of a run that saved and ended on request; the same command resumes it (EX_TEMPFAIL)
)


class AsyncGrpoError(Exception):
    """Base of all errors that this library raises on purpose."""

    exit_code = EXIT_FAILED


class ConfigurationError(AsyncGrpoError, ValueError):
    """A setting or an input file cannot work. The message names the values and the way out."""

    exit_code = EXIT_USAGE


class WorkerLost(AsyncGrpoError, RuntimeError):
    """A worker process died or stopped answering."""


class PromptSetAside(WorkerLost):
    """A prompt was set aside, because so many workers were lost while they processed it."""


class WeightsDidNotLand(AsyncGrpoError, RuntimeError):
    """An engine's weights differ from those that the trainer sent."""


class StalenessViolated(AsyncGrpoError, AssertionError):
    """A token older than `max_staleness` steps was about to be trained on, which is a bug of this library."""


class NonFiniteGradient(AsyncGrpoError, ArithmeticError):
    """The loss or the gradient of a step contains NaN or inf. The step was not taken, and its gradient was discarded."""


class DeadlineExceeded(AsyncGrpoError, TimeoutError):
    """A wait exceeded its deadline. The message names the awaited event, the deadline, and the process that is late."""


class CheckpointBroken(AsyncGrpoError, ValueError):
    """A checkpoint was altered after it was written, or has a format that this version does not read."""


class RunInterrupted(AsyncGrpoError, RuntimeError):
    """The run ended early on request, with its checkpoint saved."""

    exit_code = EXIT_INTERRUPTED


class RunFailed(AsyncGrpoError, RuntimeError):
    """A background task of the run failed. The message contains its error."""
