"""`make_worker` of a pool whose rewards run in processes of this machine."""

from async_grpo.rewards.isolation.adapter_process import AdapterProcess


def process_maker(source):
    return lambda adapter: AdapterProcess(source, adapter).start()
