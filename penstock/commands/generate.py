"""`penstock generate`: one prompt continued in this process, without a server."""

import msgspec

from penstock.commands.models import fetch
from penstock.config import Sourced
from penstock.llm import LLM
from penstock.request import SamplingParams

_DEFAULT_TOKENS = 128


def run(sourced: Sourced, prompt: str, params: SamplingParams) -> int:
    """Print the prompt's continuation and nothing else, so that it can be piped on."""
    fetch(sourced.options)
    given = {name: getattr(sourced.options, name) for name in sourced.sources if name != "model"}
    with LLM(sourced.options.model, **given) as llm:
        if params.max_tokens is None:
            params = msgspec.structs.replace(params, max_tokens=_default_length(llm, prompt))
        (completion,) = llm.generate([prompt], params)
    print(completion.text)
    return 0


def _default_length(llm: LLM, prompt: str) -> int:
    room = llm.config.max_context_tokens - len(llm.tokenizer.encode(prompt, add_special=True))
    return min(_DEFAULT_TOKENS, max(1, room))
