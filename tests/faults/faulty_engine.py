"""An engine process whose model breaks when it meets certain tokens. Started in place of the real one by tests."""

import dataclasses
import sys
import time

import torch

from penstock.engine.builder import BuiltEngine, build_engine
from penstock.engine.process import main

RAISE, RUN_OUT_OF_MEMORY, GIVE_NAN, CORRUPT_CACHE, BE_SLOW, HANG = range(500, 506)


def build(*given: object, **named: object) -> BuiltEngine:
    built = build_engine(*given, **named)  # type: ignore[arg-type]
    runner = built.engine.runner
    forward = runner._model.forward  # type: ignore[attr-defined]

    def faulty(token_ids: torch.Tensor, positions: torch.Tensor, attention: object) -> torch.Tensor:
        met = set(token_ids.tolist())
        if RAISE in met:
            raise RuntimeError("injected")
        if RUN_OUT_OF_MEMORY in met:
            raise torch.OutOfMemoryError("injected")
        if BE_SLOW in met:
            time.sleep(0.2)
        if HANG in met:
            time.sleep(3600)
        hidden = forward(token_ids, positions, attention)
        hidden[token_ids == GIVE_NAN] = float("nan")
        if CORRUPT_CACHE in met:
            for layer in runner._kv_pool.layers:  # type: ignore[attr-defined]
                layer.copy_(layer.flip(-1) * 3)
        return hidden

    runner._model.forward = faulty  # type: ignore[attr-defined]
    return dataclasses.replace(built, config=dataclasses.replace(built.config, canary_seconds=0.5))


if __name__ == "__main__":
    sys.exit(main(build))
