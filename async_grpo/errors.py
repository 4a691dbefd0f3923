"""All exceptions of the library. Each can be pickled. Most also derive from a builtin exception such as ValueError."""

EXIT_USAGE = 2  # exit code of a program that refuses its settings
EXIT_FAILED = 1  # exit code of a program that failed
# Exit code of a run that saved a checkpoint and ended on request. Running the same command again resumes the run. The
# value is EX_TEMPFAIL of sysexits.h
EXIT_INTERRUPTED = 75


class AsyncGrpoError(Exception):
    """Base of all errors that this library raises on purpose."""

    exit_code = EXIT_FAILED


class ConfigurationError(AsyncGrpoError, ValueError):
    """A setting or an input file cannot be used. The message names the values and what to do."""

    exit_code = EXIT_USAGE


class RequestRefused(ConfigurationError):
    """One request of an agent cannot be served, for example because of its JSON schema. The run continues."""


class EnvironmentNeverWorked(AsyncGrpoError, RuntimeError):
    """All trajectories of the run's first groups failed. The message contains the reason of the first failure."""


class WorkerLost(AsyncGrpoError, RuntimeError):
    """A worker process died or stopped answering."""


class PromptSetAside(WorkerLost):
    """A prompt was excluded from the run, because several workers were lost while they processed it."""


class WeightsDidNotLand(AsyncGrpoError, RuntimeError):
    """An engine's weights differ from those that the trainer sent."""


class ImagesDiffer(AsyncGrpoError, RuntimeError):
    """Engine and trainer would see different images or image tokens, or the policy sampled an image token."""


class StalenessViolated(AsyncGrpoError, AssertionError):
    """A token older than `max_staleness` steps was about to be trained on. This is a bug of this library."""


class NonFiniteGradient(AsyncGrpoError, ArithmeticError):
    """The loss or the gradient of a step contains NaN or inf. The gradient was discarded without an update."""


class OutOfMemory(AsyncGrpoError, MemoryError):
    """A process ran out of memory. The message says what it was doing, what was in use, and which option to change."""


class DeadlineExceeded(AsyncGrpoError, TimeoutError):
    """A wait exceeded its deadline. The message names the awaited event, the deadline, and the late process."""


class CheckpointBroken(AsyncGrpoError, ValueError):
    """A checkpoint is incomplete, was altered after it was written, or has a format that this version does not read."""


class RunInterrupted(AsyncGrpoError, RuntimeError):
    """The run ended early on request, with its checkpoint saved."""

    exit_code = EXIT_INTERRUPTED


class RunFailed(AsyncGrpoError, RuntimeError):
    """A part of the run failed, for example a background task. The message contains the reason."""
