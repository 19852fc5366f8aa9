"""A batch beside an online load, in virtual time: those who wait for answers do not notice."""

from itertools import count

from penstock.config import gather
from penstock.engine.messages import Submit
from penstock.engine.simulated.profile import read_profile
from penstock.request import SamplingParams, Tier
from penstock.tools.bench.catalogue import named_workload
from penstock.tools.simulator.replica import VirtualReplica
from penstock.tools.simulator.server import configure
from tests.fakes.virtual_engine import percentile


class Load:
    """`rate10` on an H200 that always has so many batch requests at hand, to the end of the online ones."""

    def __init__(self, num_batch: int) -> None:
        server = configure(gather({}, environ={}), read_profile("h200-llama-8b"))
        self.replica = VirtualReplica(server, "replica-0")
        self.times: dict[str, list[float]] = {}
        self.num_batch_tokens = 0
        self._numbers = count()
        for _ in range(num_batch):
            self._submit_batch()

    def run(self) -> "Load":
        workload = named_workload("rate10")
        coming = list(enumerate(workload.requests))[::-1]
        num_open = len(coming)
        while num_open:
            now = self.replica.clock.now()
            while coming and (coming[-1][1].start_seconds <= now or not self.replica.has_work):
                index, planned = coming.pop()
                self.times[f"online{index}"] = []
                prompt = list(workload.token_ids(planned))
                self._submit(f"online{index}", prompt, planned.max_tokens, planned.start_seconds, Tier.ONLINE)
            for event in self.replica.step():
                if event.request_id in self.times:
                    self.times[event.request_id] += [self.replica.clock.now()] * len(event.token_ids)
                    num_open -= event.finish is not None
                    continue
                self.num_batch_tokens += len(event.token_ids)
                if event.finish is not None:
                    self._submit_batch()
        return self

    @property
    def time_per_token_p99(self) -> float:
        return percentile(((times[-1] - times[0]) / (len(times) - 1) for times in self.times.values()), 0.99)

    def _submit_batch(self) -> None:
        number = next(self._numbers)
        prompt = [(number * 7919 + index) % 5000 for index in range(512)]
        self._submit(f"batch{number}", prompt, 256, self.replica.clock.now(), Tier.BATCH)

    def _submit(self, name: str, prompt: list[int], max_tokens: int, moment: float, tier: Tier) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0, seed=1)
        submit = Submit(request_id=name, prompt=prompt, params=params, arrival=moment, tier=tier, tenant=tier.value)
        assert self.replica.submit(submit, moment) == []


def test_a_saturating_batch_leaves_online_requests_their_time_per_token():
    alone, beside = Load(0).run(), Load(256).run()
    assert beside.time_per_token_p99 <= 1.1 * alone.time_per_token_p99
    assert beside.num_batch_tokens > 1000, "the batch gets on meanwhile"
