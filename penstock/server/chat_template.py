"""From messages to the text of a prompt, through the model's chat template, with limits that hold.

The template runs in a process of its own (`server.template_process` says why), and long conversations in a second one,
so that short ones never wait for them. A process renders one prompt at a time, and tenants take turns at it. It is
started when first needed, killed when it breaks a limit, and started again for the next prompt. A prompt that finds it
dead is rendered by a new one. Knows nothing of tokens.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

from penstock.errors import TemplateFailed
from penstock.server.claim import Claim
from penstock.server.template_frames import HEAD_BYTES, MAX_FRAME_BYTES, decode_document, encode_frame, length_in
from penstock.server.tenant_lines import TenantLines

RENDER_SECONDS = 5.0
START_SECONDS = 30.0
MAX_PROMPT_CHARACTERS = 16 * 1024**2
# From here on a conversation is a long one, counting so much for each message beside its texts.
LONG_CHARACTERS = 32 * 1024
MESSAGE_CHARACTERS = 64

_MODULE = "penstock.server.template_process"

# What talking to a process that has ended raises.
_DIED = (asyncio.IncompleteReadError, ConnectionError)
_NOBODY = Claim("")  # whom the server's own prompts are rendered for


class ChatTemplate:
    """One template. `render` may be called from many tasks."""

    def __init__(
        self,
        text: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        render_seconds: float = RENDER_SECONDS,
        max_characters: int = MAX_PROMPT_CHARACTERS,
    ) -> None:
        setup = {
            "template": text,
            "variables": {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None},
            "max_characters": max_characters,
            "seconds": render_seconds + 1.0,
        }
        # Newer than most templates; those that do not know it call it system.
        self._knows_developer = "developer" in text
        self._short, self._long = (_Renderer(setup, render_seconds) for _ in range(2))

    async def start(self) -> None:
        """Start the process before it is needed. Raises TemplateFailed when the template does not compile."""
        await self._short.start()

    async def render(self, messages: list[dict[str, str]], claim: Claim = _NOBODY) -> str:
        """Return the prompt's text. Raises TemplateFailed, with the template's words, or as `TenantLines.run`."""
        if not self._knows_developer:
            messages = [_as_system(message) for message in messages]
        size = sum(sum(map(len, message.values())) + MESSAGE_CHARACTERS for message in messages)
        renderer = self._long if size > LONG_CHARACTERS else self._short
        return await renderer.render(messages, size, claim)

    async def close(self) -> None:
        await self._short.close()
        await self._long.close()


class _Renderer:
    """One process, the lines before it, and a thread for its long frames, which waits for nothing else."""

    def __init__(self, setup: dict[str, Any], render_seconds: float) -> None:
        self._setup = setup
        self._render_seconds = render_seconds
        self._lines = TenantLines()
        self._thread = ThreadPoolExecutor(1, "penstock-template")
        self._process: asyncio.subprocess.Process | None = None
        self._invalid: dict[str, Any] | None = None  # what the process said of a template that does not compile

    async def start(self) -> None:
        async def started() -> None:
            async with self._limits():
                await self._started()

        await self._lines.run(_NOBODY, 0, started)

    async def render(self, messages: list[dict[str, str]], size: int, claim: Claim) -> str:
        answer = await self._lines.run(claim, size, lambda: self._answer(messages, size))
        text = answer.get("text")
        if not isinstance(text, str):
            raise _failure(answer)
        if not text:
            raise _failure({"error": "it made an empty prompt of these messages"})
        return text

    async def _answer(self, messages: list[dict[str, str]], size: int) -> dict[str, Any]:
        document = {"messages": messages}
        async with self._limits():
            if size > LONG_CHARACTERS:
                encoded = asyncio.get_running_loop().run_in_executor(self._thread, encode_frame, document)
                return await self._insist(await encoded)
            return await self._insist(encode_frame(document))

    async def _insist(self, request: bytes) -> dict[str, Any]:
        """Return what the process says to a frame."""
        waited = self._process is not None
        try:
            return await self._ask(request)
        except _DIED:
            if not waited:
                raise
            # It may have been dead before this prompt. A fresh one that dies too is the template's doing.
            await self._kill()
            return await self._ask(request)

    async def _ask(self, request: bytes) -> dict[str, Any]:
        process = await self._started()
        async with asyncio.timeout(self._render_seconds):
            return await _exchange(process, request, self._thread)

    @contextlib.asynccontextmanager
    async def _limits(self) -> AsyncIterator[None]:
        """End the process when it breaks a limit, and say which."""
        try:
            yield
        except TimeoutError:
            await self._kill()
            seconds = f"{self._render_seconds:g} s"
            raise TemplateFailed(f"the chat template took longer than {seconds}", param="messages") from None
        except UnicodeEncodeError:  # before anything was sent
            reason = "a message holds half of a surrogate pair; give whole characters"
            raise TemplateFailed(reason, param="messages") from None
        except (*_DIED, ValueError):
            # Its own clock ends it where there is nobody to do so, or when it takes too long to compile.
            is_late = await self._kill() == -signal.SIGALRM
            reason = f"took longer than {self._setup['seconds']:g} s" if is_late else "broke its limits and was ended"
            raise TemplateFailed(f"the chat template {reason}", param="messages") from None
        except asyncio.CancelledError:
            await self._kill()  # or its answer would be taken for the next one's
            raise

    async def close(self) -> None:
        await self._lines.run(_NOBODY, 0, self._kill)
        self._thread.shutdown()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._invalid is not None:
            raise _failure(self._invalid)
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # signals meant for the server's group must not end it mid-way
            )
            async with asyncio.timeout(START_SECONDS):
                answer = await _exchange(self._process, encode_frame(self._setup), self._thread)
            if "error" in answer:
                self._invalid = answer
                await self._kill()
                raise _failure(answer)
        return self._process

    async def _kill(self) -> int | None:
        """End the process, if there is one, and return what it ended with."""
        process, self._process = self._process, None
        if process is None:
            return None
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # process.kill() would reap one that has ended, and whoever waits for it then reports a stranger.
                os.kill(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        process.stdin.close()
        return await process.wait()


def _as_system(message: dict[str, str]) -> dict[str, str]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


async def _exchange(process: asyncio.subprocess.Process, frame: bytes, thread: Executor) -> dict[str, Any]:
    """Send one frame and return the answer to it."""
    assert process.stdin is not None
    assert process.stdout is not None
    if process.stdin.is_closing():
        raise ConnectionResetError  # what uvloop calls a RuntimeError
    process.stdin.write(frame)
    await process.stdin.drain()
    length = length_in(await process.stdout.readexactly(HEAD_BYTES))
    if length > MAX_FRAME_BYTES:
        raise ConnectionError
    answer = await process.stdout.readexactly(length)
    if length > LONG_CHARACTERS:
        return await asyncio.get_running_loop().run_in_executor(thread, decode_document, answer)
    return decode_document(answer)


def _failure(answer: dict[str, Any]) -> TemplateFailed:
    return TemplateFailed(f"the chat template failed: {answer.get('error', 'no reason given')}", param="messages")
