"""Scoring: rewards of users run in killable processes, judges over the network, and a failure is never a zero.

    pool, adapter_queue    VerifierPool: one queue per adapter and phase
    jobs, worker_slot      what waits in a queue, and the worker that serves it
    verifier_worker        what a queue asks of a worker; `queue_stats`: what the workers did
    local_workers          workers on this machine alone; `trl_reward`: the pool as a reward function for TRL
    combine                the results of several adapters -> one verdict
    middleware             every call asks the cache and the budget first
    config                 the options of all that

    a user's reward
    adapter/               where its text comes from, how it is declared and called, what its answer must look like
    isolation/             the process that it runs in
    builtin/, sandbox/     the rewards that are shipped; where the code of completions runs

    a remote judge
    judges/                what is asked of which server; servers of our own
    judge_worker           a judge as a worker; `limited_worker`: any other, under limits
    http/                  one call over the network; permits for it
    cache/, budget         answers across runs; what judges may cost

    bench/                 behind `async-grpo verify`

None of it imports ray, vllm or torch.
"""
