"""Tools that are ready to use, for lists of one's own: `TOOLS = [python, ...]`."""

from async_grpo.rewards.sandbox.run import Sandbox

MAX_OUTPUT = 4096  # characters
AROUND = """
import sys, traceback
try:
    exec(compile({0!r}, "program.py", "exec"), {{"__name__": "__main__"}})
except Exception as error:
    traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next), file=sys.stdout)
    sys.exit(1)
"""


def python(code: str) -> str:
    """Run a Python program and return what it prints. It has no network, no files and a few seconds."""
    ran = Sandbox(cpu_s=4.0, wall_s=8.0).run_program(AROUND.format(code), "")
    said = ran.output.decode(errors="replace")[:MAX_OUTPUT]
    if ran.ended_well:
        return said or "(it printed nothing)"
    return f"{said}\nerror: it {'took too long' if ran.timed_out else 'ended with an error'}".lstrip()


TOOLS = [python]
