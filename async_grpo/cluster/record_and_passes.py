"""Extend the source of experience as the options ask: record all messages, and repeat each batch in further passes."""

from async_grpo.config.resume import as_options
from async_grpo.config.run import RunConfig
from async_grpo.protocols import ExperienceSource
from async_grpo.training.accumulator import GradientAccumulator
from async_grpo.training.distributed import Ranks
from async_grpo.training.passes import Passes
from async_grpo.training.record import Recorder


def with_record_and_passes(
    config: RunConfig, ranks: Ranks, source: ExperienceSource, accumulator: GradientAccumulator
) -> ExperienceSource:
    """Return the source, extended by recording (`--record`) and by further passes (`--passes-per-batch`) if these are set.

    Args:
        config: The run's options.
        ranks: The ranks of the training.
        source: The source of the first pass.
        accumulator: Trains on the messages. It is connected to the extensions, which need its results.
    """
    if config.record:
        recorder = Recorder(source, config.output_path, ranks.world_size, as_options(config))
        accumulator.observers.append(recorder.keep_first_pass)
        source = recorder
    if config.passes_per_batch > 1:
        passes = Passes(
            source,
            config.pass_plan,
            config.infinite_sampler_seed,
            late_workers_wait=config.weight_sync_deltas,
        )
        accumulator.observers.append(passes.keep_results)
        accumulator.on_passes_stopped = passes.end_batch
        source = passes
    return source
