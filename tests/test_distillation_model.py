"""The distillation loss inside the model: when it is added, which parameters learn from it, and at which queries."""

import pytest
import torch
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

import oracle
from conftest import DENSE, TINY, random_ids, relative_rms, tiny_config, tiny_model
from operands import rows_of_batch
from recsa_qwen3 import Recall, RecSAQwen3ForCausalLM, RecSAQwen3ForSequenceClassification, needle_recall, recsa_trace
from recsa_qwen3.attention_recsa_qwen3 import rotary_tables
from recsa_qwen3.configuration_recsa_qwen3 import TRAINED_TOKENS
from recsa_qwen3.distillation_recsa_qwen3 import distillation_loss, far_scores, queries_at, teacher_tables
from recsa_qwen3.rows_recsa_qwen3 import Rows
from recsa_qwen3.sampling_recsa_qwen3 import POOL, SampledQueries, Share, draw_queries
from recsa_qwen3.tree_recsa_qwen3 import TreeGeometry
from test_model import stock_twin
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


def expected_loss(model, ids, positions, weights=None, seen_by=None) -> torch.Tensor:
    """The mean over layers of `distillation_loss` from the states that hooks saw in `model`, or in `seen_by`."""
    geometry = TreeGeometry.from_config(model.config)
    rope = rotary_tables(model.config, ids.device, max(LENGTH, ids.shape[1]))
    losses = []
    for (query, key), layer in zip(states_of_layers(seen_by or model, ids), model.model.layers, strict=True):
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
    assert output.distill_loss > 0
    for name, gradient in both.items():
        if is_pooler(name):
            assert gradient.any()
            torch.testing.assert_close(gradient, alone[name], rtol=1e-9, atol=1e-12)
        else:
            torch.testing.assert_close(gradient, language[name], rtol=1e-9, atol=1e-12)
            assert alone[name] is None


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


def test_other_heads_train_poolers_as_before():
    """Only the language model distils; elsewhere the field changes no gradient."""
    ids = random_ids(2, LENGTH)
    found = []
    for weight in (0.0, 0.3):
        model = tiny_model(RecSAQwen3ForSequenceClassification, recsa_distill_weight=weight).double().train()
        model(ids, labels=torch.tensor([0, 1])).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient.any() or name.endswith("embed_tokens.weight")
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=0)


@pytest.mark.parametrize("trained", [LENGTH, 48])
def test_a_frozen_backbone_attends_as_its_teacher(trained):
    """Logits are stock Qwen3's, with YaRN where the row is longer than it was trained on; the poolers' gradient is
    that of the loss from its states, also beyond M, where untrained poolers would lead deeper layers astray."""
    ids, model = random_ids(2, LENGTH), distilled_model(frozen=True, recsa_trained_length=trained)
    rope = {"rope_type": "default", "rope_theta": model.config.rope_parameters["rope_theta"]}
    if trained < LENGTH:
        rope |= {"rope_type": "yarn", "factor": LENGTH / trained, "original_max_position_embeddings": trained}
    stock = stock_twin(model, rope_parameters=rope)
    found, output = gradients(model, ids)
    assert model.last_backend == "dense"
    torch.testing.assert_close(output.logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    sparse = model.eval()(ids).logits.detach()
    assert relative_rms(sparse[:, DENSE:], output.logits[:, DENSE:].detach()) > 1e-2
    if trained < LENGTH:
        return
    model.zero_grad()
    positions = torch.arange(FIRST, LENGTH).repeat(2, 1)
    (0.3 * expected_loss(model, ids, positions, seen_by=distilled_model(recsa_top_k=None))).backward()
    for name, parameter in model.named_parameters():
        if is_pooler(name):
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_a_frozen_backbone_is_computed_once_and_without_gradients():
    """With gradient checkpointing as without: no layer runs again in the backward pass, none keeps its input."""
    model = distilled_model(frozen=True)
    enable_checkpointing(model, True)
    runs = []
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, output: runs.append(output))
    output = model(random_ids(1, LENGTH))
    assert output.logits.grad_fn is None and output.distill_loss.requires_grad
    output.loss.backward()
    assert len(runs) == 1 and runs[0].grad_fn is None


@pytest.mark.parametrize("frozen", [True, False])
def test_rows_too_short_touch_every_pooler(frozen):
    """No position has two nodes before it: a loss of zero, and a gradient of zero for DDP to wait for."""
    model = distilled_model(frozen=frozen)
    ids = random_ids(2, FIRST)
    found, output = gradients(model, ids, labels=ids)
    assert output.distill_loss == 0
    assert all(not gradient.any() for name, gradient in found.items() if is_pooler(name))


def test_under_autocast():
    """bfloat16 autocast: the loss is computed in float32 from the states that it finds."""
    model = distilled_model(frozen=True).float()
    ids = random_ids(2, LENGTH)
    exact = model(ids).distill_loss
    with torch.autocast("cpu", torch.bfloat16):
        found, output = gradients(model, ids)
    assert output.distill_loss.dtype == torch.float32
    torch.testing.assert_close(output.distill_loss, exact, rtol=0.1, atol=0)
    assert all(gradient.isfinite().all() for name, gradient in found.items() if is_pooler(name))


# ---- packed documents -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queries", ["uniform", "answers+uniform"])
def test_packed_documents_are_separate_rows(queries):
    """Loss and gradients, where every query is taken: two documents in one row, and each with padding in its own."""
    lengths = (LENGTH - 11, DENSE + 9)
    documents = [random_ids(1, length) for length in lengths]
    answers = [torch.rand(1, length) < 0.2 for length in lengths]
    packed = torch.cat(documents, 1)
    position = torch.cat([torch.arange(length) for length in lengths])[None]
    options = dict(recsa_distill_queries=queries, recsa_distill_samples=3 * LENGTH)
    one, first = gradients(
        distilled_model(**options), packed, labels=None, position_ids=position, answer_mask=torch.cat(answers, 1)
    )
    padding = lengths[0] - lengths[1]
    rows = torch.cat([documents[0], torch.nn.functional.pad(documents[1], (padding, 0))])
    mask = torch.cat([torch.ones(1, lengths[0]), torch.tensor([[0] * padding + [1] * lengths[1]])])
    marked = torch.cat([answers[0], torch.nn.functional.pad(answers[1], (padding, 0))])
    two, second = gradients(distilled_model(**options), rows, attention_mask=mask, answer_mask=marked)
    torch.testing.assert_close(first.distill_loss, second.distill_loss, rtol=1e-9, atol=0)
    for name, gradient in one.items():
        if is_pooler(name):
            torch.testing.assert_close(two[name], gradient, rtol=1e-9, atol=1e-12)


# ---- which queries --------------------------------------------------------------------------------------------------


def drawn(share: Share) -> list[tuple[int, int]]:
    """(sequence, position) of each query."""
    return [(s, t) for s, row in enumerate(share.positions.tolist()) for t in row if t >= 0]


def test_uniform_queries():
    """Without replacement, none before two nodes, as often in one place as in another."""
    rows = Rows.whole(2, 100)
    counts = torch.zeros(100)
    for _ in range(200):
        (share,) = draw_queries(rows, "uniform", 23, BRANCHING)
        found = drawn(share)
        assert share.strategy == "uniform" and share.positions.shape == (2, 23) and len(set(found)) == 46
        counts += torch.bincount(torch.tensor([t for _, t in found]), minlength=100)
    expected = 200 * 46 / (100 - FIRST)
    assert not counts[:FIRST].any() and (counts[FIRST:] - expected).abs().max() < 6 * expected**0.5
    (share,) = draw_queries(rows, "uniform", 1000, BRANCHING)
    assert sorted(drawn(share)) == [(s, t) for s in range(2) for t in range(FIRST, 100)]


def test_queries_of_packed_documents_in_proportion():
    position = torch.cat([torch.arange(n) for n in (20, 68, 5, 7)])[None].repeat(2, 1)
    rows = rows_of_batch(2, 100, None, position)
    (share,) = draw_queries(rows, "uniform", 36, BRANCHING)
    found = drawn(share)
    assert len(found) == 72 and {s for s, _ in found} <= {0, 1, 4, 5}
    assert all(FIRST <= t < rows.counts[s] for s, t in found)
    numbers = [0, 0]
    for _ in range(100):
        for s, _ in drawn(draw_queries(rows, "uniform", 36, BRANCHING)[0]):
            numbers[s % 4] += 1
    assert 0.9 < numbers[1] / numbers[0] / 5 < 1.1  # 12 against 60 eligible positions


def test_answer_queries_predict_answers():
    """The positions before marked tokens; what answers leave over, and rows without answers, go to the others."""
    mask = torch.zeros(3, 100, dtype=torch.bool)
    mask[0, [0, 3, 50, 51, 99]] = True  # 0 is predicted by nothing, 3 by a query that has no two nodes
    mask[1, 20:80] = True
    rows = Rows.whole(3, 100)
    answers, uniform = draw_queries(rows, "answers+uniform", 30, BRANCHING, mask)
    assert (answers.strategy, uniform.strategy) == ("answers", "uniform")
    found = drawn(answers)
    assert sorted(t for s, t in found if s == 0) == [49, 50, 98]
    assert len([t for s, t in found if s == 1]) == 15 and all(19 <= t < 79 for s, t in found if s == 1)
    assert all(s < 2 for s, _ in found)
    assert [len([s for s, _ in drawn(uniform) if s == row]) for row in range(3)] == [27, 15, 30]
    (alone,) = draw_queries(rows, "answers", 30, BRANCHING, mask[:2].repeat(2, 1)[:3])
    assert alone.strategy == "answers" and len([s for s, _ in drawn(alone) if s == 2]) == 3
    found = draw_queries(rows, "answers", 30, BRANCHING, mask)
    assert [share.strategy for share in found] == ["answers", "uniform"]
    assert {s for s, _ in drawn(found[1])} == {2} and len(drawn(found[1])) == 30
    assert [share.strategy for share in draw_queries(rows, "answers", 30, BRANCHING)][-1] == "uniform"


def test_answers_of_packed_documents():
    """The mask goes with its columns; a document's first token is predicted by no query."""
    position = torch.cat([torch.arange(n) for n in (40, 60)])[None]
    mask = torch.zeros(1, 100, dtype=torch.bool)
    mask[0, [39, 40, 70]] = True
    answers, _ = draw_queries(rows_of_batch(1, 100, None, position), "answers+uniform", 30, BRANCHING, mask)
    assert sorted(drawn(answers)) == [(0, 38), (1, 29)]


def test_shares_weigh_the_same():
    """Three answers against 40 others: half of the loss each, at every level by the queries that count there."""
    ids = random_ids(1, LENGTH)
    mask = torch.zeros(1, LENGTH, dtype=torch.bool)
    mask[0, [20, 40, 69]] = True
    model = distilled_model(recsa_distill_queries="answers+uniform", recsa_distill_samples=40)
    torch.manual_seed(7)
    output = model(ids, answer_mask=mask)
    torch.manual_seed(7)
    shares = draw_queries(Rows.whole(1, LENGTH), "answers+uniform", 40, BRANCHING, mask)
    positions = torch.cat([share.positions for share in shares], 1)
    assert sorted(positions[0, :3].tolist()) == [19, 39, 68] and positions.shape == (1, 40)
    weights = torch.tensor([[1 / 3] * 3 + [1 / 37] * 37])
    expected = expected_loss(model, ids, positions, weights)
    torch.testing.assert_close(output.distill_loss, expected, rtol=1e-6, atol=0)
    assert abs(output.distill_loss - expected_loss(model, ids, positions)) > 1e-4 * expected


def test_weights_are_of_each_levels_mean():
    """Weights of whole numbers are as many copies of a query."""
    model = distilled_model()
    ids = random_ids(1, LENGTH)
    positions = torch.tensor([[69, 33, 12, 50]])
    repeated = torch.tensor([[69, 33, 33, 33, 12, 50, 50]])
    found = expected_loss(model, ids, positions, torch.tensor([[1, 3, 1, 2]]))
    torch.testing.assert_close(found, expected_loss(model, ids, repeated), rtol=1e-9, atol=0)


def dense_attention(query, key, t: int, theta: float) -> torch.Tensor:
    """`[H, t + 1]` of one row's query at t, from the states before RoPE."""
    cos, sin = oracle.rope_tables(theta, query.shape[-1], range(t + 1))
    keys = oracle.rotate(key[:, : t + 1], cos, sin).repeat_interleave(len(query) // len(key), 0)
    logits = (keys @ oracle.rotate(query[:, t], cos[-1], sin[-1])[..., None])[..., 0] * query.shape[-1] ** -0.5
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("strategy", ["far_mass", "peak"])
def test_scored_queries_are_the_best_of_the_pool(strategy):
    """Each layer's own, by attention that is written out here."""
    model = distilled_model(recsa_distill_queries=strategy, recsa_distill_samples=6)
    ids = random_ids(2, LENGTH)
    torch.manual_seed(5)
    output = model(ids)
    torch.manual_seed(5)
    (pool,) = draw_queries(Rows.whole(2, LENGTH), strategy, 6, BRANCHING)
    assert pool.positions.shape == (2, 6 * POOL)
    theta = model.config.rope_parameters["rope_theta"]
    rope = rotary_tables(model.config, ids.device, LENGTH)
    losses = []
    for (query, key), layer in zip(states_of_layers(model, ids), model.model.layers, strict=True):
        best = []
        for row, positions in enumerate(pool.positions.tolist()):
            scores = {}
            for t in positions:
                far = dense_attention(query[row], key[row], t, theta)[:, BRANCHING : t - t // 4]
                scores[t] = (far.sum(1).mean() if strategy == "far_mass" else far.max()).item()
            best.append(sorted(scores, key=scores.get)[-6:])
            found = far_scores(
                queries_at(query[row : row + 1], torch.tensor([positions])),
                key[row : row + 1],
                torch.tensor([positions]),
                rope,
                BRANCHING,
                strategy,
                block_elements=4 * LENGTH * 5,
            )
            expected = torch.tensor([[scores[t] for t in positions]], dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
        chosen = torch.tensor(best)
        geometry = TreeGeometry.from_config(model.config)
        pooler = layer.self_attn.pooler
        loss = distillation_loss(queries_at(query, chosen), key, pooler, geometry, chosen, rope, rope).loss
        losses.append(loss)
    torch.testing.assert_close(output.distill_loss, torch.stack(losses).mean(), rtol=1e-6, atol=0)


def test_a_pools_best_by_sequence():
    """A quarter of what each sequence has in the pool, rounded up; the weights of a share sum to 1."""
    pool = torch.tensor([[3, 9, 5, 7, 1, -1], [8, 2, -1, -1, -1, -1], [-1] * 6])
    share, empty = Share("peak", pool), Share("uniform", torch.full((3, 4), -1))
    positions, weights = SampledQueries([share, empty]).choose(lambda _, places: places.float())
    assert positions.tolist() == [[9, 7], [8, -1], [-1, -1]]
    torch.testing.assert_close(weights, torch.tensor([[1, 1], [1, 0], [0, 0]]).double() / 3)


# ---- the teacher beyond the trained length --------------------------------------------------------------------------


def test_the_teacher_of_long_rows_is_yarn():
    """Tables of transformers' own Qwen3 with yarn; the loss of a long row uses them, that of a short one does not."""
    config = tiny_config(recsa_trained_length=48)
    for length in (48, 49, 200):
        stock = {key: value for key, value in TINY.items() if not key.startswith("recsa_")}
        rope = {"rope_type": "default", "rope_theta": config.rope_parameters["rope_theta"]}
        if length > 48:
            rope |= {"rope_type": "yarn", "factor": length / 48, "original_max_position_embeddings": 48}
        rotary = Qwen3RotaryEmbedding(Qwen3Config(**stock, rope_parameters=rope))
        expected = rotary(torch.empty(0), torch.arange(length)[None])
        found = teacher_tables(config, torch.device("cpu"), [length])
        for table, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(table[:length], wanted[0], rtol=0, atol=0)
    assert config.rope_parameters["rope_type"] == "default"
    ids = random_ids(1, LENGTH)
    positions = torch.arange(FIRST, LENGTH)[None]
    model = distilled_model(recsa_trained_length=48)
    losses = []
    for (query, key), layer in zip(states_of_layers(model, ids), model.model.layers, strict=True):
        geometry = TreeGeometry.from_config(config)
        rope = rotary_tables(config, ids.device, LENGTH)
        teacher = teacher_tables(config, ids.device, [LENGTH])
        queries = queries_at(query, positions)
        losses.append(distillation_loss(queries, key, layer.self_attn.pooler, geometry, positions, rope, teacher).loss)
    torch.testing.assert_close(model(ids).distill_loss, torch.stack(losses).mean(), rtol=1e-9, atol=0)
    ordinary = distilled_model(recsa_trained_length=LENGTH)(ids).distill_loss
    assert abs(model(ids).distill_loss - ordinary) > 1e-3 * ordinary


def test_sequences_of_a_batch_have_their_own_teacher():
    """A packed row of a long and a short document: neither changes the other's frequencies."""
    lengths = (LENGTH, 30)
    config = tiny_config(recsa_trained_length=48)
    cos, sin = teacher_tables(config, torch.device("cpu"), lengths)
    assert cos.shape == sin.shape == (2, LENGTH, TINY["head_dim"])
    for row, length in enumerate(lengths):
        alone = teacher_tables(config, torch.device("cpu"), [length])
        torch.testing.assert_close(cos[row, :length], alone[0][:length], rtol=0, atol=0)
        torch.testing.assert_close(sin[row, :length], alone[1][:length], rtol=0, atol=0)
    documents = [random_ids(1, length) for length in lengths]
    position = torch.cat([torch.arange(length) for length in lengths])[None]
    model = distilled_model(frozen=True, recsa_trained_length=48)
    both = model(torch.cat(documents, 1), position_ids=position).distill_loss
    assert both.isfinite() and both > 0


def test_a_checkpoints_own_yarn_goes_on():
    """Its factor rises from the trained length on; its original length stays."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 24}
    config = tiny_config(recsa_trained_length=48, rope_parameters=rope)
    same = teacher_tables(config, torch.device("cpu"), [48])[0][:48]
    torch.testing.assert_close(same, rotary_tables(config, torch.device("cpu"), 48)[0][:48], rtol=0, atol=0)
    longer = tiny_config(rope_parameters={**rope, "factor": 4.0})
    found = teacher_tables(config, torch.device("cpu"), [96])[0][:96]
    torch.testing.assert_close(found, rotary_tables(longer, torch.device("cpu"), 96)[0][:96], rtol=0, atol=0)


# ---- fields, refusals -----------------------------------------------------------------------------------------------


def test_fields_survive_saving(tmp_path):
    fields = dict(
        recsa_distill_weight=0.25,
        recsa_distill_queries="peak+answers",
        recsa_distill_samples=12,
        recsa_trained_length=64,
    )
    tiny_model(num_hidden_layers=1, **fields).save_pretrained(tmp_path)
    config = RecSAQwen3ForCausalLM.from_pretrained(tmp_path).config
    assert {name: getattr(config, name) for name in fields} == fields
    assert tiny_config().recsa_trained_length is None and TRAINED_TOKENS == 32768


def test_refusals_name_what_is_wrong():
    model = distilled_model()
    ids = random_ids(2, LENGTH)
    with pytest.raises(ValueError, match=r"answer_mask: shape \(2, 5\), expected \(2, 70\)"):
        model(ids, answer_mask=torch.ones(2, 5, dtype=torch.bool))
    with torch.no_grad():
        cache = model(ids, use_cache=True)[1]
    with pytest.raises(ValueError, match="cache: .*filled"):
        model(ids[:, :1], cache=cache)
    model.config.recsa_top_k = None
    with pytest.raises(ValueError, match="recsa_top_k"):
        model(ids)
    stretched = distilled_model(
        recsa_trained_length=48, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    )
    with pytest.raises(ValueError, match="rope_parameters.*recsa_trained_length"):
        stretched(ids)
    shared = distilled_model()
    shared.model.layers[0].self_attn.pooler.mesh = object()
    with pytest.raises(ValueError, match="recsa_distill_weight.*tensor parallelism"):
        shared(ids)


@pytest.mark.parametrize("how", ["head", "adapter", "pooler and head"])
def test_a_head_that_learns_sees_what_it_will_see(how):
    """A language-model head trained over a frozen decoder: its logits are those of the sparse walk."""
    model, ids = distilled_model(frozen=True), random_ids(1, LENGTH)
    if how == "adapter":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"], modules_to_save=["pooler"]))
    else:
        model.lm_head.weight.requires_grad_(True)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and (how != "head" or not is_pooler(name)))
    found = model.train()(ids)
    with torch.no_grad():
        expected = model.eval()(ids).logits
    torch.testing.assert_close(found.logits, expected, rtol=1e-9, atol=1e-9)
    assert found.distill_loss > 0


def test_a_frozen_model_has_no_matrices_and_traces_its_teacher():
    model, ids = distilled_model(frozen=True), random_ids(1, LENGTH)
    with pytest.raises(ValueError, match="output_attentions"):
        model(ids, output_attentions=True)
    with recsa_trace(model) as trace:
        model(ids)
    assert [(layer, one.backend, one.selection) for layer, one in trace.forwards[0].items()] == [
        (layer, "dense", {}) for layer in range(model.config.num_hidden_layers)
    ]


def test_an_answer_mask_is_ignored_elsewhere():
    """In evaluation, and without the weight; any shape that a caller's data has."""
    ids, mask = random_ids(1, 20), torch.ones(1, 3)
    assert distilled_model().eval()(ids, answer_mask=mask).distill_loss is None
    assert distilled_model(recsa_distill_weight=0.0)(ids, labels=ids, answer_mask=mask).distill_loss is None


# ---- recall ---------------------------------------------------------------------------------------------------------


def recall_by_hand(model, ids, positions, targets, threshold) -> list[Recall]:
    """Pair by pair, from the oracle's walk and dense attention that is written out."""
    config, theta = model.config, model.config.rope_parameters["rope_theta"]
    group = config.num_attention_heads // config.num_key_value_heads
    rope = rotary_tables(config, ids.device, LENGTH)
    found = []
    for (query, key), layer in zip(states_of_layers(model, ids), model.model.layers, strict=True):
        recall, pooler = Recall(), layer.self_attn.pooler
        for row, head in ((row, head) for row in range(len(ids)) for head in range(config.num_key_value_heads)):
            weights = pooler.query[head].detach(), pooler.slot_bias.detach(), pooler.proj[head].detach()
            tree = oracle.build_tree(key[row, head], key[row, head], *weights, BRANCHING)
            for index, t in enumerate(positions[row].tolist()):
                if t < 0:
                    continue
                heads = slice(head * group, (head + 1) * group)
                mass = dense_attention(query[row, heads], key[row, head : head + 1], t, theta).amax(0)
                if targets is None:
                    far = {token: mass[token].item() for token in range(BRANCHING, t - t // 4)}
                    token = max(far, key=far.get, default=-1)
                else:
                    token = int(targets[row, index])
                if not 0 <= token <= t or mass[token] <= threshold:
                    continue
                chosen = oracle.attend(
                    query[row, heads, t],
                    tree,
                    t,
                    r=BRANCHING,
                    k=config.recsa_top_k,
                    s=config.recsa_recent,
                    M=config.recsa_top_capacity,
                    scaling=config.head_dim**-0.5,
                    cos=rope[0],
                    sin=rope[1],
                )[1]
                recall.pairs += 1
                for level in sorted(chosen, reverse=True):
                    recall.asked[level] += 1
                    if token // BRANCHING**level not in chosen[level]:
                        break
                    recall.chosen[level] += 1
                else:
                    recall.reached += 1
        found.append(recall)
    return found


@pytest.mark.parametrize("given", [False, True])
def test_needle_recall(given):
    """Two depths of walk and dense queries, targets given or found; -1 where a row has fewer."""
    model = tiny_model(recsa_top_capacity=16).double()
    length = 150
    ids = random_ids(2, length)
    positions = torch.randint(DENSE - 4, length, (2, 40))
    positions[0, 5] = -1
    targets = (torch.rand(2, 40) * (positions + 3)).long() - 1 if given else None
    if given:
        targets = targets.clamp(max=length - 1)
    threshold = 0.02 if given else 0.1
    expected = recall_by_hand(model, ids, positions, targets, threshold)
    found = needle_recall(model, ids, positions, targets, threshold=threshold)
    assert [vars(one) for one in found] == [vars(one) for one in expected]
    total = sum(found, Recall())
    assert total.pairs == sum(one.pairs for one in expected) > 0 and set(total.by_level) == {1, 2}
    assert 0 < total.reach < 1 and total.reach == total.reached / total.pairs
    assert all(share == total.chosen[level] / total.asked[level] for level, share in total.by_level.items())
    assert not model.model.layers[0].self_attn.q_norm._forward_hooks


def test_needle_recall_refuses_by_name():
    model = tiny_model()
    ids = random_ids(1, 30)
    with pytest.raises(ValueError, match="positions"):
        needle_recall(model, ids, torch.tensor([[30]]))
    with pytest.raises(ValueError, match="targets: shape"):
        needle_recall(model, ids, torch.tensor([[20]]), torch.tensor([[3, 4]]))
    with pytest.raises(ValueError, match="RecSA"):
        needle_recall(torch.nn.Linear(2, 2), ids, torch.tensor([[20]]))
    assert torch.isnan(torch.tensor(needle_recall(model, ids, torch.tensor([[-1]]))[0].reach))


# ---- kernels --------------------------------------------------------------------------------------------------------
