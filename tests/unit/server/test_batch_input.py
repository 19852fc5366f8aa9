"""Input files of batches: lines to run, or what is wrong with them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol import openai_batches
from penstock.server.batch import input_file
from penstock.server.batch.input_file import InputFile, first_model, split_lines

URL = "/v1/completions"
MOST = 100_000
DEEP = b"[" * 10_000 + b"]" * 10_000


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
        (b'{"extra": 1, "custom_id": "a"', "invalid_json_line"),
        (b'{"extra": 1, "custom_id": "\xff"}', "invalid_json_line"),
        (b'{"extra": ' + DEEP + b"}", "invalid_json_line"),
        (json.dumps(line()).encode().replace(b"hi", b"gr\xfc\xdfe"), "invalid_json_line"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ' + DEEP + b"}", "invalid_json_line"),
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
        (b"x" * 200_000, "line_too_long"),
    ],
)
def test_a_wrong_line_is_told_with_its_number(wrong, code):
    _, errors = read(line("good"), wrong)
    assert [(error.code, error.line) for error in errors] == [(code, 2)]


@given(st.binary(max_size=6), st.integers(0, 200), st.integers(0, 8))
def test_whatever_a_line_holds_it_is_a_row_or_an_error(noise, start, length):
    text = json.dumps(line(custom_id="ä")).encode()
    found, errors = read(text[:start] + noise + text[start + length :])
    assert found or errors


@pytest.mark.parametrize(
    ("wrong", "sentence", "param"),
    [
        (b"[]", "give an object with the fields custom_id, method, url, body", None),
        (b'{"custom_id": "a"}', 'method is required; give "POST"', "method"),
        (line(method="GET"), 'method: "GET" is not usable; give "POST"', "method"),
        (
            line(custom_id=7),
            "custom_id: 7 is not usable; give a text of 1 to 512 characters, none of them",
            "custom_id",
        ),
        (line(url=None), "url: null is not usable; give the batch's endpoint", "url"),
        (line(extra=1), "unknown field 'extra'; a line has custom_id, method, url, body", "extra"),
        (b"\xff\xfe{\x00}\x00", "this line is not JSON in UTF-8; give one object on each line", None),
    ],
)
def test_what_is_wrong_with_a_line_is_said_in_our_own_words(wrong, sentence, param):
    (error,) = read(wrong)[1]
    assert error.message.startswith(sentence) and error.param == param
    assert "Expected" not in error.message and "$" not in error.message


def test_a_byte_order_mark_before_the_first_line_is_no_part_of_it():
    mark, text = b"\xef\xbb\xbf", json.dumps(line()).encode()
    rows, errors = read(mark + text, line("b"))
    assert ([row.custom_id for row in rows], errors) == (["a", "b"], [])
    assert first_model([mark[:2], mark[2:] + text], MOST) == "tiny"
    assert [error.line for error in read(line(), mark + text)[1]] == [2]


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
    assert first_model([b"{\n", json.dumps(line()).encode()], MOST) == "tiny"
    assert first_model([b"{"], MOST) is None
    assert first_model([b'{"body": ' + DEEP + b"}"], MOST) is None
    assert first_model([], MOST) is None


@pytest.mark.parametrize("text", [b"\n", b"x", json.dumps({"body": "x" * 19_000}).encode() + b"\n"])
def test_no_more_is_read_for_a_model_than_the_longest_line_may_need(text):
    pieces = iter([text * (20_000 // len(text))] * 50)
    assert first_model(pieces, MOST) is None
    assert len(list(pieces)) >= 50 - 6


def test_a_line_of_the_greatest_length_names_its_model():
    longest = line()
    longest["body"]["prompt"] = "x" * (MOST - len(json.dumps(longest["body"])))
    text = json.dumps(longest).encode() + b"\n"
    assert first_model([text[:1000], text[1000:], text], MOST) == "tiny"


def test_a_file_that_names_its_model_late_is_told_only_of_what_is_wrong():
    texts = [b"{"] + [json.dumps(line(name)).encode() for name in "ab"]
    file = InputFile([b"\n".join(texts)], URL, None, MOST)
    assert [row.custom_id for row in file.rows()] == ["a", "b"]
    assert [(error.line, error.code) for error in file.errors] == [(1, "invalid_json_line")]


@given(st.lists(st.binary(max_size=20)), st.data())
def test_lines_are_the_same_however_the_text_is_cut(lines, data):
    text = b"\n".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert list(split_lines(pieces, 1000)) == (whole if whole[-1] else whole[:-1])
