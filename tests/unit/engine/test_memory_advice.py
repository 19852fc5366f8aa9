"""What a refusal offers makes the model fit, whatever its shape, the options and the memory."""

import dataclasses
import random
import re

import pytest

from penstock.config import gather
from penstock.engine.config import DeviceFacts, EngineConfig, kv_token_bytes, resolve
from penstock.errors import ConfigError
from penstock.models.spec import LayerSpec, ModelSpec, QuantisedSpec, RopeSpec

MIB, GIB = 2**20, 2**30
DTYPES = ("bfloat16", "float16", "float32")
HOST = DeviceFacts(
    kind="cpu",
    name="a host",
    num_threads=4,
    free_bytes=8 * GIB,
    fast_dtypes=("float32",),
    attention_backends={name: ("reference",) for name in DTYPES},
)
SMALL = ModelSpec(
    family="llama",
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    max_position=8192,
    norm_eps=1e-5,
    layers=(LayerSpec(),) * 16,
    ropes=(RopeSpec(theta=10000.0, rotary_dim=64),),
)


def config_of(spec: ModelSpec, facts: DeviceFacts, options: dict[str, object]) -> EngineConfig:
    return resolve(gather(options, environ={}), spec, facts)[0]


def refusal(spec: ModelSpec, facts: DeviceFacts, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(spec, facts, options)
    return str(caught.value)


def followed(text: str) -> dict[str, str]:
    """The options and values that a refusal offers."""
    found = re.fullmatch(r"--(\S+): .*; give (?:--precision )?(\S+?)(?: or less| or more)?((?:, and --\S+ \w+)*)", text)
    assert found is not None, text
    others = re.findall(r", and --(\S+) (\w+)", found[3])
    return {name.replace("-", "_"): value for name, value in [(found[1], found[2]), *others]}


def random_spec(chance: random.Random) -> ModelSpec:
    hidden = chance.choice([64, 576, 1024, 4096])
    spec = dataclasses.replace(
        SMALL,
        vocab_size=chance.choice([1000, 32000, 262144]),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_heads=hidden // 64,
        num_kv_heads=max(1, hidden // 256),
        max_position=chance.choice([512, 8192, 131072, 100_000_000]),
        layers=(LayerSpec(),) * chance.choice([1, 8, 32]),
    )
    if chance.random() < 0.3:
        table = spec.vocab_size * spec.hidden_size
        spec = dataclasses.replace(spec, quantised=QuantisedSpec(spec.num_parameters - table, 0, table // 2))
    return spec


def random_options(chance: random.Random, spec: ModelSpec) -> dict[str, object]:
    choices: dict[str, list[object]] = {
        "max_context_tokens": [16, 100, spec.max_position],
        "max_running": [1, 7, 256, 4096],
        "max_step_tokens": [4096, 100_000, 8_000_000, 10**25],
        "kv_memory": ["0", "1MiB", "100MiB", "3GiB", "8000000TiB"],
        "block_tokens": [8, 64, 128],
        "precision": ["exact", "float32"],
    }
    return {name: chance.choice(values) for name, values in choices.items() if chance.random() < 0.35}


def random_facts(chance: random.Random, spec: ModelSpec) -> DeviceFacts:
    kind = chance.choice(["cpu", "cuda"])
    weights = spec.num_parameters * (4 if kind == "cpu" else 2)
    free_bytes = int(weights * chance.choice([0.5, 0.99, 1.01, 1.05, 1.3, 2, 5]))
    return dataclasses.replace(
        HOST,
        kind=kind,
        free_bytes=free_bytes + chance.choice([0, MIB, 64 * MIB, GIB]),
        fast_dtypes=DTYPES if kind == "cuda" else ("float32",),
        is_simulated=kind == "cuda" and chance.random() < 0.2,
    )


def least_options(spec: ModelSpec, facts: DeviceFacts, options: dict[str, object]) -> dict[str, object]:
    """What takes the least memory."""
    tokens = max(16, int(str(options.get("block_tokens", 16))))
    kv_memory = str(tokens * kv_token_bytes(spec, facts.fast_dtypes[0]))
    return {
        "max_context_tokens": 16,
        "max_running": 1,
        "max_step_tokens": 1,
        "precision": "auto",
        "kv_memory": kv_memory,
    }


@pytest.mark.parametrize("seed", range(16))
def test_what_a_refusal_offers_fits(seed):
    chance = random.Random(seed)
    for _ in range(25):
        spec = random_spec(chance)
        options, facts = random_options(chance, spec), random_facts(chance, spec)
        try:
            config = config_of(spec, facts, options)
        except ConfigError as error:
            if "no option makes it fit" in str(error):
                refusal(spec, facts, **{**options, **least_options(spec, facts, options)})
                continue
            config = config_of(spec, facts, {**options, **followed(str(error))})
        assert config.memory.rest_bytes >= 0


def test_smaller_steps_leave_room_for_the_context_that_was_asked_for():
    options = {"max_step_tokens": 8_000_000, "max_context_tokens": 2048}
    offered = followed(refusal(SMALL, HOST, **options))
    assert offered.keys() == {"max_step_tokens"}
    assert config_of(SMALL, HOST, {**options, **offered}).max_context_tokens == 2048


def test_smaller_steps_leave_room_for_a_usual_context_where_none_was_asked_for():
    offered = followed(refusal(SMALL, HOST, max_step_tokens=8_000_000))
    assert config_of(SMALL, HOST, {**offered}).max_context_tokens >= 2048


@pytest.mark.parametrize("options", [{"max_step_tokens": 8_000_000}, {"kv_memory": "100GiB"}])
def test_what_is_offered_still_fits_when_a_little_memory_is_gone(options):
    offered = followed(refusal(SMALL, HOST, **options))
    less = dataclasses.replace(HOST, free_bytes=HOST.free_bytes - 500 * MIB)
    assert config_of(SMALL, less, offered).memory.rest_bytes >= 0


@pytest.mark.parametrize("precision", ["exact", "float32"])
def test_quantised_weights_that_are_too_large_when_dense_are_offered_in_their_own_form(precision, monkeypatch):
    monkeypatch.setattr("penstock.engine.config.packed_bytes", lambda quantised, dense: quantised.num_four_bit)
    table = SMALL.vocab_size * SMALL.hidden_size
    spec = dataclasses.replace(SMALL, quantised=QuantisedSpec(SMALL.num_parameters - table, 0, table // 2))
    host = dataclasses.replace(HOST, free_bytes=3 * SMALL.num_parameters)
    assert followed(refusal(spec, host, precision=precision)) == {"precision": "auto"}


def test_the_context_is_what_the_cache_holds_where_rows_of_the_models_own_would_not_fit():
    spec = dataclasses.replace(SMALL, max_position=100_000_000)
    config = config_of(spec, HOST, {})
    assert config.max_running == 32
    assert 2048 <= config.max_context_tokens <= (config.num_blocks - 1) * config.block_tokens
    assert config.memory.rest_bytes >= 0


def test_so_small_steps_have_no_more_requests_by_themselves():
    assert config_of(SMALL, HOST, {"max_step_tokens": 20}).max_running == 20
