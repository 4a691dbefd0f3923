"""Ready-made tools for a user's list of tools: `TOOLS = [python, ...]`."""

from async_grpo.rewards.sandbox.run import Sandbox

MAX_OUTPUT_CHARACTERS = 4096
CPU_S = 4.0  # limit of a program's processor time, in seconds
WALL_S = 8.0  # limit of a program's elapsed time, in seconds
# Runs the program. A traceback goes to stdout, which the model reads, without the stack frame of this wrapper
WRAPPER = """
import sys, traceback
try:
    exec(compile({0!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next), file=sys.stdout)
    sys.exit(1)
"""


def python(code: str) -> str:
    """Run a Python program and return what it prints. It has no network, no files and a few seconds."""
    run = Sandbox(cpu_s=CPU_S, wall_s=WALL_S).run_program(WRAPPER.format(code), "")
    output = run.output.decode(errors="replace")[:MAX_OUTPUT_CHARACTERS]
    if run.ended_well:
        return output or "(it printed nothing)"
    reason = "took too long" if run.timed_out else "ended with an error"
    return f"{output}\nerror: it {reason}".lstrip()


TOOLS = [python]
