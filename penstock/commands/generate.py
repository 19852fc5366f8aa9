"""`penstock generate`: one prompt continued in this process, without a server."""

import msgspec

from penstock.commands.models import fetch
from penstock.config import Sourced
from penstock.errors import ConfigError
from penstock.llm import LLM
from penstock.request import SamplingParams

_DEFAULT_TOKENS = 128


def run(sourced: Sourced, prompt: str, params: SamplingParams) -> int:
    """Print the prompt's continuation and nothing else, so that it can be piped on."""
    _require_text(prompt)
    fetch(sourced.options)
    given = {name: getattr(sourced.options, name) for name in sourced.sources if name != "model"}
    with LLM(sourced.options.model, **given) as llm:
        num_tokens = len(llm.tokenizer.encode(prompt, add_special=True))
        if not num_tokens:
            raise ConfigError("PROMPT", prompt, "give a text to continue, or - and the text on standard input")
        if params.max_tokens is None:
            room = llm.config.max_context_tokens - num_tokens
            params = msgspec.structs.replace(params, max_tokens=min(_DEFAULT_TOKENS, max(1, room)))
        (completion,) = llm.generate([prompt], params)
    print(completion.text)
    return 0


def _require_text(prompt: str) -> None:
    """Refuse bytes that are no UTF-8: Python has them stand as halves of surrogate pairs."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        place = len(prompt[: error.start].encode("utf-8", "surrogateescape"))
        beginning = prompt[:80].encode("utf-8", "surrogateescape")
        raise ConfigError("PROMPT", beginning, f"byte {place} is not UTF-8; convert the text to UTF-8 first") from None
