"""A runner whose model is a hash and whose KV pool is a list: it notices every wrong block, row and position.

The "KV" of a token is the token itself with its position. A slice may sample only if the blocks in its row's table hold
exactly the row's tokens at every position before: a block freed too early, shared wrongly or never written shows.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.engine.runner.interface import LaunchedStep, Runner, StepFailed
from penstock.engine.scheduler.step_plan import RowSlice, SliceResult, StepPlan, StepResult


def next_token(tokens: list[int], seed: int, vocab_size: int) -> int:
    """The fake model: every token depends on all before it and on the seed."""
    digest = hashlib.blake2b(struct.pack(f"<q{len(tokens)}I", seed, *tokens), digest_size=8).digest()
    return int.from_bytes(digest, "little") % vocab_size


def expected_tokens(prompt: list[int], seed: int, vocab_size: int, count: int) -> list[int]:
    """What the fake model gives when nothing else is in the batch."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, vocab_size))
    return tokens[len(prompt) :]


@dataclass
class FakeRow:
    tokens: dict[int, int] = field(default_factory=dict)  # by position
    seed: int = 0
    table: dict[int, int] = field(default_factory=dict)  # block index -> block
    broken: bool = False  # a step of it failed: what it holds is garbage until it gets a new owner


class FakeStep(LaunchedStep):
    def __init__(self, runner: "FakeRunner", plan: StepPlan) -> None:
        self._runner = runner
        self._plan = plan

    @property
    def is_done(self) -> bool:
        return True

    def wait(self) -> StepResult:
        return self._runner.results.pop(self._plan.number)()


class FakeRunner(Runner):
    """Runs a plan at launch, but only tells at `wait`, as a GPU would."""

    def __init__(self, num_rows: int, vocab_size: int = 97, block_tokens: int = 4) -> None:
        self.vocab_size = vocab_size
        self.block_tokens = block_tokens
        self.rows = [FakeRow() for _ in range(num_rows)]
        self.kv: dict[tuple[int, int], tuple[int, int]] = {}  # (block, offset) -> (position, token)
        self.host: dict[int, dict[int, tuple[int, int]]] = {}
        self.results: dict[int, object] = {}
        self.fail_at: set[int] = set()
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self.plans.append(plan)
        if plan.number in self.fail_at:
            self.results[plan.number] = self._raise
            for piece in plan.slices:
                self.rows[piece.row].broken = True
        else:
            result = StepResult(plan.number, self._run(plan), 0.001)
            self.results[plan.number] = lambda: result
        return FakeStep(self, plan)

    def read_blocks(self, blocks: Sequence[int]) -> list[bytes]:
        size = self.block_tokens
        return [b"".join(struct.pack("<qI", *self.kv[block, offset]) for offset in range(size)) for block in blocks]

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        for block, content in zip(blocks, contents, strict=True):
            for offset, held in enumerate(struct.iter_unpack("<qI", content)):
                self.kv[block, offset] = held

    def close(self) -> None:
        self.results.clear()

    def _raise(self) -> StepResult:
        raise StepFailed("injected")

    def _run(self, plan: StepPlan) -> list[SliceResult]:
        for block in plan.wipes:
            self.kv.update({(block, offset): (0, 0) for offset in range(self.block_tokens)})
        for copy in plan.tier_copies:
            if copy.to_host:
                self.host[copy.host_slot] = {offset: self.kv[copy.block, offset] for offset in range(self.block_tokens)}
            else:
                for offset, held in self.host[copy.host_slot].items():
                    self.kv[copy.block, offset] = held
        for start in plan.row_starts:
            self.rows[start.row] = FakeRow(dict(enumerate(start.token_ids)), start.seed)
        for change in plan.block_assignments:
            self.rows[change.row].table[change.index] = change.block
        rows = [piece.row for piece in plan.slices]
        assert len(rows) == len(set(rows)), "a row runs once per step"
        return [self._run_slice(piece) for piece in plan.slices]

    def _run_slice(self, piece: RowSlice) -> SliceResult:
        row = self.rows[piece.row]
        if row.broken:
            return SliceResult([0] * min(1, piece.num_samples))
        first_draft = piece.start + piece.num_tokens - len(piece.drafts)
        row.tokens.update({first_draft + i: token for i, token in enumerate(piece.drafts)})
        end = piece.start + piece.num_tokens
        for position in range(piece.start, end):
            block = row.table[position // self.block_tokens]
            assert block != 0, "the scratch block is nobody's"
            self.kv[block, position % self.block_tokens] = (position, row.tokens[position])
        if not piece.num_samples:
            return SliceResult([])
        accepted: list[int] = []
        for position in range(end - piece.num_samples, end):
            context = [row.tokens[p] for p in range(position + 1)]
            cached = [self.kv[row.table[p // self.block_tokens], p % self.block_tokens] for p in range(position + 1)]
            assert cached == list(enumerate(context)), "the cache does not hold this row's own past"
            token = next_token(context, row.seed, self.vocab_size)
            accepted.append(token)
            guess = row.tokens.get(position + 1) if position + 1 < end else None
            row.tokens[position + 1] = token
            if guess != token:
                break
        return SliceResult(accepted)
