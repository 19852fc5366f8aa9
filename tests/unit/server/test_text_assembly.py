"""Text as it streams: whole characters, no trace of a stop string, scores where their text is."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.messages import TokenEvent, TokenLogprob
from penstock.engine.tokenizer import Tokenizer
from penstock.request import FinishReason, SamplingParams
from penstock.server.text_assembly import TextAssembler
from tests.fakes.tiny_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
TEXTS = st.text(st.sampled_from("abé漢🙂👨‍👩‍👧 \n") | st.characters(codec="utf-8"), max_size=30)
SHORT = st.text("ab🙂", min_size=1, max_size=3)


def chunks_of(token_ids, sizes):
    """Cut the ids into events of these sizes, cycling."""
    start = 0
    for size in itertools.cycle(sizes):
        yield token_ids[start : start + size]
        start += size
        if start >= len(token_ids):
            return


def assemble(text, sizes, **fields):
    """Run a text's tokens through an assembler; return it and its pieces."""
    token_ids = TOKENIZER.encode(text, add_special=False)
    params = SamplingParams(**fields)
    assembler = TextAssembler(TOKENIZER, params)
    pieces = []
    chunks = list(chunks_of(token_ids, sizes))
    for number, chunk in enumerate(chunks, start=1):
        event = TokenEvent(request_id="r", token_ids=chunk)
        if params.logprobs is not None:
            event.logprobs = [TokenLogprob(token_id, -1.0) for token_id in chunk]
        if number == len(chunks):
            event.finish = FinishReason.LENGTH
        pieces.append(assembler.push(event))
        if assembler.finish is not None:
            break
    return assembler, pieces


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(TEXTS, sizes)
def test_no_piece_holds_half_a_character_however_tokens_are_cut(text, sizes):
    _, pieces = assemble(text, sizes)
    assert "".join(piece.text for piece in pieces) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece.text for piece in pieces) or "\N{REPLACEMENT CHARACTER}" in text


@given(st.text("ab🙂", max_size=30), st.lists(SHORT, min_size=1, max_size=3), sizes, st.integers(0, 20))
@settings(max_examples=200)
def test_the_text_ends_where_the_first_stop_string_that_counts_is_complete(text, stops, sizes, min_tokens):
    assembler, pieces = assemble(text, sizes, stop=tuple(stops), min_tokens=min_tokens)
    shown = "".join(piece.text for piece in pieces)
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    ends = [end for end in ends if tokens_to_reach(text, end) >= min_tokens]
    if not ends:
        assert shown == text
        assert assembler.finish is FinishReason.LENGTH
        return
    longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    assert shown == text[: ends[0] - len(longest)]
    assert assembler.finish is FinishReason.STOP
    assert assembler.num_tokens == tokens_to_reach(text, ends[0])


def tokens_to_reach(text, num_characters):
    """Return how many tokens hold the first characters of a text."""
    data = b""
    for count, token_id in enumerate(TOKENIZER.encode(text, add_special=False), start=1):
        data += TOKENIZER.token_bytes(token_id)
        if len(data.decode(errors="ignore")) >= num_characters:
            return count
    raise AssertionError("the text is shorter")


@given(TEXTS, st.lists(SHORT, max_size=2), sizes)
@settings(max_examples=200)
def test_scores_leave_with_the_text_they_belong_to(text, stops, sizes):
    assembler, pieces = assemble(text, sizes, stop=tuple(stops), logprobs=0)
    shown = ""
    for piece in pieces:
        for token in piece.tokens:
            assert len(shown) <= token.offset <= len(shown) + len(piece.text)
        shown += piece.text
    tokens = [token.score.token_id for piece in pieces for token in piece.tokens]
    assert TOKENIZER.decode(tokens).startswith(shown)
    if assembler.finish is FinishReason.LENGTH:
        assert TOKENIZER.decode(tokens) == shown


def test_an_incomplete_character_at_the_end_is_shown_as_such():
    assembler = TextAssembler(TOKENIZER, SamplingParams())
    half = TOKENIZER.encode("é", add_special=False)[:1]
    piece = assembler.push(TokenEvent(request_id="r", token_ids=half, finish=FinishReason.LENGTH))
    assert piece.text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("text", "shown"), [("abxyzc", "ab"), ("xyzabxyz", "xyzab"), ("xyzabc", "xyzabc")])
def test_a_stop_string_counts_that_begins_before_min_tokens_and_ends_at_or_after_it(text, shown):
    _, pieces = assemble(text, [1], stop=("xyz",), min_tokens=4)
    assert "".join(piece.text for piece in pieces) == shown


def test_a_partial_stop_string_is_shown_once_nothing_can_complete_it():
    assembler = TextAssembler(TOKENIZER, SamplingParams(stop=("xyz",)))
    first = assembler.push(TokenEvent(request_id="r", token_ids=TOKENIZER.encode("axy", add_special=False)))
    last = assembler.push(TokenEvent(request_id="r", finish=FinishReason.LENGTH))
    assert (first.text, last.text) == ("a", "xy")
    assert last.finish is FinishReason.LENGTH


@given(TEXTS, st.lists(SHORT, max_size=2), sizes, st.sampled_from([None, 0]), st.integers(0, 30))
@settings(max_examples=200)
def test_what_was_shown_elsewhere_may_be_told_in_parts(text, stops, sizes, logprobs, num_told):
    token_ids = TOKENIZER.encode(text, add_special=False)
    told, rest = token_ids[:num_told], token_ids[num_told:]
    params = SamplingParams(stop=tuple(stops), logprobs=logprobs)
    at_once, in_parts = TextAssembler(TOKENIZER, params), TextAssembler(TOKENIZER, params)
    at_once.replay(told)
    for part in chunks_of(told, sizes):
        if in_parts.finish is None:
            in_parts.replay(part)
    assert (in_parts.num_tokens, in_parts.finish) == (at_once.num_tokens, at_once.finish)
    if at_once.finish is None:
        event = TokenEvent(request_id="r", token_ids=rest, finish=FinishReason.LENGTH)
        event.logprobs = None if logprobs is None else [TokenLogprob(token_id, -1.0) for token_id in rest]
        assert in_parts.push(event) == at_once.push(event)


@pytest.mark.parametrize(("stop", "offsets"), [((), [0, 1]), (("a",), [0])])
def test_a_token_behind_bytes_that_are_no_character_begins_behind_what_stands_for_them(stop, offsets):
    half, whole = TOKENIZER.encode("🙂", add_special=False)[0], TOKENIZER.encode("a", add_special=False)[0]
    assembler = TextAssembler(TOKENIZER, SamplingParams(logprobs=0, stop=stop))
    scores = [TokenLogprob(half, -1.0), TokenLogprob(whole, -1.0)]
    event = TokenEvent(request_id="r", token_ids=[half, whole], logprobs=scores, finish=FinishReason.LENGTH)
    piece = assembler.push(event)
    assert piece.text == ("\N{REPLACEMENT CHARACTER}" if stop else "\N{REPLACEMENT CHARACTER}a")
    assert [token.offset for token in piece.tokens] == offsets


PIECES = (
    b"a",
    b" cart",
    b"d \xf0\x9f",
    b"\xf0\x9f",
    b"\x99\x82",
    b"\x82",
    b"\xa2b\xe6",
    b"\xe6\xbc",
    b"\xff",
    b"\xef\xbf\xbd",
)


class PiecesOnly(Tokenizer):
    """Tokens that are these bytes."""

    special_ids = frozenset()
    strips_first_space = False

    def __init__(self):
        pass

    def token_bytes(self, token_id):
        return PIECES[token_id]


@given(st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=8), sizes, st.sampled_from([b"", b"\xf0\x9f"]))
@settings(max_examples=300)
def test_a_token_begins_at_the_character_that_has_its_first_byte(token_ids, sizes, unfinished):
    assembler = TextAssembler(PiecesOnly(), SamplingParams(logprobs=0), unfinished=unfinished)
    pieces = []
    for chunk in chunks_of(token_ids, sizes):
        scores = [TokenLogprob(token_id, -1.0) for token_id in chunk]
        pieces.append(assembler.push(TokenEvent(request_id="r", token_ids=chunk, logprobs=scores)))
    pieces.append(assembler.push(TokenEvent(request_id="r", finish=FinishReason.LENGTH)))
    data = unfinished
    offsets = []
    for token_id in token_ids:
        offsets.append(len((data + PIECES[token_id][:1]).decode(errors="replace")) - 1)
        data += PIECES[token_id]
    assert "".join(piece.text for piece in pieces) == data.decode(errors="replace")
    assert [token.offset for piece in pieces for token in piece.tokens] == offsets
