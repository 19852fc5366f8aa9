"""`penstock generate`: one prompt continued in this process, without a server."""

from penstock.commands.models import fetch
from penstock.config import Sourced
from penstock.llm import LLM
from penstock.request import SamplingParams


def run(sourced: Sourced, prompt: str, params: SamplingParams) -> int:
    """Print the prompt's continuation and nothing else, so that it can be piped on."""
    fetch(sourced.options)
    given = {name: getattr(sourced.options, name) for name in sourced.sources if name != "model"}
    with LLM(sourced.options.model, **given) as llm:
        (completion,) = llm.generate([prompt], params)
    print(completion.text)
    return 0
