"""What the routes of one API worker share.

Built once by the worker; nothing here is global. Knows nothing of any single request.
"""

import asyncio
import contextlib
from dataclasses import dataclass, field

import msgspec

from penstock.engine.client import EngineClient
from penstock.engine.messages import EngineInfo
from penstock.engine.tokenizer import Tokenizer
from penstock.errors import EngineUnavailable, UnknownModel
from penstock.metering.tenancy import Tenancy
from penstock.protocol.generation import GenerationRequest
from penstock.protocol.wire import MAX_ENTRIES, most_entries
from penstock.request import Tier
from penstock.server.block_feed import BlockFeed
from penstock.server.chat_template import ChatTemplate
from penstock.server.config import ServerConfig
from penstock.server.loop_turns import LoopTurns
from penstock.server.metrics import ServerMetrics
from penstock.server.open_answers import OpenAnswers
from penstock.server.readiness import Readiness
from penstock.server.shared_prefixes import SharedPrefixes
from penstock.server.standstill import Standstill
from penstock.server.terms import Terms, agree, agree_on_batch
from penstock.server.text_work import TextWork
from penstock.store.database import Database
from penstock.tenants import Caller

# How long a request waits for an engine of which its worker has not heard yet: another may have, and have said so.
_MEETING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ServerContext:
    config: ServerConfig
    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None  # None: the model has none and the operator gave none
    texts: TextWork
    tenancy: Tenancy
    shared_prefixes: SharedPrefixes
    metrics: ServerMetrics
    answers: OpenAnswers
    readiness: Readiness
    standstill: Standstill
    blocks: BlockFeed
    created: int  # Unix time that /v1/models tells as the model's
    turns: LoopTurns = field(default_factory=LoopTurns)  # for answers that need much of the event loop
    new_batch: asyncio.Event = field(default_factory=asyncio.Event)  # set where this worker has taken one in

    @property
    def served_names(self) -> list[str]:
        return [self.config.served_name]

    def models_for(self, caller: Caller) -> list[str]:
        """Return the served models that a caller may use."""
        return [name for name in self.served_names if caller.may_use(name)]

    def check_model(self, name: str, caller: Caller) -> None:
        """Raise UnknownModel unless a caller may use it, by its own name or by that which a gateway has for it."""
        asked = caller.voucher.asked_model if caller.voucher is not None else name
        if name not in self.served_names or not (caller.may_use(name) or caller.may_use(asked)):
            raise UnknownModel(name, self.models_for(caller))

    def terms(self, wanted: GenerationRequest, caller: Caller, tier: Tier) -> Terms:
        """Agree on how soon and before whom a request is served."""
        if tier is Tier.BATCH:
            return agree_on_batch(wanted, caller.terms)
        return agree(wanted, caller.terms, self.config.targets)

    @property
    def max_entries(self) -> int:
        """How many entries the body of a request to the model may have."""
        return MAX_ENTRIES if self.engine.info is None else most_entries(self.engine.info.max_context_tokens)

    async def meet_engine(self, caller: Caller) -> EngineInfo:
        """Return what `engine_info` does, or will in a moment."""
        if not self.engine.connected and self.engine.info is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.engine.wait_ready(), _MEETING_SECONDS)
        return self.engine_info(caller)

    def engine_info(self, caller: Caller) -> EngineInfo:
        """Return what the engine said of itself, with the caller's longest context where that is shorter.

        Raises EngineUnavailable before the engine first was ready.
        """
        info, own = self.engine.info, caller.terms.limits.longest_context
        if info is None:
            raise EngineUnavailable("the engine is starting; try again in a few seconds")
        if own is None or own >= info.max_context_tokens:
            return info
        return msgspec.structs.replace(info, max_context_tokens=own)


def build_context(
    config: ServerConfig,
    engine: EngineClient,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    created: int,
    *,
    database: Database | None = None,
    shared_prefixes: SharedPrefixes | None = None,
) -> ServerContext:
    """Return a context with its own keys, metrics and books."""
    answers = OpenAnswers()
    metrics = ServerMetrics(engine)
    return ServerContext(
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        template=template,
        texts=TextWork(),
        tenancy=Tenancy(config, metrics, database),
        shared_prefixes=shared_prefixes if shared_prefixes is not None else SharedPrefixes([]),
        metrics=metrics,
        answers=answers,
        readiness=Readiness(engine, answers),
        standstill=Standstill(engine),
        blocks=BlockFeed(engine),
        created=created,
    )
