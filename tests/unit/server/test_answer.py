"""Answers read in slices: however much has arrived, others' answers go on."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from penstock.engine.client import TokenStream
from penstock.engine.messages import ArrivedEvents, Events, TokenEvent, TokenLogprob, decode_from_engine, encode
from penstock.request import FinishReason, SamplingParams
from penstock.server.answer import Answer, Choice, Prompt
from penstock.server.loop_turns import ENTRIES_A_PASS, LoopTurns
from penstock.server.open_answers import OpenAnswers
from penstock.server.streaming import AnswerResponse
from penstock.server.text_assembly import TextAssembler
from penstock.telemetry import RequestRecord
from tests.fakes.tiny_tokenizer import make_tokenizer

TOKENIZER = make_tokenizer()
TOKEN = TOKENIZER.encode("a", add_special=False)[0]
TOP = 20


def backlog(turns, num_choices, num_tokens, *, scored=True):
    """An answer of which all has arrived and nothing was read."""
    prompt, choices = Prompt([1]), []
    score = TokenLogprob(TOKEN, -1.0, [TOKEN] * TOP, [-1.0] * TOP)
    for index in range(num_choices):
        stream = TokenStream(SimpleNamespace(abort=lambda *_: None), str(index))
        for place in range(num_tokens):
            event = TokenEvent(request_id="r", token_ids=[TOKEN], logprobs=[score] if scored else None)
            event.finish = FinishReason.LENGTH if place == num_tokens - 1 else None
            message = decode_from_engine(encode(Events([event])))
            assert isinstance(message, ArrivedEvents)
            stream.push(message.events[0])
        assembler = TextAssembler(TOKENIZER, SamplingParams(logprobs=TOP if scored else None))
        choices.append(Choice(index, prompt, stream, assembler, only_scores_prompt=False))
    return Answer([prompt], choices, None, turns)


def entries_in(batch):
    return sum(choice.entries_a_token * max(1, len(piece.text)) for choice, piece in batch)


async def read(answer, read_entries):
    texts = {}
    async for batch in answer.batches():
        read_entries.append(entries_in(batch))
        for choice, piece in batch:
            texts[choice.index] = texts.get(choice.index, "") + piece.text
    return texts


@pytest.mark.parametrize("scored", [True, False])
@pytest.mark.parametrize(("num_choices", "num_tokens"), [(1, 300), (128, 1), (40, 20)])
async def test_no_batch_holds_more_than_one_pass_may(num_choices, num_tokens, scored):
    batches = []
    answer = backlog(LoopTurns(), num_choices, num_tokens, scored=scored)
    texts = await read(answer, batches)
    assert texts == dict.fromkeys(range(num_choices), "a" * num_tokens)
    assert max(batches) < ENTRIES_A_PASS + TOP + 2
    assert answer.usage().completion_tokens == num_choices * num_tokens


async def test_long_answers_together_hold_no_pass_for_longer_than_one():
    turns, batches, in_a_pass = LoopTurns(), [], []
    tasks = [asyncio.create_task(read(backlog(turns, 8, 40), batches)) for _ in range(5)]
    while not all(task.done() for task in tasks):
        num_before = len(batches)
        await asyncio.sleep(0)
        in_a_pass.append(sum(batches[num_before:]))
    assert sum(in_a_pass) == 5 * 8 * 40 * (TOP + 2)
    assert max(in_a_pass) < ENTRIES_A_PASS + TOP + 2


async def test_a_short_answer_does_not_wait_for_long_ones():
    turns = LoopTurns()
    long = [asyncio.create_task(read(backlog(turns, 8, 40), [])) for _ in range(5)]
    await asyncio.sleep(0)
    short = asyncio.create_task(read(backlog(turns, 1, 1, scored=False), []))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert short.done()
    assert not any(task.done() for task in long)
    await asyncio.gather(*long)


async def test_a_reader_that_stood_still_and_left_pays_for_all_that_was_made():
    answer = backlog(LoopTurns(), 2, 50, scored=False)
    booked, stands_still, sent = [], asyncio.Event(), itertools.count()
    answer.charge = SimpleNamespace(close=lambda record: booked.append(record.output_tokens), headers={})

    async def send(_message):
        if next(sent) == 1:  # the head went out
            stands_still.set()
            await asyncio.Event().wait()

    async def receive():
        await stands_still.wait()
        return {"type": "http.disconnect"}

    reply = SimpleNamespace(prepare=lambda *_: asyncio.sleep(0), events=lambda *_: b"event")
    record = RequestRecord("id", "POST", "/", arrival=0.0)
    standstill = SimpleNamespace(is_recent=lambda: False)
    response = AnswerResponse(answer, reply, stream=True, record=record, answers=OpenAnswers(), standstill=standstill)
    await asyncio.wait_for(response({"type": "http", "headers": []}, receive, send), 10)
    assert booked == [100]
    assert record.finish == "abort"


async def test_what_came_behind_the_end_of_an_answer_is_not_paid_when_its_caller_leaves():
    answer = backlog(LoopTurns(), 1, 50, scored=False)
    (choice,) = answer.choices
    choice.read(10)
    choice.finish = FinishReason.STOP
    answer.forsake()
    assert answer.usage().completion_tokens == 10
