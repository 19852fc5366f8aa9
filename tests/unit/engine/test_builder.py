"""Models whose numbers are none: refused before anybody calls, by file and tensor."""

import logging
import math
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from penstock.config import gather
from penstock.engine.builder import build_engine
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.timeline import Timeline
from penstock.errors import ModelError
from penstock.models.gguf import GgufFile
from penstock.models.store import ModelFiles
from tests.gguf_models import write_gguf
from tests.tiny_models import folder_files, make_reference


def refusal(files: ModelFiles, precision: str = "auto") -> str:
    sourced = gather({"precision": precision, "kv_memory": "1MiB", "threads": 1}, environ={})
    with pytest.raises(ModelError) as caught:
        build_engine(sourced, files, Timeline(time.monotonic()))
    return str(caught.value)


@pytest.mark.parametrize(("precision", "broken"), [("auto", math.nan), ("exact", math.nan), ("exact", math.inf)])
def test_a_tensor_without_usable_numbers_is_named_and_no_traceback_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, precision: str, broken: float
) -> None:
    make_reference("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = broken
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(folder_files(tmp_path), precision)
    file = tmp_path / "model.safetensors"
    assert f"file {file}, tensor model.layers.1.mlp.down_proj.weight: it holds numbers that are infinite" in message
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(("name", "dtype"), [("output_norm.weight", np.float32), ("blk.1.ffn_up.weight", np.float16)])
def test_a_gguf_tensor_with_a_norm_or_scale_that_is_none_is_named(
    tmp_path: Path, name: str, dtype: type[np.floating]
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(make_reference("llama"), path, gguf.GGMLQuantizationType.Q8_0)
    tensor = GgufFile.open(path).tensors[name]
    with path.open("r+b") as file:
        file.seek(tensor.offset)
        file.write(np.array([math.nan], dtype).tobytes())
    assert f"file {path}, tensor {name}: it holds numbers" in refusal(ModelFiles("tiny", "gguf", path))


@pytest.mark.parametrize("for_batches", [False, True])
def test_what_a_server_does_in_idle_moments_is_done_before_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_batches: bool
) -> None:
    moments = [True, True, False]
    monkeypatch.setattr(ModelRunner, "use_idle_moment", lambda runner: moments.pop(0))
    make_reference("llama", tmp_path)
    sourced = gather({"kv_memory": "1MiB", "threads": 1}, environ={})
    built = build_engine(sourced, folder_files(tmp_path), Timeline(time.monotonic()), for_batches=for_batches)
    built.engine.runner.close()
    assert len(moments) == (0 if for_batches else 3)
