"""The default model as transformers runs it: the reference for tokens and logits of the real weights."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def load_reference(path: Path) -> PreTrainedModel:
    """Read a GGUF file by transformers' own rules, in float32.

    `from_pretrained` would do the same but wants a package that nothing else here needs.
    """
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    outcome = model.load_state_dict(tensors, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert set(outcome.missing_keys) <= tied, outcome
    assert not outcome.unexpected_keys, outcome
    model.tie_weights()
    return model
