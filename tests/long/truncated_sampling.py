"""Are the log-probs over the tokens that top-p, top-k and min-p keep the same in engine and trainer? On the real engine.

    python -m tests.long.truncated_sampling                                  # both models, half an hour on two cores
    python -m tests.long.truncated_sampling --model smollm2 --tokens 2000 --dtype bfloat16

For each model and rule, the engine samples at least `--tokens` tokens, and the trainer's policy computes their log-probs
with the same weights and rule. Printed per rule: the mean and the largest difference of the log-probs, the tokens that
differ by more than 1e-4, the mean importance ratio, the largest distance of a ratio from 1, and the sampled tokens that the
trainer's own rule leaves out.
"""

import argparse
import asyncio
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from async_grpo.messages import Truncation

ROOT = Path(__file__).resolve().parents[2]
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")])
TINY = "tiny"
REAL = "smollm2"
SAMPLES_AT_ONCE = 64
COMPLETION_TOKENS = 100
TOLERANCE = 1e-4
RULES = {
    "top-p 0.9": Truncation(top_p=0.9),
    "top-k 20": Truncation(top_k=20),
    "min-p 0.05": Truncation(min_p=0.05),
    "top-p 0.9, top-k 20, min-p 0.01": Truncation(top_p=0.9, top_k=20, min_p=0.01),
}


def model_folder(name: str) -> Path:
    """Return the folder of the sample model, or of the real one, which is made if it does not exist."""
    from real_model import real_model

    return real_model() if name == REAL else ROOT / "sample-data" / "tiny-model"


def prompts_of(folder: Path, count: int) -> Iterator[np.ndarray]:
    """Yield chats about numbered subjects as token ids, so that prompts differ."""
    from async_grpo.modeling.load import load_tokenizer

    tokenizer = load_tokenizer(folder)
    for number in range(count):
        message = {"role": "user", "content": f"Tell me something about the number {number}."}
        text = tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        yield np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)


async def sample(worker, prompts: list[np.ndarray], rule: Truncation, temperature: float) -> list[tuple]:
    """Return (prompt, completion) for each prompt."""
    worker.settings = replace(worker.settings, truncation=rule, temperature=temperature)

    async def complete(number: int, prompt: np.ndarray) -> tuple:
        results = [result async for result in worker.complete(prompt, {0: number})]
        return prompt, results[-1]  # the results before are tokens of the unfinished completion

    return await asyncio.gather(*(complete(number, prompt) for number, prompt in enumerate(prompts)))


@torch.no_grad()
def compare(policy, pairs: list[tuple], rule: Truncation, temperature: float) -> dict[str, np.ndarray]:
    """Return log-probs of the sampled tokens by engine and trainer, and which the trainer's own rule leaves out."""
    arrays: dict[str, list[np.ndarray]] = {"engine": [], "trainer": [], "outside": []}
    for prompt, completion in pairs:
        ids = torch.tensor(np.concatenate([prompt, completion.token_ids])).long()
        is_sampled = torch.arange(len(ids)) >= len(prompt)
        arguments = (ids, torch.tensor([0, len(ids)]), is_sampled, temperature)
        logprobs, _, is_outside = policy(*arguments, truncation=rule)
        arrays["engine"].append(completion.logprobs)
        arrays["trainer"].append(logprobs[is_sampled].numpy())
        arrays["outside"].append(is_outside[is_sampled].numpy())
    return {name: np.concatenate(parts).astype(np.float64) for name, parts in arrays.items()}


def report(name: str, logprobs_by_side: dict[str, np.ndarray]) -> None:
    """Print the measures of one rule."""
    differences = logprobs_by_side["trainer"] - logprobs_by_side["engine"]
    magnitudes = np.abs(differences)
    ratios = np.exp(differences)
    print(
        f"{name}: {len(differences)} tokens, log-probs differ by {magnitudes.mean():.1e}, at most {magnitudes.max():.1e}, "
        f"above {TOLERANCE:g}: {(magnitudes > TOLERANCE).sum()}; ratio mean {ratios.mean():.7f}, max |ratio - 1| "
        f"{np.abs(ratios - 1).max():.1e}; outside of the trainer's support {int(logprobs_by_side['outside'].sum())}",
        flush=True,
    )


def measure(model: str, rules: list[str], dtype: str, num_tokens: int, temperature: float) -> None:
    """Sample from one model by each rule, and print the comparison with the trainer."""
    from engine_thread import EngineThread

    from async_grpo.modeling.load import load_causal_lm, stop_token_ids
    from async_grpo.modeling.policy import PolicyModel

    folder = model_folder(model)
    policy = PolicyModel(load_causal_lm(folder, dtype)).eval()
    vocab_size = policy.model.get_output_embeddings().weight.shape[0]
    changes = {
        "vocab_size": vocab_size,
        "dtype": dtype,
        "stop_token_ids": stop_token_ids(folder),
        "max_total_tokens": 256,
        "max_completion_tokens": COMPLETION_TOKENS,
        "char_ends": False,
    }
    with closing(EngineThread(folder, **changes)) as engine:
        for name in rules:
            rule = RULES[name]
            pairs: list[tuple] = []
            prompts = list(prompts_of(folder, num_tokens))
            while sum(len(completion) for _, completion in pairs) < num_tokens:
                batch = prompts[len(pairs) : len(pairs) + SAMPLES_AT_ONCE]
                pairs += engine.run(sample(engine.worker, batch, rule, temperature), 600)
            report(f"{model} {dtype} {name}", compare(policy, pairs, rule, temperature))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=(TINY, REAL), action="append")
    parser.add_argument("--rule", choices=list(RULES), action="append")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for model_name in options.model or (TINY, REAL):
        measure(model_name, options.rule or list(RULES), options.dtype, options.tokens, options.temperature)
