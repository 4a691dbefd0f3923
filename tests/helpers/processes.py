"""`make_worker` of a pool whose rewards run in processes of this machine."""

from async_grpo.rewards.isolation.adapter_process import AdapterProcess


def process_maker(source):
    async def make(adapter):
        return await AdapterProcess(source, adapter).start()

    return make
