"""Scoring of samples: users' rewards run in processes that can be killed, and judges are called over the network.

A reward that fails gives no reward. It is never counted as a reward of zero.

An adapter is a reward or a judge, under the name by which a run uses it. A phase is training or evaluation.

    pool, adapter_queue    `VerifierPool`, which has one queue per adapter and phase
    verifier_worker        the interface of workers, and the deadlines, jobs and counts of a queue
    local_workers          workers on this machine, for a pool outside of a run
    standalone             the pool as a reward function for TRL
    combine                combines the results of several adapters into one verdict
    middleware             checks the verdict cache and the budget before every call
    config                 the options of this package

    adapter/, isolation/   how a user's reward is declared, and the process in which it runs
    builtin/, sandbox/     the shipped rewards, and the sandbox for code from completions
    judge_worker           workers for remote judges, and for other rewards with rate limits
    judges/, http/, cache/ the remote judges, their calls over the network, and answers that are kept across runs
    bench/                 tries rewards on a file of completions, for `async-grpo verify`

This package does not import ray, vllm or torch.
"""
