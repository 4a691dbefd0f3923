"""Run the model in the engine's own process on the CPU.

Written for vLLM 0.31 and 0.32. On the CPU vLLM runs the model in a separate process, only to bind its threads to cores.
That process imports everything a second time, and the engine talks to it through a queue that is polled. If threads are
not bound (`VLLM_CPU_OMP_THREADS_BIND=nobind`), the process is useless. The public argument that avoids it is
`distributed_executor_backend="uni"`, but vLLM's CPU platform changes the value to "mp" unless the variable
`VLLM_ENABLE_V1_MULTIPROCESSING`, which is meant for tests, is 0.

Not needed any more when the CPU platform accepts "uni".
"""

import os

from vllm.platforms import current_platform


def run_model_in_engine_process() -> None:
    """Set the variable `VLLM_ENABLE_V1_MULTIPROCESSING` for this process's engines, unless the user has set it."""
    if current_platform.is_cpu() and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
