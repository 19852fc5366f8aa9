"""Server-sent events as a strict client reads them."""

import json
from typing import Any


def events_in(body: bytes | str) -> list[Any]:
    """Return the events; the last is the string "[DONE]" where the stream ended well."""
    text = body.decode() if isinstance(body, bytes) else body
    assert text.endswith("\n\n"), "the stream was cut"
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: "), block
        assert "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def text_of(events: list[Any], index: int = 0) -> str:
    """Return the text that a stream of chat or completion chunks adds up to."""
    pieces = []
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            if choice["index"] == index:
                pieces.append(choice["text"] if "text" in choice else choice["delta"].get("content", ""))
    return "".join(pieces)
