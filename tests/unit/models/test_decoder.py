"""What the decoder and its layers promise beyond equal logits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.models.decoder import attention_layers
from penstock.models.layers.decoder_layer import DecoderLayer
from penstock.models.layers.feed_forward import FeedForward
from penstock.models.layers.moe import Moe, route
from penstock.models.quant.dense import DenseWeight
from penstock.models.registry import spec_for
from penstock.models.spec import MoeSpec
from penstock.parallel.groups import Group
from tests.paged import PagedDecoder
from tests.tiny_models import folder_files, load_exact, make_reference, random_tokens


def test_attention_layers_carry_window_softcap_and_scale(tmp_path: Path) -> None:
    make_reference("gemma2", tmp_path, head_dim=16, sliding_window=7, query_pre_attn_scalar=25)
    local, full = attention_layers(spec_for(folder_files(tmp_path)))
    assert (local.window, full.window) == (7, None)
    assert local.softcap == 50.0
    assert local.scale == pytest.approx(0.2)


def test_attention_layers_of_a_rank_have_its_share_of_heads(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    spec = spec_for(folder_files(tmp_path))
    layer = attention_layers(spec, Group(1, 2))[0]
    assert (layer.num_heads, layer.num_kv_heads) == (2, 1)


def test_more_ranks_than_heads_are_refused(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    with pytest.raises(ConfigError, match="attention heads"):
        attention_layers(spec_for(folder_files(tmp_path)), Group(0, 8))


def test_hidden_states_may_be_picked_before_logits(tmp_path: Path) -> None:
    make_reference("llama", tmp_path)
    paged = PagedDecoder(load_exact(folder_files(tmp_path)))
    prompt = random_tokens(6)
    whole = paged.run("a", prompt)
    paged.run("b", prompt[:5])
    last = paged.run("b", prompt[5:])
    torch.testing.assert_close(last[0], whole[-1], atol=1e-4, rtol=0.0)


class AddingWeight(DenseWeight):
    """A weight whose product is added to the stream, as kernels for a handful of tokens do."""

    def add(self, x: Tensor, total: Tensor) -> bool:
        total.add_(self.apply(x))
        return True


def add_to_stream(layer: DecoderLayer) -> None:
    """Have the last products of attention and of a plain feed-forward layer add to the stream."""
    for linear in (layer.attention.output, getattr(layer.feed_forward, "down", None)):
        if linear is not None:
            assert isinstance(linear.weight, DenseWeight)
            linear.weight = AddingWeight(linear.weight.weight)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_products_that_add_to_the_stream_change_nothing(family: str, tmp_path: Path) -> None:
    make_reference(family, tmp_path, **({"head_dim": 16} if family == "gemma2" else {}))
    decoder = load_exact(folder_files(tmp_path))
    prompt = random_tokens(6)
    expected = PagedDecoder(decoder).run("a", prompt)
    for layer in decoder.layers:
        assert isinstance(layer.feed_forward, FeedForward)
        add_to_stream(layer)
    torch.testing.assert_close(PagedDecoder(decoder).run("a", prompt), expected, atol=1e-5, rtol=0.0)


@pytest.mark.parametrize(("adds", "num_tokens"), [(False, 24), (True, 24), (True, 6)])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2", "mixtral"])
def test_norms_that_are_folded_into_matrices_change_nothing(
    family: str, adds: bool, num_tokens: int, tmp_path: Path
) -> None:
    make_reference(family, tmp_path, **({"head_dim": 16} if family == "gemma2" else {}))
    decoder = load_exact(folder_files(tmp_path))
    for layer in decoder.layers:  # as trained ones are: no two numbers alike
        for norm in (layer.attention_norm, layer.feed_forward_norm):
            norm.weight.uniform_(0.5, 2.0)
    prompt = random_tokens(num_tokens)
    expected = PagedDecoder(decoder).run("a", prompt)
    for layer in decoder.layers:
        layer.fold_norms()
        is_dense = isinstance(layer.feed_forward, FeedForward)
        assert layer.attention_norm.is_bare == layer.feed_forward_norm.is_bare == is_dense
        if adds:
            add_to_stream(layer)
    torch.testing.assert_close(PagedDecoder(decoder).run("a", prompt), expected, atol=1e-4, rtol=0.0)


def test_logits_do_not_change_the_hidden_states_they_are_made_from(tmp_path: Path) -> None:
    make_reference("gemma2", tmp_path, head_dim=16)
    decoder = load_exact(folder_files(tmp_path))
    hidden = torch.randn(3, 64)
    assert torch.equal(decoder.logits(hidden), decoder.logits(hidden))


@pytest.fixture
def experts(tmp_path: Path) -> Moe:
    make_reference("mixtral", tmp_path, num_local_experts=4, num_experts_per_tok=2)
    layer = load_exact(folder_files(tmp_path)).layers[0].feed_forward
    assert isinstance(layer, Moe)
    return layer


def test_experts_give_the_same_whether_they_see_all_tokens_or_their_own(experts: Moe) -> None:
    x = torch.randn(11, 64)
    weights, picks = route(experts.router.apply(x), experts.spec)
    torch.testing.assert_close(
        experts.run_all(x, weights, picks), experts.run_picked(x, weights, picks), atol=1e-5, rtol=1e-5
    )


def test_a_token_gets_the_same_experts_alone_and_in_a_batch(experts: Moe) -> None:
    x = torch.randn(11, 64)
    torch.testing.assert_close(experts.forward(x)[4:5], experts.forward(x[4:5]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_weights_of_picked_experts_sum_to_one_only_when_normalised(normalise: bool) -> None:
    weights, _ = route(torch.randn(7, 6), MoeSpec(6, 2, 8, normalise_weights=normalise))
    assert torch.allclose(weights.sum(dim=-1), torch.ones(7)) == normalise
