"""Every completion has draws of its own."""

import itertools

from async_grpo.cluster.registered_workers import request_seed


def test_runs_questions_members_and_turns_all_change_the_draws():
    """Negative ordinals are those of evaluations."""
    ordinals = [-2, -1, 0, 1, 11]
    asked = list(itertools.product((0, 1, 37), ordinals, (0, 1, 11), (0, 1, 11)))
    seeds = [request_seed(*what) for what in asked]
    assert len(set(seeds)) == len(asked)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [request_seed(*what) for what in asked]
