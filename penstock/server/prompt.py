"""From what a caller sent to token ids that fit: template, tokenizer, vocabulary, context.

Long texts are tokenised in a thread, so that one caller's book does not hold up everyone's stream, and tenants take
turns at it. Knows nothing of HTTP.
"""

from collections.abc import Sequence
from functools import partial

from penstock.engine.messages import EngineInfo
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import ContextTooLong, InvalidParameter, RequestError, TemplateFailed
from penstock.protocol.openai_chat import ChatMessage
from penstock.request import check_text_tokens, prompt_names, spoken_prompt
from penstock.server.answer import Prompt
from penstock.server.chat_template import MESSAGE_CHARACTERS
from penstock.server.claim import Claim
from penstock.server.context import ServerContext

SHORTER = "give a shorter one"
_SHORT_TEXT_CHARACTERS = 4096  # cheaper to tokenise at once than to hand to a thread
_FEW_MESSAGES = 256  # likewise
# Of a text twice as long, for each token of the context, so much is tried first: digits have one character to a token,
# and tokens seldom have more than eight.
_TRIED_CHARACTERS_PER_TOKEN = (2, 8)
# What a prompt likely has, and seldom more, before it is tokenised.
_LIKELY_CHARACTERS_PER_TOKEN = 2
_LIKELY_MESSAGE_TOKENS = 8


def likely_tokens(prompts: Sequence[str | list[int] | ChatMessage]) -> int:
    """Return about how many tokens texts and messages will have, rather too many; of token ids how many they are."""
    return sum(_likely_tokens(prompt) for prompt in prompts)


def fewest_tokens(tokenizer: Tokenizer, prompts: Sequence[str | list[int]]) -> int:
    """Return how many tokens prompts have for certain: all of token ids, of texts what longer tokens would leave."""
    return sum(
        max(1, tokenizer.fewest_tokens(prompt)) if isinstance(prompt, str) else len(prompt) for prompt in prompts
    )


def _likely_tokens(prompt: str | list[int] | ChatMessage) -> int:
    if isinstance(prompt, list):
        return len(prompt)
    if isinstance(prompt, str):
        return 1 + len(prompt) // _LIKELY_CHARACTERS_PER_TOKEN
    return _LIKELY_MESSAGE_TOKENS + prompt.num_characters // _LIKELY_CHARACTERS_PER_TOKEN


async def chat_prompt(context: ServerContext, messages: list[ChatMessage], info: EngineInfo, claim: Claim) -> Prompt:
    """Render messages with the chat template and tokenise the result."""
    if context.template is None:
        message = "this model has no chat template; use /v1/completions, or start the server with --chat-template FILE"
        raise TemplateFailed(message, param="messages")
    plain = partial(_for_template, messages)
    few = len(messages) <= _FEW_MESSAGES
    documents = plain() if few else await context.texts.run(claim, len(messages) * MESSAGE_CHARACTERS, plain)
    text = await context.template.render(documents, claim)
    # The template writes its own special tokens.
    return await text_prompt(context, text, add_special=False, info=info, claim=claim, param="messages")


def _for_template(messages: list[ChatMessage]) -> list[dict[str, str]]:
    return [message.for_template() for message in messages]


async def text_prompts(
    context: ServerContext, prompts: list[str | list[int]], info: EngineInfo, claim: Claim, *, with_answer: bool = True
) -> list[Prompt]:
    """Tokenise those prompts that are texts. Raises where one does not fit."""
    found, num_before = [], 0
    for name, prompt in zip(prompt_names(len(prompts)), prompts, strict=True):
        if isinstance(prompt, str):
            made = await text_prompt(
                context, prompt, add_special=True, info=info, claim=claim, param=name, num_before=num_before
            )
            num_before += len(prompt)
        else:
            made = Prompt(prompt)
        check_prompt(made, info, param=name, with_answer=with_answer)
        found.append(made)
    return found


async def text_prompt(
    context: ServerContext,
    text: str,
    *,
    add_special: bool,
    info: EngineInfo,
    claim: Claim,
    param: str = "prompt",
    num_before: int = 0,
) -> Prompt:
    """Tokenise a text. One that cannot fit the context is refused before most of that is done.

    `num_before` characters of the same request have been tokenised: many short texts are as long as one.
    """
    if num_before + len(text) <= _SHORT_TEXT_CHARACTERS:
        return Prompt(context.tokenizer.encode(text, add_special=add_special), text)

    def tokenised() -> list[int]:
        _check_length(context.tokenizer, text, info.max_context_tokens, param)
        return context.tokenizer.encode(text, add_special=add_special)

    return Prompt(await context.texts.run(claim, len(text), tokenised), text)


def _check_length(tokenizer: Tokenizer, text: str, limit: int, param: str) -> None:
    """Raise for a text that cannot fit, as soon as that is known."""
    what = spoken_prompt(param)
    if (fewest := tokenizer.fewest_tokens(text)) > limit:
        raise ContextTooLong(fewest, limit, what=what, param=param, at_least=True, right=SHORTER)
    for per_token in _TRIED_CHARACTERS_PER_TOKEN:
        num_tried = limit * per_token
        if len(text) <= 2 * num_tried:
            return
        tried = tokenizer.encode(text[:num_tried], add_special=False)
        # The last word may be cut, and another tokenised otherwise for it: four of five tokens are surely there.
        if (fewest := len(tried) * 4 // 5) > limit:
            raise ContextTooLong(fewest, limit, what=what, param=param, at_least=True, right=SHORTER)


def check_num_answers(num_prompts: int, num_choices: int, info: EngineInfo) -> None:
    """Raise when the engine could never hold all answers of a call at once."""
    num_answers, most = num_prompts * num_choices, info.max_open_requests
    if num_answers > most:
        param, value = ("n", num_choices) if num_prompts == 1 else ("prompt", f"{num_prompts} prompts")
        right = (
            f"this call needs {num_answers} answers, and at most {most} requests are open here at once; ask for fewer"
        )
        raise InvalidParameter(param, value, right)


def check_prompt(prompt: Prompt, info: EngineInfo, *, param: str, with_answer: bool = True) -> None:
    """Raise unless the engine can run the prompt and, for an answer, make at least one token."""
    if not prompt.token_ids:
        raise RequestError(f"{param} is empty; give at least one token", param=param)
    if prompt.text is None:
        wrong = next((item for item in prompt.token_ids if not 0 <= item < info.vocab_size), None)
        if wrong is not None:
            raise InvalidParameter(param, wrong, f"give token ids from 0 to {info.vocab_size - 1}")
    else:
        check_text_tokens(prompt.token_ids, info.vocab_size, param=param)
    num_tokens, longest, what = len(prompt.token_ids), info.max_context_tokens, spoken_prompt(param)
    if num_tokens > longest:
        raise ContextTooLong(num_tokens, longest, what=what, param=param, right=SHORTER)
    if with_answer and num_tokens == longest:
        raise ContextTooLong(num_tokens, longest, what=what, param=param)
