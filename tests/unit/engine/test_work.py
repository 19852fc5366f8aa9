"""What an engine tells of its load: work that grows in a line with it, and the wait of whoever comes next."""

import pytest

from penstock.request import Tier
from tests.fakes.virtual_engine import H200_LLAMA_8B, VirtualEngine, request


def work_rate(rate, count=60, **fields):
    """Play requests at a rate; return device time for tokens in each second."""
    engine = VirtualEngine(known=H200_LLAMA_8B)
    engine.run([request(str(index), index / rate, prompt=512, answer=32, **fields) for index in range(count)])
    return engine.engine.stats().work_seconds * rate / count


def test_work_grows_in_a_line_with_the_load():
    few, many = work_rate(8.0), work_rate(32.0)
    assert many / few == pytest.approx(4.0, rel=0.15)
    assert many < 1.0


def test_an_engine_that_only_decodes_a_little_works_little_however_long_it_is_busy():
    engine = VirtualEngine(known=H200_LLAMA_8B)
    engine.run([request("one", prompt=16, answer=500)])
    assert engine.clock.now > 1.9
    assert engine.engine.stats().work_seconds < 0.05


def test_batch_requests_are_no_work():
    assert work_rate(16.0, tier=Tier.BATCH) == 0.0


def test_batch_requests_beside_others_do_not_count_as_theirs():
    engine = VirtualEngine(known=H200_LLAMA_8B)
    batch = [request(f"batch {index}", prompt=512, answer=32, tier=Tier.BATCH) for index in range(40)]
    engine.run([*batch, *[request(str(index), index / 8, prompt=512, answer=32) for index in range(60)]])
    # A prompt beside others' is behind the knee; alone it is cut so that half of it is before.
    assert engine.engine.stats().work_seconds * 8 / 60 < 2.0 * work_rate(8.0)


def test_nobody_waits_in_an_idle_engine():
    assert VirtualEngine(known=H200_LLAMA_8B).engine.stats().queue_seconds == 0.0


@pytest.mark.parametrize("num_prompts", [10, 40])
def test_the_wait_is_foreseen_from_the_prompts_that_are_there(num_prompts):
    engine = VirtualEngine(known=H200_LLAMA_8B)
    for index in range(num_prompts):
        engine.submit(request(str(index), prompt=2048, answer=1))
    foreseen = engine.engine.stats().queue_seconds
    engine.run([])
    assert foreseen == pytest.approx(engine.clock.now, rel=0.25)


def test_the_wait_for_a_row_is_foreseen_where_rows_are_short():
    engine = VirtualEngine(known=H200_LLAMA_8B, max_running=4)
    for index in range(8):
        engine.submit(request(str(index), prompt=16, answer=200))
    # The second four begin when the first four end, after 200 steps of 4 ms.
    assert 0.4 < engine.engine.stats().queue_seconds < 2.5


def test_batch_prompts_keep_nobody_waiting():
    engine = VirtualEngine(known=H200_LLAMA_8B)
    for index in range(40):
        engine.submit(request(str(index), prompt=2048, answer=1, tier=Tier.BATCH))
    assert engine.engine.stats().queue_seconds == 0.0
