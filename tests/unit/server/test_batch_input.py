"""Input files of batches: lines to run, or what is wrong with them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol import openai_batches
from penstock.server.batch import input_file
from penstock.server.batch.input_file import InputFile, first_model, split_lines

URL = "/v1/completions"
MOST = 1000


def line(custom_id="a", **changes):
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "tiny", "prompt": "hi"}, **changes}


def read(*lines, max_body_bytes=MOST):
    texts = [item if isinstance(item, bytes) else json.dumps(item).encode() for item in lines]
    file = InputFile([b"\n".join(texts)], URL, "tiny", max_body_bytes)
    return list(file.rows()), file.errors


def test_lines_keep_their_numbers_and_empty_ones_count():
    rows, errors = read(line("a"), b"", b"  \r", line("b"))
    assert [(row.line, row.custom_id) for row in rows] == [(1, "a"), (4, "b")]
    assert json.loads(rows[0].body) == {"model": "tiny", "prompt": "hi"}
    assert errors == []


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (b"{", "invalid_json_line"),
        (b"\xff", "invalid_json_line"),
        (b"[]", "invalid_line"),
        (line(custom_id=""), "invalid_line"),
        (line(custom_id=7), "invalid_line"),
        (line(custom_id="x" * 513), "invalid_line"),
        (line(custom_id="a\x00b"), "invalid_line"),
        (line(method="GET"), "invalid_line"),
        (line(extra=1), "invalid_line"),
        (line(url="/v1/embeddings"), "mismatched_url"),
        (line(body="x"), "invalid_body"),
        (line(body={"prompt": "x"}), "invalid_body"),
        (line(body={"model": "other"}), "mismatched_model"),
        (line("good"), "duplicate_custom_id"),
        (b"x" * 20_000, "line_too_long"),
    ],
)
def test_a_wrong_line_is_told_with_its_number(wrong, code):
    _, errors = read(line("good"), wrong)
    assert [(error.code, error.line) for error in errors] == [(code, 2)]


def test_a_file_without_lines_is_wrong():
    assert [error.code for error in read(b"\n\n")[1]] == ["empty_file"]


def test_too_many_lines_are_not_read(monkeypatch):
    monkeypatch.setattr(input_file, "MAX_LINES", 3)
    assert openai_batches.MAX_LINES == 50_000
    rows, errors = read(*[line(f"r{index}") for index in range(5)])
    assert (len(rows), [error.code for error in errors]) == (3, ["too_many_lines"])


def test_only_as_many_errors_are_told_as_somebody_would_read():
    assert len(read(*[b"{"] * 500)[1]) == 50


def test_the_first_lines_model_is_the_batchs():
    assert first_model([b"\n", json.dumps(line()).encode()], MOST) == "tiny"
    assert first_model([b"{"], MOST) is None
    assert first_model([], MOST) is None


@given(st.lists(st.binary(max_size=20)), st.data())
def test_lines_are_the_same_however_the_text_is_cut(lines, data):
    text = b"\n".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = text.split(b"\n")
    assert list(split_lines(pieces, 1000)) == (whole if whole[-1] else whole[:-1])
