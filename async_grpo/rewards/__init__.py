"""Scoring: users' rewards run in processes that can be killed, judges over the network; a failure is never a zero.

    pool, adapter_queue    VerifierPool: one queue per adapter and phase
    verifier_worker        the interface of workers; a queue's deadlines, jobs, slots and counts
    local_workers          makes workers on this machine, without a run
    standalone             the pool as a reward function for TRL
    combine                the results of several adapters -> one verdict
    middleware             looks into the cache and the budget before every call
    config                 the options of this package

    adapter/, isolation/   a user's reward: how it is declared, and the process that it runs in
    builtin/, sandbox/     the shipped rewards; the sandbox for code from completions
    judge_worker           remote judges, and other workers under limits
    judges/, http/, cache/ the remote judges; one call over the network; answers kept across runs
    bench/                 the benchmark behind `async-grpo verify`

This package does not import ray, vllm or torch.
"""
