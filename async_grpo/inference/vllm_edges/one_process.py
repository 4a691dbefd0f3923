"""An engine on the CPU without a further process for its model.

Written for vLLM 0.31 and 0.32. On the CPU vLLM runs the model in a process of its own beside the engine's, only to bind its
threads to cores. That process imports everything a second time and is asked through a queue that is polled. Where threads
are not bound (`VLLM_CPU_OMP_THREADS_BIND=nobind`) it has no use. `distributed_executor_backend="uni"` is the public
argument, but vLLM's platform for the CPU turns it into "mp" unless this variable, which is meant for tests, is 0.

Not needed any more when the platform accepts "uni" as it is.
"""

import os

from vllm.platforms import current_platform


def run_model_in_engine_process() -> None:
    """Set the variable for engines that this process starts, unless the user has set it."""
    if current_platform.is_cpu() and os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind":
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
