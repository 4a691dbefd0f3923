"""Scoring: rewards of users run in killable processes, judges over the network, and a failure is never a zero.

    pool, adapter_queue    VerifierPool: one queue per adapter and phase
    verifier_worker        what a queue asks of a worker, has given to each, and counts
    local_workers          workers on this machine alone
    standalone             the pool as a reward function for TRL
    combine                the results of several adapters -> one verdict
    middleware             every call asks the cache and the budget first
    config                 the options of all that

    adapter/, isolation/   a user's reward: what it is and how it is declared; the process that it runs in
    builtin/, sandbox/     the rewards that are shipped; where the code of completions runs
    judge_worker           remote judges, and other workers under limits
    judges/, http/, cache/ what is asked of which server; one call over the network; answers across runs
    bench/                 behind `async-grpo verify`

None of it imports ray, vllm or torch.
"""
