"""`penstock explain` shows every option once, as the component that owns it resolves it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.commands import explain
from penstock.config import Options, Setting, gather
from penstock.errors import ConfigError

CONFIG = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def settle(model: str, **given: Any) -> dict[str, Setting]:
    sourced = gather({"model": model, "load_format": "dummy", "device": "cpu", **given}, environ={})
    return {setting.option: setting for setting in explain.settle(sourced)}


def test_every_option_is_shown_once_in_the_order_of_the_table(model: str) -> None:
    sourced = gather({"model": model, "load_format": "dummy", "device": "cpu"}, environ={})
    names = [setting.option for setting in explain.settle(sourced)]
    assert names == [item.name for item in dataclasses.fields(Options)]


def test_what_was_given_says_where(model: str) -> None:
    settings = settle(model, port="9000", max_running="3")
    assert settings["port"] == Setting("port", "9000", "command line")
    assert settings["max_running"] == Setting("max_running", "3", "command line")
    assert settings["drain_seconds"].why == "default"


def test_what_is_automatic_has_a_value_and_a_reason(model: str) -> None:
    settings = settle(model)
    for name in ("served_name", "max_context_tokens", "threads", "attention_backend", "max_running", "workers"):
        assert settings[name].value not in ("", "none", "None", "auto"), name
        assert settings[name].why.startswith("auto: "), name
    assert settings["max_context_tokens"].value == "128"


def test_switches_are_shown_as_they_are_written(model: str) -> None:
    assert settle(model)["prefix_cache"].value == "true"
    assert settle(model, prefix_cache="off")["prefix_cache"].value == "false"
    assert not {setting.value for setting in settle(model).values()} & {"True", "False", "None"}


def test_a_simulated_device_has_the_memory_and_the_defaults_of_the_profiled_one(model: str) -> None:
    settings = settle(model, device="simulated", simulated_profile="h200-llama-8b", max_context_tokens="128")
    assert settings["device"].value == "simulated"
    assert "NVIDIA H200" in settings["device"].why
    assert settings["max_running"].value == "256"
    # 8 blocks of 16 tokens for each of 256 requests, each token as large as the profiled model's.
    assert settings["kv_memory"].value == f"{256 * 128 * 131072 // 2**20}MiB"
    assert settings["attention_backend"].value == "simulated"


def test_an_unknown_profile_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="--simulated-profile: 'abacus' is not usable; give a file"):
        settle(model, device="simulated", simulated_profile="abacus")


def test_what_cannot_work_is_refused_as_serve_would(model: str) -> None:
    with pytest.raises(ConfigError, match=r"--host: '0\.0\.0\.0' is not usable"):
        settle(model, host="0.0.0.0")


def test_the_table_shows_value_and_reason(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sourced = gather({"model": model, "load_format": "dummy", "device": "cpu", "port": 9000}, environ={})
    assert explain.run(sourced, as_json=False) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("port "))
    assert line.split() == ["port", "9000", "command", "line"]


def test_json_has_one_object_per_option(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sourced = gather({"model": model, "load_format": "dummy", "device": "cpu"}, environ={})
    assert explain.run(sourced, as_json=True) == 0
    settings = json.loads(capsys.readouterr().out)
    assert len(settings) == len(dataclasses.fields(Options))
    assert set(settings[0]) == {"option", "value", "why"}
