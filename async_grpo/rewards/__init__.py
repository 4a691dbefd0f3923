"""Scoring: rewards of users run in killable processes, judges over the network, and a failure is never a zero.

    pool, lane             VerifierPool: one lane per adapter
    jobs, seat             what waits in a lane's queue, and where it is served
    worker, stats          what a lane asks of a worker; what the workers did
    combine                the results of several adapters -> one verdict
    surroundings           what stands around every call: cache and budget
    config                 all of a pool's settings

    a user's reward
    source                 its text, that travels to any process
    kinds, decorators      functions, classes, async, batches, groups, steps; and how they are declared
    contract, steps        how it is called, and what its answer must look like
    isolation/             the process that it runs in
    adapters/, sandbox/    the rewards that are shipped; where the code of completions runs

    a remote judge
    judges/                what is asked of which server; servers of our own
    judge_worker           a judge as a worker; `limited_worker`: any other, under limits
    remote/                one call over the network; permits for it
    cache/, budget         answers across runs; what judges may cost, and its record (`budget_record`)

    trying one out
    bench, scorecard       behind `async-grpo verify`; `adapter_check` is its --check

None of it imports ray, vllm or torch.
"""
