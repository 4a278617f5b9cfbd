"""The models as users call them: Auto classes, heads, stock Qwen3 below M, what `forward` takes and returns.

What a query reads is judged in test_attention.py, caches and generation in their own files.
"""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
)

import recsa_qwen3
from conftest import DENSE, LENGTHS, LOGITS_ATOL, TINY, random_ids, tiny_config, tiny_model
from fresh import run_fresh
from recsa_qwen3 import (
    RecSACache,
    RecSAQwen3ForCausalLM,
    RecSAQwen3ForQuestionAnswering,
    RecSAQwen3ForSequenceClassification,
    RecSAQwen3ForTokenClassification,
    RecSAQwen3Model,
    attention_recsa_qwen3,
    kernels_walk_recsa_qwen3,
    modeling_recsa_qwen3,
    recsa_trace,
)

torch.set_num_threads(1)

CLASSES = {
    AutoModel: RecSAQwen3Model,
    AutoModelForCausalLM: RecSAQwen3ForCausalLM,
    AutoModelForSequenceClassification: RecSAQwen3ForSequenceClassification,
    AutoModelForTokenClassification: RecSAQwen3ForTokenClassification,
    AutoModelForQuestionAnswering: RecSAQwen3ForQuestionAnswering,
}
POOLER = ("query", "slot_bias", "proj")


# ---- helpers --------------------------------------------------------------------------------------------------------


def stock_config(config, **changes) -> Qwen3Config:
    """Stock Qwen3's configuration with the same fields."""
    own = ("recsa_", "model_type", "auto_map", "architectures", "transformers_version")
    fields = {name: value for name, value in config.to_dict().items() if not name.startswith(own)}
    return Qwen3Config(**{**fields, "attn_implementation": config._attn_implementation, **changes})


def stock_twin(model, stock_class=Qwen3ForCausalLM, **changes):
    """Stock Qwen3 with the weights of `model`, in eval mode."""
    # not `.to(dtype)`: that would round the frequencies of its RoPE
    twin = stock_class._from_config(stock_config(model.config, **changes), dtype=model.dtype)
    weights = {name: tensor for name, tensor in model.state_dict().items() if ".pooler." not in name}
    twin.load_state_dict(weights)
    return twin.eval()


def randomise_biases(model):
    """Biases start at zero, where a lost one would not be noticed."""
    for name, parameter in model.named_parameters():
        if name.endswith("_proj.bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def assert_sparse(model, length: int) -> None:
    """Something was left out exactly where the last forward was longer than M."""
    assert model.last_backend == ("dense+reference" if length > DENSE else "dense")


def padded(rows: list[torch.Tensor], side: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask `[B, T]` of rows `[T_b]`, padded on one side."""
    width = max(len(row) for row in rows)
    ids, mask = torch.full((2, len(rows), width), TINY["pad_token_id"])
    for b, row in enumerate(rows):
        place = slice(width - len(row), None) if side == "left" else slice(len(row))
        ids[b, place], mask[b, place] = row, 1
    return ids, mask


# ---- RC-07: Auto classes and heads ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def causal_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("causal") / "model"
    tiny_model(num_labels=3).save_pretrained(folder)
    return folder


AUTO_CLASSES_BY_REMOTE_CODE = """
load = {"trust_remote_code": True}
config = AutoConfig.from_pretrained(args[0], **load)
results = {}
for name in args[1:]:
    auto = getattr(transformers, name)
    model, info = auto.from_pretrained(args[0], output_loading_info=True, **load)
    other = auto.from_config(config, **load)
    with torch.no_grad():
        first = model.eval()(prompt(), use_cache=False, return_dict=False)[0]
        assert first.isfinite().all() and other.eval()(prompt(), use_cache=False)[0].shape == first.shape
    results[name] = {
        "classes": [type(model).__name__, type(other).__name__],
        "remote": type(model).__module__.startswith("transformers_modules") and type(other) is type(model),
        "missing": sorted(info["missing_keys"]),
        "backend": model.last_backend,
    }
report(config=type(config).__name__, results=results)
"""


def test_every_auto_class_by_remote_code(causal_folder, tmp_path):
    """RC-07: from_pretrained and from_config of a saved folder in a process without the package."""
    names = [auto.__name__ for auto in CLASSES]
    run = run_fresh(AUTO_CLASSES_BY_REMOTE_CODE, causal_folder, *names, home=tmp_path / "home")
    assert not run["own_package"] and run["config"] == "RecSAQwen3Config"
    for auto, own in CLASSES.items():
        result = run["results"][auto.__name__]
        assert result["classes"] == [own.__name__] * 2 and result["remote"]
        assert result["missing"] == NEW_KEYS[own] and result["backend"] == "dense+reference"


# What a causal checkpoint lacks for each head.
NEW_KEYS = {
    RecSAQwen3Model: [],
    RecSAQwen3ForCausalLM: [],
    RecSAQwen3ForSequenceClassification: ["score.weight"],
    RecSAQwen3ForTokenClassification: ["score.bias", "score.weight"],
    RecSAQwen3ForQuestionAnswering: ["qa_outputs.bias", "qa_outputs.weight"],
}


@pytest.mark.parametrize(("auto", "own"), CLASSES.items(), ids=[own.__name__ for own in CLASSES.values()])
def test_every_auto_class_with_the_package_imported(auto, own, causal_folder):
    """RC-07: no `trust_remote_code` needed; a causal checkpoint becomes any head, its decoder's weights bit equal."""
    assert type(AutoConfig.from_pretrained(causal_folder)) is recsa_qwen3.RecSAQwen3Config
    assert type(auto.from_config(tiny_config())) is own
    model, info = auto.from_pretrained(causal_folder, output_loading_info=True)
    assert type(model) is own and not model.training
    assert sorted(info["missing_keys"]) == NEW_KEYS[own]
    assert set(info["unexpected_keys"]) <= ({"lm_head.weight"} if own is not RecSAQwen3ForCausalLM else set())
    prefix = "" if own is RecSAQwen3Model else "model."
    source = tiny_model(num_labels=3).model.state_dict()
    state = model.state_dict()
    assert all(torch.equal(state[prefix + name], tensor) for name, tensor in source.items())
    for name in NEW_KEYS[own]:
        assert state[name].isfinite().all() and (state[name].any() or name.endswith("bias"))
    for length in LENGTHS:
        with torch.no_grad():
            assert model(random_ids(2, length))[0].isfinite().all()
        assert_sparse(model, length)


def test_base_model_checkpoint_becomes_a_causal_model(tmp_path):
    """RC-07: the other direction, where only the head is new."""
    base = tiny_model(RecSAQwen3Model)
    base.save_pretrained(tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {"lm_head.weight"}
    assert all(torch.equal(model.model.state_dict()[name], tensor) for name, tensor in base.state_dict().items())


@pytest.mark.parametrize("side", ["left", "right"])
def test_classifier_reads_the_last_real_token(side):
    """RC-07: lengths 5, 70, 33 in one batch, padded on either side, equal single rows."""
    model = tiny_model(RecSAQwen3ForSequenceClassification, num_labels=4)
    rows = [random_ids(length) for length in (5, 70, 33)]
    ids, mask = padded(rows, side)
    labels = torch.tensor([0, 3, 1])
    with torch.no_grad():
        single = torch.cat([model(row[None]).logits for row in rows])
        together = model(ids, attention_mask=mask, labels=labels)
        assert_sparse(model, 70)
        by_embeds = model(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask).logits
    torch.testing.assert_close(together.logits, single, atol=LOGITS_ATOL, rtol=0)
    torch.testing.assert_close(by_embeds, single, atol=LOGITS_ATOL, rtol=0)
    torch.testing.assert_close(together.loss, torch.nn.functional.cross_entropy(single, labels))
    if side == "right":  # without a mask the pad id tells where a row ends
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, single, atol=LOGITS_ATOL, rtol=0)


def test_classifier_without_pad_id():
    """RC-07: a batch whose rows cannot be told from padding is refused; one row, or a mask, is enough."""
    model = tiny_model(RecSAQwen3ForSequenceClassification, pad_token_id=None, num_labels=4)
    ids = random_ids(2, 20)
    with pytest.raises(ValueError, match="pad_token_id.*attention_mask"):
        model(ids)
    with torch.no_grad():
        both = model(ids, attention_mask=torch.ones_like(ids)).logits
        torch.testing.assert_close(model(ids[:1]).logits, both[:1], atol=LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("own", [RecSAQwen3ForTokenClassification, RecSAQwen3ForQuestionAnswering])
def test_token_heads_in_a_padded_batch(own, side):
    """RC-07: per-token outputs of real tokens equal single rows."""
    model = tiny_model(own, num_labels=3)
    rows = [random_ids(length) for length in (5, 70, 33)]
    ids, mask = padded(rows, side)
    with torch.no_grad():
        outputs = model(ids, attention_mask=mask)
        assert_sparse(model, 70)
        for b, row in enumerate(rows):
            single = model(row[None])
            for name in ("logits", "start_logits", "end_logits"):
                if name in single:
                    torch.testing.assert_close(
                        outputs[name][b][mask[b] == 1], single[name][0], atol=LOGITS_ATOL, rtol=0
                    )


def test_losses_of_the_heads_equal_stock_qwen3():
    """Sequence and token classification against stock Qwen3 at T <= M; the span loss against its definition."""
    ids = random_ids(3, DENSE)
    for own, stock, labels in (
        (RecSAQwen3ForSequenceClassification, Qwen3ForSequenceClassification, torch.tensor([1, 0, 2])),
        (RecSAQwen3ForTokenClassification, Qwen3ForTokenClassification, torch.randint(0, 3, (3, DENSE))),
    ):
        model = tiny_model(own, num_labels=3)
        with torch.no_grad():
            ours, theirs = model(ids, labels=labels), stock_twin(model, stock)(ids, labels=labels)
        torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.loss, theirs.loss)
    model = tiny_model(RecSAQwen3ForQuestionAnswering)
    start, end = torch.tensor([0, 3, 15]), torch.tensor([2, 3, 15])
    with torch.no_grad():
        outputs = model(ids, start_positions=start, end_positions=end)
    entropy = torch.nn.functional.cross_entropy
    expected = (entropy(outputs.start_logits, start) + entropy(outputs.end_logits, end)) / 2
    torch.testing.assert_close(outputs.loss, expected)


# ---- stock Qwen3 ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_state_dict_has_the_names_of_qwen3_and_the_poolers(tied):
    """METHOD 7: nothing else, no buffers, and the shapes of both."""
    model = tiny_model(tie_word_embeddings=tied, attention_bias=True)
    stock = Qwen3ForCausalLM(stock_config(model.config))
    poolers = {f"model.layers.{i}.self_attn.pooler.{name}" for i in range(3) for name in POOLER}
    assert set(model.state_dict()) == set(stock.state_dict()) | poolers
    assert all(model.state_dict()[name].shape == tensor.shape for name, tensor in stock.state_dict().items())
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in stock.named_parameters()} | poolers
    assert not list(model.buffers())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("bias_and_tied", [False, True])
def test_equals_stock_qwen3_up_to_m(attention, dtype, bias_and_tied):
    """LD-05, SQ-01: logits and all hidden states, with and without padding, at every interesting T <= M."""
    model = tiny_model(attn_implementation=attention, attention_bias=bias_and_tied, tie_word_embeddings=bias_and_tied)
    model = randomise_biases(model).to(dtype)
    stock = stock_twin(model)
    assert model.config._attn_implementation == stock.config._attn_implementation == attention
    tolerance = dict.fromkeys(("atol", "rtol"), 1e-5 if dtype == torch.float32 else 1e-2)
    for length in (1, 2, DENSE - 1, DENSE):
        ids = random_ids(2, length)
        with torch.no_grad():
            ours = model(ids, output_hidden_states=True)
            theirs = stock(ids, output_hidden_states=True)
        assert model.last_backend == "dense"
        torch.testing.assert_close(ours.logits, theirs.logits, **tolerance)
        assert len(ours.hidden_states) == len(theirs.hidden_states) == model.config.num_hidden_layers + 1
        for one, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
            torch.testing.assert_close(one, other, **tolerance)
    for side in ("left", "right"):
        ids, mask = padded([random_ids(length) for length in (DENSE, 3, 9)], side)
        with torch.no_grad():
            ours = model(ids, attention_mask=mask).logits
            theirs = stock(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
        torch.testing.assert_close(ours[mask == 1], theirs[mask == 1], **tolerance)


def test_differs_from_stock_qwen3_beyond_m():
    """The comparison above can fail: from T = M + 1 on something is left out."""
    model = tiny_model()
    ids = random_ids(1, DENSE + 1)
    with torch.no_grad():
        gap = (model(ids).logits - stock_twin(model)(ids).logits).abs().amax(-1)[0]
    assert gap[:DENSE].max() < 1e-4 < gap[DENSE]


def test_dense_option_equals_stock_qwen3_at_any_length():
    """recsa_top_k=None: the honest comparison."""
    model = tiny_model(recsa_top_k=None)
    ids = random_ids(2, 4 * DENSE + 3)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock_twin(model)(ids).logits, atol=1e-4, rtol=0)
    assert model.last_backend == "dense"


# ---- what forward returns -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_attentions_equal_stock_qwen3_up_to_m(attention, side):
    """Extra: the matrices of the eager path, padding included, whichever implementation runs."""
    model = tiny_model(attn_implementation=attention)
    stock = stock_twin(model, attn_implementation="eager")
    ids, mask = padded([random_ids(length) for length in (DENSE, DENSE if side is None else 5)], side or "left")
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, output_attentions=True)
        theirs = stock(
            ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), output_attentions=True
        )
    assert len(ours.attentions) == len(theirs.attentions) == model.config.num_hidden_layers
    for one, other in zip(ours.attentions, theirs.attentions, strict=True):
        assert one.shape == other.shape == (2, 4, DENSE, DENSE)
        rows = mask[:, None, :, None].eq(1).expand_as(one)
        torch.testing.assert_close(one[rows], other[rows], atol=1e-5, rtol=0)
        assert not one[~rows].any()
    valid = mask == 1
    torch.testing.assert_close(ours.logits[valid], theirs.logits[valid], atol=LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize("length", LENGTHS)
def test_attentions_are_distributions_over_the_past(length):
    """Extra: rows sum to 1 and are causal, beyond M too, in a padded batch, with a cache, and give the same logits."""
    model = tiny_model()
    ids, mask = padded([random_ids(length), random_ids(length // 2)], "left")
    with torch.no_grad():
        outputs = model(ids, attention_mask=mask, output_attentions=True, use_cache=False)
        assert_sparse(model, length)
        plain = model(ids, attention_mask=mask, use_cache=False)
        cache = RecSACache(model.config)
        model(ids[:, :-2], attention_mask=mask[:, :-2], past_key_values=cache)
        step = model(ids[:, -2:], attention_mask=mask, past_key_values=cache, output_attentions=True)
    assert plain.attentions is None
    valid = mask == 1
    torch.testing.assert_close(outputs.logits[valid], plain.logits[valid], atol=LOGITS_ATOL, rtol=0)
    for weights, stepped in zip(outputs.attentions, step.attentions, strict=True):
        assert weights.shape == (2, 4, length, length) and (weights >= 0).all()
        assert not weights.triu(1).any()
        assert not (weights * (1 - mask[:, None, None, :])).any()
        torch.testing.assert_close(weights.sum(-1), mask[:, None, :].float().expand(2, 4, length), atol=1e-5, rtol=0)
        torch.testing.assert_close(stepped, weights[:, :, -2:], atol=LOGITS_ATOL, rtol=0)


def test_attentions_are_refused_by_name(monkeypatch):
    """Extra: never a tuple of None, never a matrix that cannot fit."""
    model = tiny_model()
    ids = random_ids(1, 40)
    with pytest.raises(ValueError, match="output_attentions.*packed"):
        model(ids, position_ids=torch.cat([torch.arange(30), torch.arange(10)])[None], output_attentions=True)
    monkeypatch.setattr(attention_recsa_qwen3, "_MAX_WEIGHTS", 4 * 40 * 40 - 1)
    with pytest.raises(ValueError, match="output_attentions.*too large"):
        model(ids, output_attentions=True)
    model(ids[:, 1:], output_attentions=True)


@pytest.mark.parametrize("length", LENGTHS)
def test_hidden_states_and_tuples(length):
    """Extra: one state per layer and the embeddings, flags by argument or configuration, `return_dict=False`."""
    model = tiny_model()
    ids = random_ids(2, length)
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True, output_attentions=True, use_cache=False)
        bare = model.model(ids, output_hidden_states=True)
        assert len(outputs.hidden_states) == len(bare.hidden_states) == model.config.num_hidden_layers + 1
        assert torch.equal(outputs.hidden_states[0], model.get_input_embeddings()(ids))
        torch.testing.assert_close(model.lm_head(outputs.hidden_states[-1]), outputs.logits)
        assert torch.equal(bare.hidden_states[-1], bare.last_hidden_state)
        as_tuple = model(ids, output_hidden_states=True, output_attentions=True, use_cache=False, return_dict=False)
        assert isinstance(as_tuple, tuple) and len(as_tuple) == 3
        assert torch.equal(as_tuple[0], outputs.logits)
        assert all(torch.equal(a, b) for a, b in zip(as_tuple[1], outputs.hidden_states, strict=True))
        model.config.output_hidden_states = True
        assert len(model(ids).hidden_states) == model.config.num_hidden_layers + 1
    assert_sparse(model, length)


def test_loss_equals_stock_qwen3():
    """Labels with -100, and the trainer's `num_items_in_batch`."""
    model = tiny_model()
    stock = stock_twin(model)
    ids = random_ids(2, DENSE)
    labels = torch.where(torch.rand(2, DENSE) < 0.3, -100, ids)
    for extra in ({}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}):
        with torch.no_grad():
            ours, theirs = model(ids, labels=labels, **extra), stock(ids, labels=labels, **extra)
        torch.testing.assert_close(ours.loss, theirs.loss)
        assert ours.logits.shape == theirs.logits.shape
    length = 4 * DENSE + 1
    ids = random_ids(2, length)
    labels = torch.where(torch.rand(2, length) < 0.3, -100, ids)
    with torch.no_grad():
        outputs = model(ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)
    assert_sparse(model, length)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("use_cache", [False, True])
def test_inputs_embeds_and_logits_to_keep(length, use_cache):
    """LP-01: slices of the whole result, also where a prompt goes through in chunks."""
    model = tiny_model(recsa_prefill_chunk=7)
    ids = random_ids(2, length)
    with torch.no_grad():
        everything = model(ids, use_cache=use_cache).logits
        by_embeds = model(inputs_embeds=model.get_input_embeddings()(ids), use_cache=use_cache).logits
        torch.testing.assert_close(by_embeds, everything, atol=LOGITS_ATOL, rtol=0)
        for keep, expected in (
            (0, everything),
            (1, everything[:, -1:]),
            (5, everything[:, -5:]),
            (torch.tensor([0, 3, length - 1]), everything[:, [0, 3, length - 1]]),
        ):
            logits = model(ids, use_cache=use_cache, logits_to_keep=keep).logits
            torch.testing.assert_close(logits, expected, atol=LOGITS_ATOL, rtol=0)


# ---- recsa_trace and last_backend -----------------------------------------------------------------------------------


def test_trace_holds_what_the_operator_chose(monkeypatch):
    """SQ-01: the operator's own selection, by column, per layer and level; nothing outside the block."""
    model = tiny_model()
    chosen = []
    operator = modeling_recsa_qwen3.recsa_attention

    def recorded(*args, **kwargs):
        result = operator(*args, **kwargs)
        chosen.append(result)
        return result

    monkeypatch.setattr(modeling_recsa_qwen3, "recsa_attention", recorded)
    ids, mask = padded([random_ids(length) for length in (4 * DENSE + 6, DENSE + 1, DENSE - 3)], "left")
    with torch.no_grad():
        model(ids, attention_mask=mask)
        assert chosen[-1].selection is None  # free when unused
        chosen.clear()
        with recsa_trace(model) as trace:
            model(ids, attention_mask=mask, use_cache=False)
        model(ids, attention_mask=mask)
    assert len(trace.forwards) == 1 and sorted(trace.forwards[0]) == [0, 1, 2]
    for layer, entry in trace.forwards[0].items():
        assert entry.backend == chosen[layer].backend == "dense+reference"
        assert sorted(entry.selection) == sorted(chosen[layer].selection) == [1, 2]
        for level, nodes in entry.selection.items():
            assert nodes.shape == (3, 2, ids.shape[1], 4) and nodes.dtype == torch.long
            for b, count in enumerate(mask.sum(1).tolist()):
                assert torch.equal(nodes[b, :, -count:], chosen[layer].selection[level][b, :, :count])
                assert (nodes[b, :, :-count] == -1).all()
                position = torch.arange(count)[None, :, None].expand(2, count, 4)
                sparse = position >= DENSE * 4 ** (level - 1)
                own = nodes[b, :, -count:]
                assert (own[~sparse] == -1).all()
                assert ((own[sparse] >= 0) & (own[sparse] <= position[sparse] // 4**level)).all()
                # k of the more than k candidates: some key was left out
                assert (own.diff(dim=-1)[sparse[..., 1:]] > 0).all()


def test_trace_of_a_chunked_prefill_and_decode():
    """The same selection in one pass, in chunks, and token by token; one entry per chunk."""
    model = tiny_model().double()  # float64, so that no near-tie is decided by rounding
    ids = random_ids(2, 4 * DENSE + 6)
    with torch.no_grad():
        with recsa_trace(model) as trace:
            model(ids, use_cache=False)
        cache = RecSACache(model.config)
        with recsa_trace(model) as parts:
            model(ids[:, :-3], past_key_values=cache, prefill_chunk_size=20)
            assert model.last_backend == "dense+reference"  # over all chunks
            for column in range(ids.shape[1] - 3, ids.shape[1]):
                model(ids[:, column : column + 1], past_key_values=cache)
    assert len(parts.forwards) == 4 + 3
    for layer, entry in trace.forwards[0].items():
        for level, nodes in entry.selection.items():
            missing = [forward[layer].selection.get(level) for forward in parts.forwards]
            widths = [20, 20, 20, 7, 1, 1, 1]
            assert nodes.shape[2] == sum(widths)
            for one, expected in zip(missing, nodes.split(widths, 2), strict=True):
                assert torch.equal(expected if one is None else one, expected)
                assert one is not None or (expected == -1).all()


def test_trace_ends_with_its_block():
    """Also after an exception; a model without RecSA is refused."""
    model = tiny_model()
    with pytest.raises(RuntimeError, match="stop"), recsa_trace(model):
        raise RuntimeError("stop")
    assert all(layer.self_attn.trace is None for layer in model.model.layers)
    with pytest.raises(ValueError, match="no RecSA attention"), recsa_trace(stock_twin(model)):
        pass


def test_last_backend_tells_what_ran():
    """SQ-01: a public answer to "which path was that?"."""
    model = tiny_model()
    assert model.last_backend is None and model.model.last_backend is None
    with torch.no_grad():
        cache = RecSACache(model.config)
        for width, expected in ((DENSE, "dense"), (1, "reference"), (4 * DENSE, "reference")):
            model(random_ids(1, width), past_key_values=cache)
            assert model.last_backend == model.model.last_backend == expected
        model(random_ids(1, 2 * DENSE))
        assert model.last_backend == "dense+reference"


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_backend_that_cannot_run_is_refused_by_name(monkeypatch):
    """RC-06, SQ-05: asked for by name on a CPU; never a silent fall to another path, at any length."""
    monkeypatch.setattr(kernels_walk_recsa_qwen3, "interpreted", lambda: False)
    model = tiny_model(recsa_backend="triton")
    for length in LENGTHS:
        with pytest.raises((ValueError, RuntimeError), match="recsa_backend='triton'"):
            model(random_ids(1, length))
    model.config.recsa_backend = "reference"
    model(random_ids(1, DENSE))


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_implementations_without_support_are_refused(name):
    """By transformers, from the flags of the class, at construction and later."""
    word = name.split("_")[0]
    with pytest.raises((ValueError, ImportError), match=f"(?i){word}"):
        RecSAQwen3ForCausalLM._from_config(tiny_config(), attn_implementation=name)
    model = tiny_model()
    with pytest.raises((ValueError, ImportError), match=f"(?i){word}"):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "sdpa"


def test_attention_implementation_may_change_later(monkeypatch):
    """`set_attn_implementation` reaches the dense queries."""
    model = tiny_model()
    ids = random_ids(1, DENSE + 1)
    with torch.no_grad():
        expected = model(ids).logits
        model.set_attn_implementation("eager")
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
        torch.testing.assert_close(model(ids).logits, expected, atol=LOGITS_ATOL, rtol=0)


def test_inputs_that_contradict_each_other_are_refused():
    """Each names the argument."""
    model = tiny_model()
    ids = random_ids(1, 20)
    cache = RecSACache(model.config)
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
        model(ids, inputs_embeds=model.get_input_embeddings()(ids))
    with pytest.raises(ValueError, match="input_ids: no new tokens"):
        model(ids[:, :0])
    with pytest.raises(ValueError, match="cache and past_key_values"):
        model(ids, cache=cache, past_key_values=cache)
    for mask in (torch.ones(1, 19), torch.ones(1, 1, 20, 20), {"full_attention": None}):
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="position_ids"):
        model(ids, position_ids=torch.arange(0, 40, 2)[None])


@pytest.mark.parametrize("padding_row", [0, 1])
def test_packed_documents_beside_a_row_of_padding(padding_row):
    """TR-05: as many documents as rows, but one row holds two of them and the other none."""
    model = tiny_model()
    ids, mask = random_ids(2, 70), torch.ones(2, 70, dtype=torch.long)
    mask[padding_row] = 0
    position_ids = torch.cat([torch.arange(50), torch.arange(20)]).expand(2, -1)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=position_ids).logits[1 - padding_row]
        row = ids[1 - padding_row][None]
        expected = torch.cat([model(part).logits[0] for part in row.split((50, 20), 1)])
    torch.testing.assert_close(logits, expected, atol=LOGITS_ATOL, rtol=0)


@pytest.mark.parametrize("length", LENGTHS)
def test_cache_is_accepted_under_both_names(length):
    """STYLE: one name before 5.24, another from there on; a forward that knows one of them decodes wrongly."""
    model = tiny_model()
    ids = random_ids(1, length)
    field = modeling_recsa_qwen3.CACHE_FIELD
    with torch.no_grad():
        expected = model(ids, use_cache=False)
        assert expected[field] is None if field in expected else True
        for name in ("cache", "past_key_values"):
            cache = RecSACache(model.config)
            first = model(ids[:, :-2], **{name: cache})
            assert getattr(first, field) is cache
            logits = model(ids[:, -2:], **{name: cache}).logits
            torch.testing.assert_close(logits, expected.logits[:, -2:], atol=LOGITS_ATOL, rtol=0)
        own = getattr(model(ids), field)
    assert type(own) is RecSACache and own.get_seq_length() == length


# ---- what tools rely on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
def test_decoder_layer_runs_alone(length):
    """Extra: calibration by layers calls each with captured keywords, cache None, or with the hidden states alone."""
    model = tiny_model()
    captured = []

    def capture(module, args, kwargs, output):
        captured.append((module, args, kwargs, output[0]))

    hooks = [layer.register_forward_hook(capture, with_kwargs=True) for layer in model.model.layers]
    with torch.no_grad():
        model(random_ids(2, length), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(captured) == model.config.num_hidden_layers
    for layer, args, kwargs, expected in captured:
        with torch.no_grad():
            assert torch.equal(layer(*args, **{**kwargs, "cache": None})[0], expected)
            assert torch.equal(layer(*args)[0], expected)
            others = {"attention_mask": None, "position_ids": None, "position_embeddings": None, "use_cache": False}
            assert torch.equal(layer(*args, **others)[0], expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("size", [TINY["vocab_size"] + 13, TINY["vocab_size"] - 20])
def test_resized_vocabulary(tied, size, tmp_path):
    """Extra: up and down, tied or not, saved and loaded; kept rows keep their values."""
    model = tiny_model(tie_word_embeddings=tied)
    kept = min(size, TINY["vocab_size"])
    ids = random_ids(1, 4 * DENSE, vocab_size=kept)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(size)
        after = model(ids).logits
    torch.testing.assert_close(after[..., :kept], before[..., :kept], atol=1e-6, rtol=0)
    assert after.shape[-1] == size == model.config.vocab_size == model.vocab_size == model.lm_head.out_features
    shared = model.lm_head.weight is model.get_input_embeddings().weight
    assert shared == tied
    model.save_pretrained(tmp_path)
    loaded = RecSAQwen3ForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == size
    assert (loaded.lm_head.weight is loaded.get_input_embeddings().weight) == tied
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, after)


def test_tensor_parallel_plan_is_present():
    """`tp_plan="auto"` finds the projections and the head."""
    model = tiny_model()
    plan = model._tp_plan
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert any(key.endswith(f"layers.*.self_attn.{name}") for key in plan), name
    assert any(key.endswith("mlp.down_proj") for key in plan) and "lm_head" in plan


def test_saved_configuration_names_every_head(causal_folder):
    """RC-07: saving one head keeps the entries of all the others."""
    auto_map = json.loads((causal_folder / "config.json").read_text())["auto_map"]
    expected = {auto.__name__: f"modeling_recsa_qwen3.{own.__name__}" for auto, own in CLASSES.items()}
    assert auto_map == {**expected, "AutoConfig": "configuration_recsa_qwen3.RecSAQwen3Config"}


def test_last_backend_covers_all_chunks_of_a_prefill():
    model = tiny_model(recsa_prefill_chunk=DENSE)
    with torch.no_grad():
        model(random_ids(1, 4 * DENSE), use_cache=True)
    assert model.last_backend == model.model.last_backend == "dense+reference"


def test_a_trace_inside_another_hands_back_to_it():
    model, ids = tiny_model(), random_ids(1, 4 * DENSE)
    with torch.no_grad(), recsa_trace(model) as outer:
        with recsa_trace(model) as inner:
            model(ids, use_cache=False)
        model(ids, use_cache=False)
    assert len(inner.forwards) == len(outer.forwards) == 1
    assert torch.equal(inner.forwards[0][0].selection[1], outer.forwards[0][0].selection[1])
