"""Processes that start at once: they are forked from a process that has imported what takes seconds."""

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
# By names that can be imported from the repository's folder; Python ignores any other one, such as a helper's
FORKED.set_forkserver_preload(
    ["async_grpo.cluster.make_trainer", "async_grpo.testing", "transformers.models.qwen2.modeling_qwen2"]
)
