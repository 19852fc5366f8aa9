"""The engine's options become a configuration, or are refused with what would do."""

import json

import pytest

from penstock.config import gather
from penstock.engine.config import resolve
from penstock.engine.runner.device import probe
from penstock.errors import ConfigError
from penstock.models.registry import spec_for
from penstock.models.store import ModelFiles
from tests.tiny_engine import CONFIG


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return spec_for(ModelFiles("tiny", "folder", tmp_path, tmp_path / "config.json", load_format="dummy"))


def test_an_unknown_attention_backend_is_refused_with_those_that_can_run(spec):
    with pytest.raises(ConfigError, match=r"--attention-backend: 'flash' .*reference"):
        resolve(gather({"attention_backend": "flash"}, environ={}), spec, probe("cpu", spec))


def test_the_reference_backend_can_be_asked_for_by_name(spec):
    config, _ = resolve(gather({"attention_backend": "reference"}, environ={}), spec, probe("cpu", spec))
    assert config.attention_backend == "reference"
