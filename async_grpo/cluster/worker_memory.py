"""The memory of one worker and its child processes: the plan before the start, and the measured memory."""

import os
from contextlib import AbstractContextManager
from pathlib import Path

from rich.filesize import decimal

from async_grpo.config.drawing_memory import drawing_engine_bytes
from async_grpo.config.memory_plan import engine_bytes, logprob_worker_bytes, parameters_of
from async_grpo.config.run import WorkerConfig
from async_grpo.errors import ConfigurationError
from async_grpo.inference.memory_cures import engine_start_cure, forward_cure
from async_grpo.messages import SharedRunSettings
from async_grpo.metrics.memory_report import memory_entry
from async_grpo.processes.memory_use import note_plan, peak_resident_bytes_of, resident_bytes
from async_grpo.processes.out_of_memory import naming_out_of_memory
from async_grpo.processes.process_tree import descendants
from async_grpo.types import GENERATION


class WorkerMemory:
    """Plans and measures the memory of a worker. Make it before the worker loads its model.

    Args:
        config: The worker's options, with a number of sequences if it is a generation worker.
        settings: Settings that all workers of the run share.
    """

    def __init__(self, config: WorkerConfig, settings: SharedRunSettings) -> None:
        import torch

        self._config = config
        self._is_engine = config.mode == GENERATION
        self._has_gpu = torch.cuda.is_available()
        self._baseline_bytes = resident_bytes()
        self.planned_bytes = self._plan(settings)
        if self._has_gpu and self._is_engine:
            # vLLM fills its share of each GPU with the KV cache, even if the sequences need less
            gpu_bytes = torch.cuda.get_device_properties(0).total_memory
            self.planned_bytes = int(config.gpu_memory_utilization * gpu_bytes * config.tensor_parallel_size)
        name = "this engine" if self._is_engine else f"this {config.role} worker"
        if self.planned_bytes:
            note_plan(name, self.planned_bytes)

    def _plan(self, settings: SharedRunSettings) -> int:
        """Return the estimate of `--dry-run` in bytes; 0 if the weights are not in safetensors files.

        A model without such files is no error here, because some engines can serve it. For example, vLLM can make
        random weights.
        """
        if settings.flow is not None:
            num_bytes = drawing_engine_bytes(
                self._config.model_path,
                self._config.max_num_seqs or 1,
                picture_size=settings.flow.picture_size,
                guidance=settings.flow.guidance,
                dtype=settings.dtype,
            )
            return int(num_bytes)
        from async_grpo.modeling.load import load_config
        from async_grpo.modeling.policy import DEFAULT_CHUNK_TOKENS

        try:
            num_parameters = parameters_of(Path(self._config.model_path))
        except ConfigurationError:
            return 0
        if self._is_engine:
            model = load_config(self._config.model_path).get_text_config()
            return engine_bytes(
                settings,
                model,
                num_parameters=num_parameters,
                num_sequences=self._config.max_num_seqs or 1,
                has_gpu=self._has_gpu,
            )
        return logprob_worker_bytes(
            settings,
            num_parameters=num_parameters,
            num_chunk_tokens=min(DEFAULT_CHUNK_TOKENS, self._config.max_tokens_per_gpu),
        )

    def naming_start(self) -> AbstractContextManager[None]:
        """Return a context in which an out-of-memory error says that the worker was starting."""
        if not self._is_engine:
            activity = f"while a {self._config.role} worker loaded its model"
            return naming_out_of_memory(activity, forward_cure(self._config.max_tokens_per_gpu))
        activity = "while an engine started"
        if self.planned_bytes:
            activity += f", with about {decimal(self.planned_bytes)} for weights and KV cache"
        return naming_out_of_memory(
            activity,
            engine_start_cure(self._config, has_gpu=self._has_gpu),
            searches_log=True,
        )

    def entry(self, peak_gpu_bytes: int) -> dict[str, float]:
        """Return measured and planned memory, for the key `memory` of the metrics.

        Args:
            peak_gpu_bytes: Peak memory of the worker's GPUs; 0 if it computes on the CPU.
        """
        if peak_gpu_bytes:
            return memory_entry(peak_bytes=peak_gpu_bytes, baseline_bytes=0, planned_bytes=self.planned_bytes)
        peak_bytes = 0
        baseline_bytes = 0
        for process_id in (os.getpid(), *descendants(os.getpid())):
            process_bytes = peak_resident_bytes_of([process_id])
            peak_bytes += process_bytes
            # The processes of an engine have imported what this process had imported before. Other child processes are
            # small, for example the one that tracks shared memory
            baseline_bytes += min(self._baseline_bytes, process_bytes)
        return memory_entry(
            peak_bytes=peak_bytes,
            baseline_bytes=baseline_bytes,
            planned_bytes=self.planned_bytes,
        )
