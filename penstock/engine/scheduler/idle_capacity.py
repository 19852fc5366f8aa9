"""How much batch work fits beside online requests without making them wait. Changes nothing."""

from collections.abc import Sequence

from penstock.engine.scheduler.cost_model import StepShape, with_prompt
from penstock.engine.scheduler.foresight import Foresight
from penstock.engine.scheduler.pace import Ready
from penstock.engine.scheduler.serving_pace import decode_shape


def hold_back_batch(ready: Sequence[Ready], budget: int, foresight: Foresight) -> Sequence[Ready]:
    """Return who may run, best first: all online requests, and as much batch work as hardly lengthens the step."""
    online = [(request, remaining) for request, remaining in ready if not request.is_batch]
    if not online:
        return ready
    shape = decode_shape(online)
    prompts = sum([remaining for _, remaining in online if remaining > 1])
    shape = with_prompt(shape, max(0, min(prompts, budget - shape.num_rows)), 0)
    most = foresight.pace.batch_allowance(shape)
    costs = foresight.model.costs
    for request, remaining in ready[len(online) :]:
        if remaining == 1:
            wider = StepShape(
                shape.num_rows + 1,
                shape.context_tokens + request.computed + 1,
                shape.prompt_tokens,
                shape.prompt_pairs,
            )
            num_tokens = int(costs.seconds(wider) <= most and wider.num_tokens <= budget)
        else:
            room = min(remaining, budget - shape.num_tokens)
            num_tokens = costs.prompt_tokens_within(most, shape, request.computed, room)
            num_tokens = 0 if num_tokens == 1 else num_tokens  # one token is what a decoding request runs
            wider = with_prompt(shape, num_tokens, request.computed)
        if num_tokens:
            shape = wider
            online.append((request, num_tokens))
    return online
