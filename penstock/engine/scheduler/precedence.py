"""Who goes before whom: for a row, for prompt tokens, for a step.

A better level goes before a worse one. Within a level those go first whose promised first tokens would come late
otherwise, the one that is due first ahead; then the tenant that asks for least for its weight, unless it has got
`quantum` more than another that waits: then the one that got least. A tenant that waits takes a row of one that holds
more than its share, or leads it by `quantum`, or by ROW_QUANTUM where it also asks for more; and while a tenant's
prompt runs, those who ask for more than it leave it the step, until it has got `quantum` more than they. Changes
nothing.
"""

from collections.abc import Callable, Iterable, Sequence

from penstock.engine.scheduler.pace import Ready
from penstock.engine.scheduler.pledges import NOBODY, Pressed
from penstock.engine.scheduler.request_state import LevelKey, RequestState, TenantAccount
from penstock.engine.scheduler.tenant_account import ROW_QUANTUM

# A row pauses no longer than this between two tokens.
MAX_PAUSE_SECONDS = 0.25

# Whether a row with a promised time per token or deadline keeps it if it pauses for a step.
Patience = Callable[[RequestState], bool]
# Smaller goes first.
Precedence = tuple[LevelKey, int, bool, float, float, int, float, int]


class Order:
    """Whose prompt runs first: the tenant that asks for least, unless it leads, then the one that got least."""

    def __init__(
        self,
        requests: Iterable[RequestState],
        least_waiting: dict[LevelKey, float],
        quantum: float,
        pressed: Pressed = NOBODY,
    ) -> None:
        self._pressed = pressed
        self._quantum = quantum
        self._least = dict(least_waiting)
        for request in requests:
            counter = request.account.counter
            self._least[request.level] = min(counter, self._least.get(request.level, counter))

    def of(self, request: RequestState) -> Precedence:
        account = request.account
        leads = account.counter - self._least.get(request.level, account.counter) > self._quantum / account.weight
        # Who has just come starts with the counter of the one that runs: without more it would wait for a step of its.
        newest = -account.came_with
        place = self._pressed.place(request)
        return (request.level, place, leads, account.demand, account.counter, newest, request.due, request.number)


def displaced_by(request: RequestState, running: Sequence[RequestState], quantum: float) -> RequestState | None:
    """Return the running request that has to make room for `request`, None if none has."""
    if not running:
        return None
    worst = running[-1].level
    if worst > request.level:
        below = [other for other in running if other.level == worst and _yields(other, request)]
        return _youngest(below, max(_holders(below, worst), key=_counter)) if below else None
    if worst < request.level:
        return None
    own = request.account
    others = [account for account in _holders(running, worst) if account is not own]
    if not others:
        return None
    leader = max(others, key=_counter)
    # Where it asks for less than whoever waits, it would be next in line, and they would take a row from each other.
    asks_more = leader.exceeds(own.demand, own.num_open / own.weight)
    if leader.counter - own.counter > (min(quantum, ROW_QUANTUM) if asks_more else quantum) / leader.weight:
        return _youngest(running, leader)
    # A share of rows is no reason to break a promise; having got more than others is.
    open_rows = [other for other in running if other.targets.time_per_token_seconds is None]
    others = [account for account in _holders(open_rows, worst) if account is not own]
    if not others:
        return None
    richest = max(others, key=_share)
    share_after = (own.num_rows + 1) / own.weight
    if own.counter - richest.counter <= quantum / own.weight and share_after <= (richest.num_rows - 1) / richest.weight:
        return _youngest(open_rows, richest)
    return None


def num_below(request: RequestState, running: Sequence[RequestState]) -> int:
    """How many of those that run make room for `request` by their level alone."""
    return sum([other.level > request.level and _yields(other, request) for other in running])


def pressed_out_by(request: RequestState, running: Sequence[RequestState]) -> RequestState | None:
    """Return whose row a request takes that would come late otherwise: the last that was promised nothing."""
    free = [other for other in running if other.level >= request.level and not other.is_promised]
    return free[-1] if free else None


def _yields(running: RequestState, request: RequestState) -> bool:
    """Whether one that runs at a worse level makes room: not to its own tenant's that is above it by waiting alone."""
    level = (request.level[0], request.level[1] + request.num_rises)
    return running.tenant != request.tenant or running.level > level


def give_way(
    ready: Sequence[Ready], quantum: float, now: float, can_pause: Patience | None, pressed: Pressed = NOBODY
) -> Sequence[Ready]:
    """Return who runs in the next step: whoever asks for more than the tenant of the most urgent prompt pauses.

    So may all others where that prompt is pressed. A row with a promised time does if it `can_pause`.
    """
    prompts = [request for request, remaining in ready if remaining > 1]
    if not prompts:
        return ready
    best = min(prompts, key=Order(prompts, {}, quantum, pressed).of)
    pausing = {id(account) for account in _accounts(ready) if _owes(account, best, quantum)}
    if pressed.may_pause and best.number in pressed.places:
        pausing |= {id(account) for account in _accounts(ready)}
    staying = [item for item in ready if item[1] > 1 or not _pauses(item[0], best, pausing, now, can_pause)]
    return ready if len(staying) == len(ready) else staying


def is_left_to(first: RequestState, ready: Sequence[Ready], everybody: Sequence[Ready]) -> bool:
    """Whether of `everybody`'s rows those of other tenants pause for this prompt, all of them, and online ones do.

    Not where a row was promised a time per token: how long the step is was settled when that could pause.
    """
    rows = [request for request, remaining in everybody if remaining == 1]
    if any([request.targets.time_per_token_seconds is not None for request in rows]):
        return False
    if any([remaining == 1 and request.tenant != first.tenant for request, remaining in ready]):
        return False
    return any([request.tenant != first.tenant and not request.is_batch for request in rows])


def _accounts(ready: Sequence[Ready]) -> Iterable[TenantAccount]:
    return {id(request.account): request.account for request, _ in ready}.values()


def _owes(account: TenantAccount, best: RequestState, quantum: float) -> bool:
    first = best.account
    has_more = account.exceeds(first.demand, first.num_open / first.weight)
    return has_more and first.counter - account.counter <= quantum / first.weight


def _pauses(
    request: RequestState, best: RequestState, pausing: set[int], now: float, can_pause: Patience | None
) -> bool:
    if request.level < best.level or (request.level == best.level and id(request.account) not in pausing):
        return False
    has_terms = request.targets.time_per_token_seconds is not None or request.has_near_deadline
    if has_terms and (can_pause is None or not can_pause(request)):
        return False
    if request.last_token_at is None:
        # Its first token is under way, or else this is the last of its prompt's.
        return request.in_flight > 0
    return now - request.last_token_at < MAX_PAUSE_SECONDS


def _holders(running: Sequence[RequestState], level: LevelKey) -> Iterable[TenantAccount]:
    return {id(request.account): request.account for request in running if request.level == level}.values()


def _youngest(running: Sequence[RequestState], account: TenantAccount) -> RequestState:
    """The tenant's request that came last: it has been given least."""
    return next(request for request in reversed(running) if request.account is account)


def _counter(account: TenantAccount) -> float:
    return account.counter


def _share(account: TenantAccount) -> float:
    return account.share
