"""`with_sequences`: how many sequences an engine decodes at once when nobody says so."""

from dataclasses import replace

import pytest
from tiny_policy import SETTINGS, tiny_config

from async_grpo.inference.config import EngineConfig


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """An engine of two layers with one key-value head of 32, and a KV cache of 1 GiB."""
    tiny_config().save_pretrained(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")

    def choose(given: int | None = None, **settings) -> int:
        config = EngineConfig(model_path=str(tmp_path), max_num_seqs=given)
        return config.with_sequences(replace(SETTINGS, **settings)).max_num_seqs

    return choose


def test_all_that_a_run_has_in_flight_is_decoded_at_once(chosen):
    assert chosen(samples_in_flight=512) == 512
    assert chosen(samples_in_flight=4096) == 1024  # vLLM takes no more sequences than tokens in a step, 2,048


def test_what_was_given_is_kept(chosen):
    assert chosen(7, samples_in_flight=512) == 7


def test_no_more_than_the_kv_cache_holds_of_half_the_longest_but_a_whole_group(chosen):
    tokens = 2**30 // (2 * 2 * 32 * 4)  # keys and values of 2 layers x 32 float32 numbers: 2,097,152
    assert chosen(samples_in_flight=512, max_total_tokens=tokens // 8) == 16
    assert chosen(samples_in_flight=512, max_total_tokens=tokens // 8, dtype="bfloat16") == 32
    assert chosen(samples_in_flight=512, max_total_tokens=tokens // 8, group_size=24) == 24
