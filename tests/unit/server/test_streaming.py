"""The whole way from token events to events on the wire, over random texts, cuts and stop strings."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.server.conftest import running_service
from tests.unit.server.sse import events_in, text_of

TEXTS = st.text(st.sampled_from("abé漢🙂\n") | st.characters(codec="utf-8"), min_size=1, max_size=20)


@given(TEXTS, st.integers(1, 4), st.lists(st.text("abé🙂", min_size=1, max_size=3), max_size=2), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_a_stream_says_what_the_whole_answer_says(text, chunk, stops, num_choices):
    async def both():
        async with running_service() as service:
            service.engine.script = lambda request: service.engine.say(request, text, chunk=chunk)
            whole = await service.chat(stop=stops or None, n=num_choices)
            streamed = await service.chat(stop=stops or None, n=num_choices, stream=True)
            return whole.json(), events_in(streamed.content)

    whole, events = asyncio.run(both())
    assert events[-1] == "[DONE]"
    for choice in whole["choices"]:
        shown = choice["message"]["content"]
        assert text_of(events, choice["index"]) == shown
        assert not any(stop in shown for stop in stops)
        finishes = [
            event["choices"][0]["finish_reason"]
            for event in events[:-1]
            if event["choices"][0]["index"] == choice["index"]
        ]
        assert finishes == [None] * (len(finishes) - 1) + [choice["finish_reason"]]
