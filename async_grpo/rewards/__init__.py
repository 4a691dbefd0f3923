"""Scoring: each reward adapter runs in killable processes of its own, and a failure is never a zero.

    adapters/          the rewards that are shipped: plain functions sample -> dict
    source             the user's page of rewards, as text that travels to any process
    contract           how an adapter is called, and what its answer must look like
    steps              process rewards: an adapter's list of steps -> rewards of tokens
    child              the main program of one adapter's process
    channel, framing   the parent's end of that process, and the messages between the two
    worker             what the pool asks of a worker: the seam for judges that are no local process
    process            AdapterProcess, a worker with a process: deadlines, restarts, results
    combine            the results of several adapters -> one verdict
    lane, stats        one adapter's queue and workers, and what they did
    pool               VerifierPool: one lane per adapter

None of it imports ray, vllm or torch.
"""
