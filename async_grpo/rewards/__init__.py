"""Scoring: each reward adapter runs in killable processes of its own, and a failure is never a zero.

    adapters/    the rewards that are shipped: plain functions sample -> dict
    source       the user's page of rewards, as text that travels to any process
    contract     how an adapter is called, and what its answer must look like
    child        the main program of one adapter's process
    process      the parent's side of that process: deadlines, restarts, results
    combine      the results of several adapters -> one verdict
    lane, pool   queues and workers, one lane per adapter: VerifierPool
"""
