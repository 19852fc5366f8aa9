"""The default precision against float32, on public text: the gate that a fast path must pass to be the default."""

import json
from pathlib import Path

import pytest

from penstock import LLM
from penstock.tools.eval.blimp import accuracy, read_pairs, score_pairs
from penstock.tools.eval.perplexity import perplexity

DATA = Path(__file__).parents[2].parent / "shared" / "data"
NUM_WINDOWS = 16
NUM_PAIRS = 125  # of each file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not DATA.exists(), reason=f"the public data sets are not at {DATA.name}"),
]


def measure(precision: str) -> tuple[float, float]:
    """Return perplexity and BLiMP accuracy."""
    with LLM("smollm2-135m", precision=precision, kv_memory="1GiB") as llm:

        def score(sequences):
            return [[value for value in found[1:] if value is not None] for found in llm.score(sequences)]

        def encode(text):
            return llm.tokenizer.encode(text, add_special=False)

        ids = encode((DATA / "wikitext2_valid.txt").read_text()[:200_000])
        pairs = [pair for file in sorted((DATA / "blimp").glob("*.jsonl")) for pair in read_pairs(file, NUM_PAIRS)]
        start = llm.tokenizer.eos_token_ids[-1]
        return perplexity(ids, score, max_windows=NUM_WINDOWS), accuracy(
            score_pairs(pairs, encode, score, start_token_id=start)
        )


def test_the_default_precision_loses_next_to_nothing():
    exact_perplexity, exact_accuracy = measure("exact")
    fast_perplexity, fast_accuracy = measure("auto")
    figures = {
        "perplexity": [exact_perplexity, fast_perplexity, fast_perplexity / exact_perplexity - 1],
        "blimp": [exact_accuracy, fast_accuracy, fast_accuracy - exact_accuracy],
    }
    print(json.dumps(figures))
    assert fast_perplexity <= 1.02 * exact_perplexity
    assert fast_accuracy >= exact_accuracy - 0.005
