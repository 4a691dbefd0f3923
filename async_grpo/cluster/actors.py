"""How the library makes Ray actors: asynchronous, and at no cost in logical CPUs.

rank 0 makes        RunController, which makes VerifierActor (one per adapter and more); they end with rank 0's job
a dispatcher makes  GenerationActor or LogprobActor; it ends with the dispatcher
the cluster's       RateLimitActor, made by the first process that needs it

Each is a few lines around a class with logic, in a module of its own.
"""

from typing import Any

import ray


def zero_cpu_actor(actor_class: type, **options: Any) -> Any:
    """`actor_class` ready for `.remote(...)`, claiming no CPU: a small machine must not starve its own control plane."""
    return ray.remote(actor_class).options(
        **{"num_cpus": 0, "max_restarts": 0, "max_concurrency": 10_000, **options}
    )
