"""The options of teachers: models whose log-probs of the sampled tokens train the policy (on-policy distillation)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from async_grpo.options.fields import COMMAS, NOT_NEGATIVE, POSITIVE, TABLE, Section, option, refuse
from async_grpo.options.listed_values import split_table, table_text

# Name of the estimator that ignores all rewards, so that only the teacher trains the policy
TEACHER_ALONE = "teacher"
# Name of the reward that abstains from every sample, for runs without a reward
UNSCORED = "unscored"
# Values of --teacher that name a state of the trained policy
SELF = "self"
INITIAL = "initial"
# Roles of logprob workers that serve as teachers. A worker of the first role keeps the weights that it starts with; a
# worker of the second role gets every new version of the trained policy
TEACHER_ROLE = "teacher"
SELF_TEACHER_ROLE = "self_teacher"
SCHEMES = ("http://", "https://")
# Placeholders of --teacher-template
QUESTION = "{question}"
DEMONSTRATION = "{demonstration}"
# The prompt of Shenfeld et al. 2026, "Self-Distillation Enables Continual Learning"
TEMPLATE = (
    "{question}\n\nThis is an example for a response to the question:\n{demonstration}\n\n"
    "Now answer with a response of your own, including the thinking process:"
)

_teacher = partial(option, panel="Teacher")


class TeacherAddress(NamedTuple):
    """A teacher on a server with OpenAI's API."""

    url: str
    model: str  # name under which the server serves the model; "" lets the server choose


def teacher_kind(name: str) -> str:
    """Return the kind of the logprob workers that compute with the frozen teacher with this name.

    >>> teacher_kind(""), teacher_kind("math")
    ('teacher', 'teacher:math')
    """
    return f"{TEACHER_ROLE}:{name}" if name else TEACHER_ROLE


def worker_flags(kind: str) -> list[str]:
    """Return the options with which a logprob worker of this kind is started.

    >>> worker_flags("teacher:math"), worker_flags("reference")
    (['--role=teacher', '--teacher-name=math'], ['--role=reference'])
    """
    role, _, name = kind.partition(":")
    return [f"--role={role}", f"--teacher-name={name}"] if name else [f"--role={role}"]


@dataclass(frozen=True, kw_only=True)
class TeacherConfig(Section):
    """Options of teachers. The advantage of token t gets the term coef * (log pi_teacher(t) - log pi(t))."""

    teacher: str | None = _teacher(
        None,
        "Teacher whose log-probs of the sampled tokens train the policy: the folder of a model, the address of a server "
        "with OpenAI's API as http://HOST:PORT/v1 or MODEL@http://HOST:PORT/v1, `initial` (the policy at the start of the "
        "run), or `self` (the policy as it is now). Several teachers are written NAME=TEACHER,NAME=TEACHER. By default "
        "there is none.",
        form=TABLE,
        everyday=True,
    )
    teacher_column: str | None = _teacher(
        None,
        "Column of the data that names the teacher of each row, if there are several.",
        portable=True,
    )
    teacher_coef: float = _teacher(
        1.0,
        "Weight of the teacher's log-prob minus the policy's in the advantage of each token, or of the forward KL in the "
        "loss with --teacher-top-k.",
        range=POSITIVE,
        portable=True,
    )
    teacher_top_k: int = _teacher(
        0,
        "Number of the teacher's most probable tokens at each position whose probabilities the policy learns (forward KL), "
        "in place of the log-prob of the sampled token alone. 0 learns from the sampled token.",
        range=NOT_NEGATIVE,
        portable=True,
    )
    teacher_demonstration: str | None = _teacher(
        None,
        "Column of the data with a text that only the teacher reads, such as a demonstration or the solution. It is "
        "written into the teacher's prompt by --teacher-template. A row with an empty text is not taught by `self`.",
        portable=True,
    )
    teacher_template: str | None = _teacher(
        None,
        "Text that replaces the last user message, or the prompt if it is a text, in the teacher's prompt, with the "
        "placeholders {question} and {demonstration}. The default is the text of the SDFT paper.",
        portable=True,
    )
    teacher_api_key_env: str | None = _teacher(
        None, "Environment variable with the API key of the teachers' servers. By default no key is sent."
    )
    teacher_concurrency: int = _teacher(
        32, "Maximum number of requests to a teacher's server at the same time.", range=POSITIVE
    )
    teacher_requests_per_minute: float | None = _teacher(
        None,
        "Maximum number of requests to a teacher's server per minute. By default there is no limit.",
        range=POSITIVE,
    )
    teacher_timeout_s: float = _teacher(
        120.0, "Seconds after which a request to a teacher's server fails.", range=POSITIVE
    )
    teacher_attempts: int = _teacher(
        5,
        "Maximum number of requests to a teacher's server for one sequence, before the sequence is left out of the loss.",
        range=POSITIVE,
    )

    @property
    def teachers(self) -> dict[str, str]:
        """Return the values of `--teacher` by name. A single teacher without a name has the name "".

        Raises:
            ConfigurationError: A name or a value is empty, or a name occurs twice.
        """
        if self.teacher is None:
            return {}
        # An address may contain "=", but a name cannot contain a slash
        name, is_table, _ = self.teacher.partition("=")
        if not is_table or "/" in name:
            refuse(not self.teacher.strip(), "--teacher is empty: name a teacher, or leave the option out")
            return {"": self.teacher}
        pairs = split_table(self.teacher, "teacher")
        teachers = {name: str(value) for name, value in pairs}
        is_complete = len(teachers) == len(pairs) and all(teachers) and all(teachers.values())
        refuse(
            not is_complete or any(set(name) & set(":/=") for name in teachers),
            f"--teacher {self.teacher}: give one teacher, or NAME=TEACHER,NAME=TEACHER with different names without any of "
            f": / =; {COMMAS}",
        )
        return teachers

    @property
    def teacher_names(self) -> list[str]:
        """Return the names of the teachers, sorted."""
        return sorted(self.teachers)

    @property
    def teacher_servers(self) -> dict[str, TeacherAddress]:
        """Return the teachers that run on servers, by name.

        >>> TeacherConfig(teacher="qwen@http://127.0.0.1:8000/v1").teacher_servers
        {'': TeacherAddress(url='http://127.0.0.1:8000/v1', model='qwen')}
        """
        servers = {}
        for name, value in self.teachers.items():
            for scheme in SCHEMES:
                model, is_server, address = value.partition(scheme)
                if is_server:
                    servers[name] = TeacherAddress(scheme + address, model.removesuffix("@"))
        return servers

    @property
    def teacher_kinds(self) -> dict[str, str]:
        """Return the kind of logprob worker that computes with each teacher, by name, for the teachers without a server."""
        kinds = {}
        for name, value in self.teachers.items():
            if name not in self.teacher_servers:
                kinds[name] = SELF_TEACHER_ROLE if value == SELF else teacher_kind(name)
        return kinds

    @property
    def teacher_folders(self) -> dict[str, str]:
        """Return the folder of each teacher that is loaded from a folder, by kind of its logprob worker."""
        folders = {}
        for name, kind in self.teacher_kinds.items():
            if self.teachers[name] not in (SELF, INITIAL):
                folders[kind] = self.teachers[name]
        return folders

    def with_folders(self, local: Callable[[str], str]) -> str | None:
        """Return the value of `--teacher` with `local(folder)` in place of the folder of each teacher."""
        if self.teacher is None:
            return None
        teachers = dict(self.teachers)
        for name, kind in self.teacher_kinds.items():
            if kind in self.teacher_folders:
                teachers[name] = local(teachers[name])
        return teachers[""] if "" in teachers else table_text(teachers)
