"""What the routes of one API worker share.

Built once by the worker; nothing here is global. Knows nothing of any single request.
"""

from dataclasses import dataclass

from penstock.engine.client import EngineClient
from penstock.engine.messages import EngineInfo
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import EngineUnavailable, UnknownModel
from penstock.server.auth import KeyRing
from penstock.server.chat_template import ChatTemplate
from penstock.server.config import ServerConfig
from penstock.server.metrics import ServerMetrics
from penstock.server.open_answers import OpenAnswers
from penstock.server.readiness import Readiness


@dataclass(frozen=True, slots=True)
class ServerContext:
    config: ServerConfig
    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none and the operator gave none
    keys: KeyRing
    metrics: ServerMetrics
    answers: OpenAnswers
    readiness: Readiness
    created: int  # Unix time that /v1/models tells as the model's

    @property
    def served_names(self) -> list[str]:
        return [self.config.served_name]

    def check_model(self, name: str) -> None:
        if name not in self.served_names:
            raise UnknownModel(name, self.served_names)

    def engine_info(self) -> EngineInfo:
        """Return what the engine said of itself. Raises EngineUnavailable before it first was ready."""
        if self.engine.info is None:
            raise EngineUnavailable("the engine is starting; try again in a few seconds")
        return self.engine.info


def build_context(
    config: ServerConfig, engine: EngineClient, tokenizer: Tokenizer, template: ChatTemplate | None, created: int
) -> ServerContext:
    """Return a context with its own keys, metrics and books."""
    answers = OpenAnswers()
    return ServerContext(
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        keys=KeyRing(config.keys),
        metrics=ServerMetrics(engine),
        answers=answers,
        readiness=Readiness(engine, answers),
        created=created,
    )
