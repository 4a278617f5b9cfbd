"""The distillation loss inside the model: when it is added, which parameters learn from it, and at which queries."""

import pytest
import torch

from conftest import DENSE, TINY, random_ids, tiny_model
from recsa_qwen3.attention_recsa_qwen3 import rotary_tables
from recsa_qwen3.distillation_recsa_qwen3 import distillation_loss, queries_at
from recsa_qwen3.tree_recsa_qwen3 import TreeGeometry
from test_training import enable_checkpointing

torch.set_num_threads(1)

BRANCHING = TINY["recsa_branching"]
# The first position with two nodes before its path.
FIRST = 2 * BRANCHING
LENGTH = 4 * DENSE + 6


# ---- helpers --------------------------------------------------------------------------------------------------------


def distilled_model(frozen: bool = False, **changes):
    """A TINY model in float64 and in training mode; with samples enough that every query is taken, unless told."""
    changes = {"recsa_distill_weight": 0.3, "recsa_distill_queries": "uniform", "recsa_distill_samples": 999} | changes
    model = tiny_model(**changes).double().train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or ".pooler." in name)
    return model


def gradients(model, ids, seed: int = 3, **forward):
    """Every parameter's gradient, and the output."""
    model.zero_grad()
    torch.manual_seed(seed)
    output = model(ids, **forward)
    output.loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, output


def is_pooler(name: str) -> bool:
    return ".pooler." in name


def states_of_layers(model, ids, **forward) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Queries and keys before RoPE of each layer, `[B, H, T, D]`."""
    found: dict[str, list[torch.Tensor]] = {"q_norm": [], "k_norm": []}
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(lambda _, __, out, name=name: found[name].append(out))
        for layer in model.model.layers
        for name in found
    ]
    with torch.no_grad():
        model(ids, **forward)
    for hook in hooks:
        hook.remove()
    return [(q.transpose(1, 2), k.transpose(1, 2)) for q, k in zip(found["q_norm"], found["k_norm"], strict=True)]


def expected_loss(model, ids, positions, weights=None) -> torch.Tensor:
    """The mean over layers of `distillation_loss` from the states that hooks saw."""
    geometry = TreeGeometry.from_config(model.config)
    rope = rotary_tables(model.config, ids.device, max(LENGTH, ids.shape[1]))
    losses = []
    for (query, key), layer in zip(states_of_layers(model, ids), model.model.layers, strict=True):
        queries = queries_at(query, positions)
        found = distillation_loss(
            queries, key, layer.self_attn.pooler, geometry, positions, rope, rope, weights=weights
        )
        losses.append(found.loss)
    return torch.stack(losses).mean()


# ---- when it is added -----------------------------------------------------------------------------------------------


def test_added_in_training_only():
    ids = random_ids(2, LENGTH)
    model = distilled_model()
    plain = distilled_model(recsa_distill_weight=0.0)
    expected = expected_loss(model, ids, torch.arange(FIRST, LENGTH).repeat(2, 1))
    language = plain(ids, labels=ids)
    assert language.distill_loss is None
    output = model(ids, labels=ids)
    torch.testing.assert_close(output.distill_loss, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(output.loss, language.loss + 0.3 * expected, rtol=1e-9, atol=0)
    alone = model(ids)
    torch.testing.assert_close(alone.loss, 0.3 * expected, rtol=1e-9, atol=0)
    assert set(output) - set(language) == {"distill_loss"}
    with torch.no_grad():
        assert model(ids, labels=ids).distill_loss is None
    model.eval()
    evaluated = model(ids, labels=ids)
    assert evaluated.distill_loss is None and model(ids).loss is None
    torch.testing.assert_close(evaluated.loss, language.loss, rtol=1e-9, atol=0)


def test_parts_of_a_batch_add_up():
    """With `num_items_in_batch` the trainer sums the losses of the parts: the loss of the whole batch."""
    model = distilled_model()
    ids = random_ids(2, LENGTH)
    labels = ids.clone()
    labels[0, :20] = -100
    items = (labels[:, 1:] != -100).sum()
    parts = [model(ids[b : b + 1], labels=labels[b : b + 1], num_items_in_batch=items) for b in (0, 1)]
    shares = [(labels[b, 1:] != -100).sum() / items for b in (0, 1)]
    language = distilled_model(recsa_distill_weight=0.0)(ids, labels=labels).loss
    expected = language + 0.3 * sum(share * part.distill_loss for share, part in zip(shares, parts, strict=True))
    torch.testing.assert_close(sum(part.loss for part in parts), expected, rtol=1e-9, atol=0)


# ---- who learns from it ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [DENSE - 3, LENGTH])
def test_poolers_learn_from_it_alone_and_nothing_else_does(length):
    """The backbone's gradient is that without KL; the poolers' that of KL alone."""
    ids = random_ids(2, length)
    both, output = gradients(distilled_model(), ids, labels=ids)
    alone, _ = gradients(distilled_model(), ids)
    language, _ = gradients(distilled_model(recsa_distill_weight=0.0), ids, labels=ids)
    frozen, _ = gradients(distilled_model(frozen=True), ids, labels=ids)
    assert output.distill_loss > 0
    for name, gradient in both.items():
        if is_pooler(name):
            assert gradient.any()
            torch.testing.assert_close(gradient, alone[name], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(gradient, frozen[name], rtol=1e-9, atol=1e-12)
        else:
            torch.testing.assert_close(gradient, language[name], rtol=1e-9, atol=1e-12)
            assert alone[name] is None and frozen[name] is None


def test_the_poolers_gradient_is_that_of_the_loss():
    model = distilled_model()
    ids = random_ids(1, LENGTH)
    found, _ = gradients(model, ids)
    model.zero_grad()
    (0.3 * expected_loss(model, ids, torch.arange(FIRST, LENGTH)[None])).backward()
    for name, parameter in model.named_parameters():
        if is_pooler(name):
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("queries", ["uniform", "far_mass+peak"])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_checkpointing_changes_nothing(reentrant, frozen, queries):
    ids = random_ids(2, LENGTH)
    options = dict(frozen=frozen, recsa_distill_queries=queries, recsa_distill_samples=20)
    plain, first = gradients(distilled_model(**options), ids, labels=ids)
    model = distilled_model(**options)
    enable_checkpointing(model, reentrant)
    found, second = gradients(model, ids, labels=ids)
    torch.testing.assert_close(second.loss, first.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(second.distill_loss, first.distill_loss, rtol=1e-12, atol=0)
    for name, gradient in plain.items():
        assert (gradient is None) == (frozen and not is_pooler(name))
        if gradient is not None:
            torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
