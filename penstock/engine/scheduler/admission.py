"""What a request that arrives now can expect, and whether that is what it asks for.

Foresees from the cost model, the pace and who stands before it. Changes nothing. Knows nothing of HTTP.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from penstock.engine.metrics import QuantileWindow
from penstock.engine.scheduler.answer_lengths import AnswerLengths
from penstock.engine.scheduler.comers import Comers, Passing
from penstock.engine.scheduler.cost_model import StepShape, with_prompt
from penstock.engine.scheduler.load import Claim, Load
from penstock.engine.scheduler.lookout import Lookout
from penstock.engine.scheduler.outlook import Demand, Outlook
from penstock.engine.scheduler.prompt_chunks import REST_PART
from penstock.engine.scheduler.prompt_work import PromptWork
from penstock.engine.scheduler.request_state import RequestState
from penstock.engine.scheduler.rows import expected_endings
from penstock.engine.scheduler.scene import Scene, scene_now
from penstock.engine.scheduler.serving_pace import ServingPace
from penstock.engine.scheduler.step_times import StepTimes
from penstock.errors import Overloaded, TargetUnreachable
from penstock.request import TargetOrigin

# Of a target, what a forecast may use: it errs, and a promise that was made is to be kept.
_TTFT_PART = 0.85
_TIME_PER_TOKEN_PART = 0.93
_DEADLINE_PART = 0.93
_LEAST_RETRY_SECONDS = 0.001
# Who comes back too early comes for nothing, so what is told is so much more than what is foreseen.
_RETRY_PART = 1.05
_FORESEEN_PART = 0.98  # and of the time that a forecast may use, what it may use of a later moment
_SHARED_RETRY_PART = 1.2  # where several tenants are there
# ... and while it is only guessed how long a step takes.
_LEAST_GUESSED_RETRY_SECONDS = 0.1
# What is named as the least to ask for: at least so much over what is needed, since the next forecast is not quite this
# one; and as much as this part of the steps stay below, within bounds, where they are less even.
_NAMED_PART = 1.05
_MOST_NAMED_PART = 1.5
_STEPS_PART = 0.9
# The way to an idle engine (reading, tokenising) takes so long, or this part of the prompt's own time; or as long as it
# took this part of the last that came to one. Where it takes longer something stalled, and the next may be luckier.
_WAY_SECONDS = 0.003
_WAY_PART = 0.1
_WAYS_PART = 0.95
_MOST_WAY_SECONDS = 0.05
_WAYS_WINDOW = 100
# Where a target stands that no request gave.
_SETTINGS: Mapping[tuple[TargetOrigin, str], str] = MappingProxyType(
    {
        (TargetOrigin.KEY, "targets.ttft_ms"): "the key's targets.ttft_seconds",
        (TargetOrigin.KEY, "targets.time_per_token_ms"): "the key's targets.time_per_token_seconds",
        (TargetOrigin.KEY, "deadline_ms"): "the key's targets.deadline_seconds",
        (TargetOrigin.SERVER, "targets.ttft_ms"): "the server's --target-ttft-ms",
        (TargetOrigin.SERVER, "targets.time_per_token_ms"): "the server's --target-time-per-token-ms",
        (TargetOrigin.SERVER, "deadline_ms"): "the server's --target-deadline-ms",
    }
)
# Who comes less than so many times while a request can be passed is not expected to.
_LIKELY_PART = 0.05
# However many come, no more of the device's time than this is expected to be theirs.
_MOST_PASSING_PART = 0.8
# Where no target says how soon a prompt is due: so many times as long as it would take alone.
_PATIENCE = 8.0


@dataclass(frozen=True, slots=True)
class Forecast:
    ttft_seconds: float
    token_seconds: float  # between its tokens, while nothing but decoding runs
    call_seconds: float  # behind its first token, until the last answer of its call begins
    answer_seconds: float  # behind its first token, until it can end at the soonest
    tightest_target: float | None  # the least time per token that was promised, its own included
    rows_after: int


class Admission:
    """Says yes, or no and when."""

    def __init__(self, times: StepTimes, pace: ServingPace, clock: Callable[[], float]) -> None:
        self._times = times
        self._pace = pace
        self._lookout = Lookout(times, pace)
        self._comers = Comers(clock)
        self._ways = QuantileWindow(_WAYS_WINDOW)  # of requests that came to an idle engine

    def due(self, arrival: float, num_prompt_tokens: int, ttft_seconds: float | None) -> float:
        """When a prompt must begin to run to be in time."""
        alone = self._alone_seconds(PromptWork.of_one(num_prompt_tokens))
        return arrival + (ttft_seconds - alone if ttft_seconds is not None else (_PATIENCE - 1.0) * alone)

    def forecast(self, request: RequestState, load: Load, now: float) -> Forecast:
        """Foresee the request's first token and its pace behind it."""
        forecast = self._forecast(request, load, scene_now(request, load, self._times, now))
        return replace(forecast, ttft_seconds=forecast.ttft_seconds + now - request.arrival)

    def _forecast(self, request: RequestState, load: Load, scene: Scene) -> Forecast:
        """Foresee what a request sees that comes into this scene."""
        ahead, num_decoding = scene.ahead, scene.decoding.num_rows
        call = load.call_shape(request)
        rows_after = num_decoding + math.ceil(ahead.requests) + call.num_rows
        mean_context = (scene.decoding.context_tokens + ahead.tokens + call.context_tokens) / rows_after
        targets = (scene.tightest_target, request.targets.time_per_token_seconds)
        tightest = min((target for target in targets if target is not None), default=None)
        # Those ahead decode beside the request once their prompts have run: half of them, on the mean.
        rows = num_decoding + int(ahead.requests / 2)
        shape = StepShape(rows, int(rows * mean_context))
        num_tokens = ahead.tokens + request.work.tokens
        # The mean over all tokens to run of what lies before them, as far as it is the call's own.
        context = int(request.work.tokens * request.work.context / num_tokens)
        # A request that is alone does not decode beside its own prompt: no time per token makes its steps shorter.
        paced_by = tightest if num_decoding or ahead.requests else None
        chunk, step_seconds = self._pace.steady_step(shape, paced_by, context)
        # Steps that run prompts are counted with those; until rows end, the others only decode.
        decode_seconds = self._times.model.seconds(shape)
        wait = scene.rest_seconds + self._wait_for_place(request, load, scene, decode_seconds)
        prefill = self._prefill_seconds(num_tokens, chunk, step_seconds, shape)
        if scene.has_prompts:
            prefill = math.ceil(num_tokens / max(1, chunk)) * step_seconds
        after = StepShape(rows_after, int(rows_after * mean_context))
        ttft = wait + prefill
        ttft += self._passed_seconds(request, load, ttft, step_seconds, chunk)
        answer = self._answer_seconds(request, load, after)
        call_seconds = self._call_seconds(request, load, after)
        if request.deadline_seconds is not None:
            num_steps = _answer_steps(request, load)
            answer = self._beside_prompts(answer, num_steps, after, scene, is_idle=not load.running)
        return Forecast(
            ttft_seconds=ttft,
            call_seconds=call_seconds,
            token_seconds=self._times.model.seconds(after),
            answer_seconds=answer,
            tightest_target=tightest,
            rows_after=rows_after,
        )

    def find_unreachable(self, request: RequestState, load: Load, now: float) -> TargetUnreachable | None:
        """Return what the request asks for that could not be promised even if nothing else were there."""
        if request.best_effort or request.has_moved or not self._times.model.is_trusted:
            return None
        named_part = self._named_part()
        ttft, time_per_token = request.targets.ttft_seconds, request.targets.time_per_token_seconds
        call = load.call_shape(request)
        if ttft is not None or request.deadline_seconds is not None:
            alone = self._alone_seconds(request.work)
            longest_way = max(self._way_seconds(), _WAY_PART * alone)
            need, enough = alone, alone + longest_way
            if self._times.has_rested_since(request.arrival):
                need += min(now - request.arrival, longest_way)
            rounds = self._call_seconds(request, load, call)
            if ttft is not None and need + rounds > ttft * _TTFT_PART:
                origin = request.target_origins.ttft
                return _unreachable("targets.ttft_ms", ttft, (enough + rounds) / _TTFT_PART * named_part, origin)
            answer = self._answer_seconds(request, load, call)
            wanted = request.deadline_seconds
            if wanted is not None and need + answer > _deadline_room(request):
                least = (enough + answer) / _DEADLINE_PART * named_part
                return _unreachable("deadline_ms", wanted, least, request.target_origins.deadline)
        if time_per_token is not None and not request.is_batch:
            least = self._times.model.seconds(call)
            if least > time_per_token * _TIME_PER_TOKEN_PART:
                named = least / _TIME_PER_TOKEN_PART * named_part
                origin = request.target_origins.time_per_token
                return _unreachable("targets.time_per_token_ms", time_per_token, named, origin)
        return None

    def note_arrival(self, request: RequestState, now: float) -> None:
        """A request has come: learn how long the way to an idle engine takes."""
        if self._times.has_rested_since(request.arrival):
            self._ways.add(now - request.arrival)

    def _way_seconds(self) -> float:
        way = self._ways.quantile(_WAYS_PART) or 0.0
        return min(_MOST_WAY_SECONDS, max(_WAY_SECONDS, way))

    def _named_part(self) -> float:
        part = self._times.ratios.quantile(_STEPS_PART) or 1.0
        return min(_MOST_NAMED_PART, max(_NAMED_PART, part))

    def check(self, request: RequestState, forecast: Forecast, part: float = 1.0) -> str | None:
        """Return which of the request's terms cannot be kept, if one cannot, in this part of the time there is."""
        if request.best_effort or not self._times.model.is_trusted:
            return None
        ttft, deadline = request.targets.ttft_seconds, _deadline_room(request)
        if ttft is not None and forecast.ttft_seconds + forecast.call_seconds > ttft * _TTFT_PART * part:
            return "ttft"
        if forecast.ttft_seconds + forecast.answer_seconds > deadline * part:
            return "deadline"
        return None if self.keeps_pace(request, forecast, part) else "time_per_token"

    def keeps_pace(self, request: RequestState, forecast: Forecast, part: float = 1.0) -> bool:
        """Whether all keep their time per token with the request beside them, and it its own."""
        tightest = forecast.tightest_target
        if tightest is None or request.is_batch or not self._times.model.is_trusted:
            return True
        return forecast.token_seconds <= tightest * _TIME_PER_TOKEN_PART * part

    def refusal(self, reason: str, request: RequestState, forecast: Forecast, load: Load, now: float) -> Overloaded:
        """Say no, and when the forecast would be a yes."""
        way = now - request.arrival
        if self._is_late_by_way(request, forecast, load, now):
            wait = max(0.0, self._times.free_at(now) - now)
            message = f"the request was {way * 1000:.0f} ms on its way to the engine, too long for what it asks for"
        else:
            wait = self._wait(request, load, now)
            message = _refusal_message(reason, request, forecast, way + wait)
        message += "; try again after the time in Retry-After"
        if reason != "deadline":  # behind which nothing comes
            message += ", or accept a late answer with best_effort"
        return Overloaded(message, retry_after_seconds=max(_LEAST_RETRY_SECONDS, wait))

    def full_queue_seconds(self, request: RequestState, load: Load, num_endings: int, now: float) -> float:
        """How long until there is a place for the request and its terms could be kept, if nobody else came."""
        seconds = self.place_seconds(load, num_endings, now)
        if not self._times.model.is_trusted:
            return seconds
        seconds *= _RETRY_PART
        forecast = self.forecast(request, load, now)
        reason = None if request.has_moved else self.check(request, forecast)
        if reason is None:
            return seconds
        return max(seconds, self.refusal(reason, request, forecast, load, now).retry_after_seconds)

    def _is_late_by_way(self, request: RequestState, forecast: Forecast, load: Load, now: float) -> bool:
        """Whether the same request would be in time if it came now."""
        way = now - request.arrival
        if self.check(request, replace(forecast, ttft_seconds=forecast.ttft_seconds - way), _FORESEEN_PART) is not None:
            return False
        # One that comes now is less urgent: others of its tenant may go before it.
        fresh = replace(request, arrival=now, due=request.due + way)
        return self._fits_into(fresh, load, scene_now(fresh, load, self._times, now))

    def queue_seconds(self, load: Load, now: float) -> float:
        """How long until all online prompts that are there now have run: what comes next waits so long."""
        decoding = [other for other in load.running if other.remaining <= 1]
        waiting = [other for other in load.waiting if not other.is_batch]
        num_tokens = sum([other.remaining for other in load.running if other.remaining > 1 and not other.is_batch])
        num_tokens += sum([other.queued_tokens for other in waiting])
        seconds = max(0.0, self._times.free_at(now) - now)
        if not num_tokens:
            return seconds
        targets = [other.targets.time_per_token_seconds for other in decoding]
        tightest = min((target for target in targets if target is not None), default=None)
        shape = StepShape(len(decoding), sum([other.computed for other in decoding]))
        chunk, step_seconds = self._pace.steady_step(shape, tightest)
        seconds += self._prefill_seconds(num_tokens, chunk, step_seconds, shape)
        num_endings = len(waiting) - load.num_free_rows
        return max(seconds, self.place_seconds(load, num_endings, now)) if num_endings > 0 else seconds

    def place_seconds(self, load: Load, num_endings: int, now: float) -> float:
        """How long until so many requests have ended: a place in a full queue is free only then."""
        starting = [*load.rows.prompts, *itertools.islice(load.waiting, load.num_free_rows)]
        shape = load.rows.drawing_shape
        chunk, step_seconds = self._pace.steady_step(shape, None)
        prompt_tokens = sum([other.remaining for other in starting])
        prompt_steps = prompt_tokens / max(1, chunk)
        endings = [*load.rows.drawing_endings.steps]
        endings += [prompt_steps + steps for steps, *_ in expected_endings(starting, load.lengths)]
        endings.sort()
        steps = _steps_until(num_endings, endings, load.lengths.mean_tokens)
        seconds = max(0.0, self._times.free_at(now) - now) + min(steps, prompt_steps) * step_seconds
        if steps > prompt_steps:
            rows = shape.num_rows + len(starting)
            after = StepShape(rows, shape.context_tokens + prompt_tokens)
            seconds += (steps - prompt_steps) * self._times.model.seconds(after)
        least = _LEAST_RETRY_SECONDS if self._times.model.is_trusted else _LEAST_GUESSED_RETRY_SECONDS
        return max(least, seconds)

    def _answer_seconds(self, request: RequestState, load: Load, shape: StepShape) -> float:
        """How long behind its first token a call ends at the soonest, in steps of this shape and growing context.

        Where it has more answers than there is room for, they run one after another.
        """
        context = shape.context_tokens + load.call_shape(request).num_rows * (request.fewest_left - 1) // 2
        return _answer_steps(request, load) * self._times.model.seconds(StepShape(shape.num_rows, context))

    def _call_seconds(self, request: RequestState, load: Load, shape: StepShape) -> float:
        """How long behind its first token the last answer of a call begins where not all have room at once.

        In steps of this shape, and as if those before it drew all that they may.
        """
        if load.call_shape(request).num_rows >= request.call_answers:
            return 0.0
        most = load.lengths.most_left(request)
        context = shape.context_tokens + shape.num_rows * most // 2
        num_rounds = load.num_rounds(request) - 1
        return num_rounds * most * self._times.model.seconds(StepShape(shape.num_rows, context))

    def _passed_seconds(self, request: RequestState, load: Load, ttft: float, step_seconds: float, chunk: int) -> float:
        """How much later than this a first token comes by who comes until then, and would pass it."""
        alone, token_seconds = self._alone_seconds(request.work), step_seconds / max(1, chunk)
        passers = self._comers.passers(Claim.of(request, load), load.waiting.quantum)
        seconds = ttft - min(step_seconds, alone)  # in its last step nobody does
        # Beside nobody a prompt runs at once: only who is above it would interrupt it.
        return _delay(seconds, passers.above if ttft <= alone else passers.anyone, token_seconds)

    def _beside_prompts(
        self, seconds: float, num_steps: int, shape: StepShape, scene: Scene, *, is_idle: bool
    ) -> float:
        """How long so many steps take that would take `seconds` without prompts: some hold those of others."""
        if not num_steps:
            return seconds
        chunk, step_seconds = self._pace.steady_step(shape, scene.tightest_target)
        chunk = max(1, chunk)
        longer = max(0.0, step_seconds - seconds / num_steps)
        # Those that wait, and those that come meanwhile as lately.
        added = scene.tokens_behind / chunk * longer
        rate = 0.0 if is_idle else self._comers.rate()
        part = min(_MOST_PASSING_PART, rate / chunk * longer)
        return min(num_steps * step_seconds, (seconds + added) / (1.0 - part))

    def note_taken(self, request: RequestState, lengths: AnswerLengths) -> None:
        """A request was let in: whoever is refused from now on waits for it too."""
        self._comers.note(request)
        self._lookout.add(request, lengths.expected_left(request))

    def _wait(self, request: RequestState, load: Load, now: float) -> float:
        """How long until all of the request's terms could be kept, if nobody else came."""
        above = self._comers.passers(Claim.of(request, load), load.waiting.quantum).above
        forgotten = max(0.0, above.forgotten_at + _LEAST_RETRY_SECONDS - now)
        outlook = self._lookout.look(request.level[0], load, now)
        moments = outlook.moments
        if not moments:
            return forgotten
        demand, past = _demand(request), outlook.num_past(now)
        index = outlook.known_moment(request.tenant, demand, past)
        if index is None:
            index = self._find_moment(request, load, outlook, past)
            outlook.note_moment(request.tenant, demand, index)
        step_seconds = max([moment.rest_seconds for moment in moments[max(0, index - 1) : index + 1]])
        part = _SHARED_RETRY_PART if outlook.is_shared else _RETRY_PART
        seconds = outlook.seconds_until(index, part, now) + step_seconds
        if index == len(moments) - 1 and forgotten > seconds:
            scene = outlook.scene(index, request.level, load)
            return seconds if self._fits_into(request, load, scene) else forgotten
        return seconds

    def _find_moment(self, request: RequestState, load: Load, outlook: Outlook, past: int) -> int:
        """Return from which moment on the request's terms could be kept: the last one where no other is found."""
        moments = outlook.moments
        # Others may be done sooner than is foreseen: then it must be in time behind them too.
        fits_behind = self._fits(request, load, outlook.behind.scene(request.level, load))

        @cache
        def fits(index: int) -> bool:
            may_fit = fits_behind or moments[index].is_behind
            return may_fit and self._fits_into(request, load, outlook.scene(index, request.level, load))

        def stays(index: int) -> bool:
            return fits(index) and fits(index + 1)  # not only for a moment

        # Halving finds one where it stays and did not before; where there are several, perhaps not the first.
        return bisect_left(range(len(moments) - 1), True, lo=past, key=stays)

    def _fits_into(self, request: RequestState, load: Load, scene: Scene) -> bool:
        # Whether rows will draw tokens beside it or pause for it is not foreseen.
        paused = replace(scene, decoding=StepShape(), tightest_target=None)
        return self._fits(request, load, scene) and self._fits(request, load, paused)

    def _fits(self, request: RequestState, load: Load, scene: Scene) -> bool:
        return self.check(request, self._forecast(request, load, scene), _FORESEEN_PART) is None

    def _alone_seconds(self, work: PromptWork) -> float:
        chunk, seconds = self._pace.steady_step(StepShape(), None, work.context)
        return self._prefill_seconds(work.tokens, chunk, seconds, StepShape())

    def _prefill_seconds(self, num_tokens: float, chunk: int, step_seconds: float, shape: StepShape) -> float:
        """How long so many prompt tokens take, `chunk` of them in each step."""
        chunk = max(1, chunk)
        full_steps, rest = divmod(max(1, math.ceil(num_tokens)), chunk)
        seconds = self._times.model.seconds
        last = seconds(with_prompt(shape, rest, 0)) if rest else 0.0
        if full_steps and rest <= chunk * REST_PART:
            # It runs with the tokens before it, see `PromptChunks`.
            last = seconds(with_prompt(shape, chunk + rest, 0)) - seconds(with_prompt(shape, chunk, 0))
        return full_steps * step_seconds + last

    def _wait_for_place(self, request: RequestState, load: Load, scene: Scene, step_seconds: float) -> float:
        """How long until requests have ended that hold the rows and blocks which those ahead and this one need."""
        ahead, mean = scene.ahead, load.lengths.mean_tokens
        num_waiting = ahead.requests - ahead.placed_requests
        num_rows = load.call_shape(request).num_rows
        rows_short = math.ceil(num_waiting) + num_rows - scene.num_free_rows
        own = load.wanted_tokens(request, num_rows)
        wanted = ahead.tokens - ahead.placed_tokens + mean * num_waiting + own
        blocks_short = wanted / load.block_tokens - scene.num_free_blocks
        if (rows_short <= 0 and blocks_short <= 0) or scene.may_displace(max(1, min(num_rows, rows_short))):
            return 0.0
        endings = scene.endings()
        steps = endings.until(rows_short, blocks_short)
        if steps is not None:
            return steps * step_seconds
        # Those ahead must end too before it is this one's turn.
        steps = endings.steps[-1] if endings.steps else 0.0
        rows_short -= len(endings.steps)
        mean_left = scene.mean_waiting_answer() or mean
        most_rows = len(load.running) + load.num_free_rows
        return (steps + max(rows_short, 1) * mean_left / max(1, most_rows)) * step_seconds


def _delay(seconds: float, passing: Passing, token_seconds: float) -> float:
    """How much longer than this what may be passed takes by who passes it."""
    if seconds <= 0.0:
        return 0.0
    part = min(_MOST_PASSING_PART, passing.rate * token_seconds)
    longer = seconds * part / (1.0 - part)
    if passing.rate * seconds >= _LIKELY_PART * passing.prompt_tokens:
        # They have their part of the device's time; but it is whole prompts that come.
        longer = max(longer, min(seconds, passing.prompt_tokens * token_seconds))
    return min(longer, passing.most_tokens * token_seconds)


def _demand(request: RequestState) -> Demand:
    """What of a request decides when it could be let in."""
    times = (request.targets.ttft_seconds, request.targets.time_per_token_seconds, request.deadline_seconds)
    return (
        request.level[1],
        len(request.tokens),
        request.work.tokens,
        request.work.context,
        request.call_answers,
        request.max_total_tokens,
        request.fewest_left,
        *[-math.inf if seconds is None else -seconds for seconds in times],
    )


def _answer_steps(request: RequestState, load: Load) -> int:
    """Steps behind the first token until a call can end at the soonest."""
    return load.num_rounds(request) * request.fewest_left - 1


def _deadline_room(request: RequestState) -> float:
    """How long after its arrival a forecast may let the request end."""
    return math.inf if request.deadline_seconds is None else request.deadline_seconds * _DEADLINE_PART


def _refusal_message(reason: str, request: RequestState, forecast: Forecast, later_seconds: float) -> str:
    """Say what would be late. Whoever comes `later_seconds` after the request is in time, and it would be no later."""
    if reason == "time_per_token":
        return "the batch is as large as the time per token that was promised allows"
    if reason == "ttft":
        last_seconds = forecast.ttft_seconds + forecast.call_seconds
        seconds = min(last_seconds, later_seconds + (request.targets.ttft_seconds or 0.0))
        return f"the first token would come after {seconds * 1000:.0f} ms, later than asked for"
    seconds = min(forecast.ttft_seconds + forecast.answer_seconds, later_seconds + (request.deadline_seconds or 0.0))
    return f"the answer would end after {seconds * 1000:.0f} ms at the soonest, later than its deadline"


def _unreachable(
    param: str, wanted_seconds: float, least_seconds: float, origin: TargetOrigin = TargetOrigin.REQUEST
) -> TargetUnreachable:
    stated, advice = param, "give"
    if origin is not TargetOrigin.REQUEST:
        stated, advice = _SETTINGS[origin, param], f"give {param} of"
    return TargetUnreachable(
        f"{stated}: {wanted_seconds * 1000:g} ms cannot be kept here, even if nothing else ran; "
        f"{advice} at least {_named_milliseconds(least_seconds)}{'' if param == 'deadline_ms' else ', or best_effort'}",
        param=param if origin is TargetOrigin.REQUEST else None,
    )


def _named_milliseconds(seconds: float) -> str:
    """A short number that is over this many seconds."""
    milliseconds = seconds * 1000
    return f"{math.ceil(milliseconds)}" if milliseconds >= 10.0 else f"{math.ceil(milliseconds * 10) / 10:g}"


def _steps_until(num_endings: int, endings: Sequence[float], mean_tokens: float) -> float:
    """In how many steps so many have ended; those that take the rows of the first of them run as long as these."""
    if not endings:
        return 1.0
    num_rounds, rest = divmod(max(1, num_endings) - 1, len(endings))
    return endings[rest] + num_rounds * max(endings[-1], mean_tokens)
