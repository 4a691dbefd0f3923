"""Leave a group of the NCCL transport.

Written for vLLM 0.31. A group has fixed members, so a new group is built when engines join or leave. An engine that
joins a new group without leaving the old group keeps the old group open. vLLM 0.32 can leave a group by a public call,
`AsyncLLM.shutdown_weight_transfer_engine`. vLLM 0.31 has no such call, so a method of the worker extension replaces it.

Not needed any more when all versions in KNOWN_VERSIONS have the call.
"""

from vllm.v1.engine.async_llm import AsyncLLM

HAS_PUBLIC_CALL = hasattr(AsyncLLM, "shutdown_weight_transfer_engine")


async def leave_transfer_group(engine: AsyncLLM) -> None:
    """Make all processes of the engine leave their group, if they are in one."""
    if HAS_PUBLIC_CALL:
        await engine.shutdown_weight_transfer_engine()
    else:
        await engine.collective_rpc("leave_transfer_group")
