"""Add what the options ask for to the source of experience: a record, and further passes over each batch."""

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
    """Return a source that records the messages of another one and repeats them, as far as the options ask for it.

    Args:
        config: The run's options.
        ranks: The ranks of the training.
        source: The source of the first pass.
        accumulator: Trains the messages; the parts of the source that are added observe it.
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
