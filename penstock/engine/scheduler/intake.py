"""What is wrong with a submitted request, if anything. Knows nothing of what else runs."""

from penstock.engine.messages import Submit
from penstock.errors import ContextTooLong, InvalidParameter
from penstock.request import MAX_PRIORITY, spoken_prompt
from penstock.tenants import check_weight


def check_submit(submit: Submit, *, max_context_tokens: int, vocab_size: int, prompt: str = "prompt") -> None:
    """Raise a RequestError for the first thing that the engine cannot run. `prompt` is the prompt's name in it."""
    num_prompt = len(submit.prompt)
    if num_prompt == 0:
        raise InvalidParameter(prompt, [], "give at least one token")
    # The last token of an answer is drawn and never run: where it is the only one, the prompt may fill the context.
    if num_prompt > max_context_tokens - (submit.params.max_tokens != 1):
        raise ContextTooLong(num_prompt, max_context_tokens, what=spoken_prompt(prompt), param=prompt)
    submit.params.validate(vocab_size)
    for token_id in (max(submit.prompt), min(submit.prompt)):
        if not 0 <= token_id < vocab_size:
            raise InvalidParameter(prompt, token_id, f"give token ids from 0 to {vocab_size - 1}")
    if not 0 <= submit.num_answer_tokens < num_prompt:
        raise InvalidParameter("num_answer_tokens", submit.num_answer_tokens, "leave at least one prompt token")
    if not -MAX_PRIORITY <= submit.priority <= MAX_PRIORITY:
        right = f"give an integer from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        raise InvalidParameter("priority", submit.priority, right)
    check_weight(submit.weight)
