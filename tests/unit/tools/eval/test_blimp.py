import json
from collections.abc import Sequence
from pathlib import Path

from penstock.tools.eval.blimp import MinimalPair, PairScores, accuracy, read_pairs, score_pairs

PAIRS = [MinimalPair("ab", "abc"), MinimalPair("aaaa", "b")]


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def shorter_is_likelier(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-1.0] * (len(sequence) - 1) for sequence in sequences]


def test_a_sentence_scores_the_sum_of_its_tokens() -> None:
    assert score_pairs(PAIRS, encode, shorter_is_likelier, start_token_id=0) == [
        PairScores(-2.0, -3.0),
        PairScores(-4.0, -1.0),
    ]


def test_every_sentence_begins_with_the_start_token() -> None:
    seen: list[list[int]] = []

    def score(sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        seen.extend(list(sequence) for sequence in sequences)
        return shorter_is_likelier(sequences)

    score_pairs(PAIRS[:1], encode, score, start_token_id=7)
    assert seen == [[7, 97, 98], [7, 97, 98, 99]]


def test_accuracy_counts_pairs_whose_good_sentence_is_likelier() -> None:
    assert accuracy([PairScores(-1.0, -2.0), PairScores(-2.0, -1.0), PairScores(-1.0, -1.0)]) == 1 / 3


def test_pairs_are_read_from_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    lines = [{"sentence_good": f"good {i}", "sentence_bad": f"bad {i}", "field": "syntax"} for i in range(3)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_pairs(file, max_pairs=2) == [MinimalPair("good 0", "bad 0"), MinimalPair("good 1", "bad 1")]
    assert len(read_pairs(file)) == 3
