"""From what a caller sent to token ids that fit: template, tokenizer, vocabulary, context.

Long texts are tokenised in a thread, so that one caller's book does not hold up everyone's stream. Knows nothing of
HTTP.
"""

import asyncio

from penstock.engine.messages import EngineInfo
from penstock.errors import ContextTooLong, InvalidParameter, RequestError, TemplateFailed
from penstock.protocol.openai_chat import ChatMessage
from penstock.request import check_text_tokens, spoken_prompt
from penstock.server.answer import Prompt
from penstock.server.context import ServerContext

SHORTER = "give a shorter one"
_SHORT_TEXT_CHARACTERS = 4096  # cheaper to tokenise at once than to hand to a thread
# Tokens seldom have more characters. Of a text twice as long, for each token of the context, so much is tried first.
_TRIED_CHARACTERS_PER_TOKEN = 8


async def chat_prompt(context: ServerContext, messages: list[ChatMessage], info: EngineInfo) -> Prompt:
    """Render messages with the chat template and tokenise the result."""
    if context.template is None:
        message = "this model has no chat template; use /v1/completions, or start the server with --chat-template FILE"
        raise TemplateFailed(message, param="messages")
    text = await context.template.render([message.for_template() for message in messages])
    # The template writes its own special tokens.
    return await text_prompt(context, text, add_special=False, info=info, param="messages")


async def text_prompt(
    context: ServerContext, text: str, *, add_special: bool, info: EngineInfo, param: str = "prompt"
) -> Prompt:
    """Tokenise a text. One that cannot fit the context is refused before most of that is done."""
    if len(text) <= _SHORT_TEXT_CHARACTERS:
        return Prompt(context.tokenizer.encode(text, add_special=add_special), text)
    limit, what = info.max_context_tokens, spoken_prompt(param)
    if (fewest := context.tokenizer.fewest_tokens(text)) > limit:
        raise ContextTooLong(fewest, limit, what=what, param=param, at_least=True, right=SHORTER)
    num_tried = limit * _TRIED_CHARACTERS_PER_TOKEN
    if len(text) > 2 * num_tried:
        tried = await asyncio.to_thread(context.tokenizer.encode, text[:num_tried], add_special=False)
        # The last word may be cut, and another tokenised otherwise for it: four of five tokens are surely there.
        if (fewest := len(tried) * 4 // 5) > limit:
            raise ContextTooLong(fewest, limit, what=what, param=param, at_least=True, right=SHORTER)
    return Prompt(await asyncio.to_thread(context.tokenizer.encode, text, add_special=add_special), text)


def check_num_answers(num_prompts: int, num_choices: int, info: EngineInfo) -> None:
    """Raise when the engine could never hold all answers of a call at once."""
    num_answers, most = num_prompts * num_choices, info.max_open_requests
    if num_answers > most:
        param, value = ("n", num_choices) if num_prompts == 1 else ("prompt", f"{num_prompts} prompts")
        right = (
            f"this call needs {num_answers} answers, and at most {most} requests are open here at once; ask for fewer"
        )
        raise InvalidParameter(param, value, right)


def check_prompt(prompt: Prompt, info: EngineInfo, *, param: str) -> None:
    """Raise unless the engine can run the prompt and make at least one token."""
    if not prompt.token_ids:
        raise RequestError(f"{param} is empty; give at least one token", param=param)
    if prompt.text is None:
        wrong = next((item for item in prompt.token_ids if not 0 <= item < info.vocab_size), None)
        if wrong is not None:
            raise InvalidParameter(param, wrong, f"give token ids from 0 to {info.vocab_size - 1}")
    else:
        check_text_tokens(prompt.token_ids, info.vocab_size, param=param)
    if len(prompt.token_ids) >= info.max_context_tokens:
        what = spoken_prompt(param)
        raise ContextTooLong(len(prompt.token_ids), info.max_context_tokens, what=what, param=param)
