"""A chat template rendered where it is called: the same renderer, without the process and its start-up time."""

from penstock.server.claim import Claim
from penstock.server.template_process import TemplateRenderer


class InProcessTemplate:
    def __init__(self, text: str) -> None:
        self._renderer = TemplateRenderer(text, {}, 1_000_000)

    async def render(self, messages: list[dict[str, str]], claim: Claim | None = None) -> str:
        return self._renderer.render(messages)

    async def close(self) -> None:
        pass
