"""`penstock serve --device simulated`: real processes, sockets, tokenizer and scheduler over a profile."""

import asyncio
import json
from pathlib import Path

import openai
import pytest

from penstock.config import gather
from penstock.engine.simulated.profile import read_profile
from penstock.tools.bench.serve_bench import ServeTarget, bench_serve
from penstock.tools.bench.shape import parse_shape
from penstock.tools.bench.summary import ServiceLevel
from penstock.tools.bench.workload import Workload
from penstock.tools.simulator.server import configure
from penstock.tools.simulator.simulation import simulate_run
from tests.fakes.tiny_tokenizer import write_tokenizer
from tests.server_process import TINY_CONFIG, ServerProcess, until, write_tiny_model

MODEL = "tiny"
QUESTION = [{"role": "user", "content": "hello world, tell me more"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / MODEL)
    write_tokenizer(folder)
    profile = ["--device", "simulated", "--simulated-profile", "h200-llama-8b@0.1"]
    with ServerProcess(str(folder), "--load-format", "dummy", *profile) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_engine_never_loads_torch(server):
    assert "libtorch" not in Path(f"/proc/{server.engine_pid}/maps").read_text()


def test_nor_does_one_whose_device_a_file_names(tmp_path):
    # By then an engine with torch has begun ahead.
    folder = write_tiny_model(tmp_path / MODEL)
    write_tokenizer(folder)
    file = tmp_path / "options.toml"
    file.write_text('device = "simulated"\n')
    with ServerProcess(str(folder), "--load-format", "dummy", "--config", str(file)) as server:
        server.wait_ready()
        (engine,) = server.children("penstock.engine.process")
        assert "libtorch" not in Path(f"/proc/{engine}/maps").read_text()


def test_a_stream_gives_the_same_text_as_a_whole_answer(client):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 24}
    whole = client.chat.completions.create(**asked, temperature=0)
    stream = client.chat.completions.create(**asked, temperature=0, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24


def test_a_seed_repeats_a_sample_and_choices_differ(client):
    def sample(n):
        answer = client.completions.create(model=MODEL, prompt="hello", seed=5, n=n, max_tokens=12)
        return [choice.text for choice in answer.choices]

    assert sample(1) == sample(1)
    assert len(set(sample(3))) == 3


def test_a_repeated_prompt_is_found_in_the_cache_and_answered_alike(client):
    answers = [
        client.completions.create(model=MODEL, prompt="hello world " * 30, temperature=0, max_tokens=8)
        for _ in range(2)
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].usage.prompt_tokens_details.cached_tokens == 0
    assert answers[1].usage.prompt_tokens_details.cached_tokens >= 64


def test_scores_of_an_echoed_prompt_are_well_formed(client):
    prompt = [5 + place % 500 for place in range(900)]
    answer = client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=2, max_tokens=3)
    scores = answer.choices[0].logprobs
    assert scores.token_logprobs[0] is None and all(score <= 0 for score in scores.token_logprobs[1:])
    assert {len(column) for column in scores.model_dump().values()} == {len(prompt) + 3}


def test_logprobs_are_well_formed(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=4, logprobs=True, top_logprobs=2
    )
    assert [len(token.top_logprobs) for token in answer.choices[0].logprobs.content] == [2] * 4
    assert all(token.logprob <= 0 for token in answer.choices[0].logprobs.content)


def test_the_metrics_count_what_was_simulated(server, client):
    before = server.metric("penstock_generated_tokens_total")
    client.completions.create(model=MODEL, prompt="hello", max_tokens=10)
    until(lambda: server.metric("penstock_generated_tokens_total") >= before + 10, 30, "counting ten tokens")


def test_virtual_and_real_time_agree(tmp_path):
    """The same load through a real server and in virtual time. Slowed down, so that the host's own time is small."""
    folder = tmp_path / "wide"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, "vocab_size": 16384}))
    profile = "h200-llama-8b@4"
    load = Workload(name="small", requests=parse_shape("10x256-512+12").requests()).at_rate(4)
    options = ["--device", "simulated", "--simulated-profile", profile, "--load-format", "dummy"]
    simulated = simulate_run(configure(gather({}, environ={}), read_profile(profile)), load, ServiceLevel())
    # The medians, which a busy machine moves little; beside them nothing here depends on how fast it is.
    expected = [
        pytest.approx(simulated.time_per_token_ms.p50, rel=0.25),
        pytest.approx(simulated.ttft_ms.p50, rel=0.35),
    ]
    rounds = []
    for _ in range(3):  # the best of three: the machine has other things to do
        with ServerProcess(str(folder), *options) as running:  # a new one, which has cached nothing
            target = ServeTarget(url=running.wait_ready().url)
            (served,) = asyncio.run(bench_serve(target, [load], ServiceLevel())).runs
        assert served.num_completed == simulated.num_completed == 10
        assert (served.input_tokens, served.output_tokens) == (simulated.input_tokens, simulated.output_tokens)
        rounds.append([served.time_per_token_ms.p50, served.ttft_ms.p50])
        if rounds[-1] == expected:
            break
    assert expected in rounds
