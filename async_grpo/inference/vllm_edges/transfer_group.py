"""How an engine leaves a group of the NCCL transport.

Written for vLLM 0.31. A group has fixed members and is built anew when engines come or go. An engine that joins a second
group without leaving the first keeps the first one open. vLLM 0.32 has a public call for it,
`AsyncLLM.shutdown_weight_transfer_engine`; 0.31 has none, so there a method of the worker extension does it.

Not needed any more when no known version lacks the call.
"""

from vllm.v1.engine.async_llm import AsyncLLM

HAS_PUBLIC_CALL = hasattr(AsyncLLM, "shutdown_weight_transfer_engine")


async def leave_transfer_group(engine: AsyncLLM) -> None:
    """Let all processes of the engine leave their group, if they are in one."""
    if HAS_PUBLIC_CALL:
        await engine.shutdown_weight_transfer_engine()
    else:
        await engine.collective_rpc("leave_transfer_group")
