"""What is allocated, written and kept: no quadratic tensors, no full-prompt logits, no copies of the cache per step.

A dispatch mode watches every operator call, so these tests see tensors that nobody returns.
"""

import gc
import statistics
import weakref

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from conftest import LOGITS_ATOL, random_ids, tiny_model
from recsa_qwen3 import RecSACache, TreeGeometry, cache_layer_recsa_qwen3, modeling_recsa_qwen3
from recsa_qwen3.rows_recsa_qwen3 import Rows

torch.set_num_threads(1)

# One layer of the size that shows a quadratic tensor quickly; no field of it reaches 64 * heads elements per token.
SMALL = dict(
    num_hidden_layers=1,
    hidden_size=32,
    intermediate_size=64,
    head_dim=16,
    vocab_size=128,
    recsa_branching=8,
    recsa_top_k=8,
    recsa_top_capacity=64,
)
HEADS = 4


class Watch(TorchDispatchMode):
    """Largest tensor, peak of the live bytes, and bytes written by each operator call inside the block.

    Views write nothing; an in-place operator writes the elements that it is given.
    """

    def __init__(self):
        super().__init__()
        self.largest = self.live = self.peak = self.written = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        values = result if isinstance(result, (tuple, list)) and len(returns) > 1 else (result,)
        for declared, value in zip(returns, values, strict=True):
            for tensor in tree_leaves(value):
                if not isinstance(tensor, torch.Tensor):
                    continue
                if declared.alias_info is None:
                    self._track(tensor)
                if declared.alias_info is None or declared.alias_info.is_write:
                    self.written += tensor.numel() * tensor.element_size()
        if not returns and func._schema.is_mutable:
            written = zip(func._schema.arguments, args, strict=False)
            for declared, value in written:
                if declared.alias_info is not None and declared.alias_info.is_write:
                    self.written += sum(t.numel() * t.element_size() for t in tree_leaves(value))
        return result

    def _track(self, tensor: torch.Tensor) -> None:
        self.largest = max(self.largest, tensor.numel())
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        size = storage.nbytes()
        self._known.add(storage._cdata)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage._cdata, size)

    def _forget(self, number: int, size: int) -> None:
        self._known.discard(number)
        self.live -= size


def test_the_watch_itself():
    """Views cost nothing, in-place writes and new tensors do, and what dies is no longer counted."""
    base = torch.zeros(100, 100)
    with Watch() as watch:
        base[3:5].add_(1)
    assert watch.written == 2 * 100 * 4 and watch.peak == 0
    with Watch() as watch:
        (base.t()[:7] + 1).sum()
        base[0] = torch.ones(100)
    assert watch.written == 7 * 100 * 4 + 4 + 2 * 100 * 4 and watch.largest == 700
    with Watch() as watch:
        for _ in range(5):
            torch.ones(1000)
        kept = torch.ones(200).view(2, 100)[0]
        gc.collect()
        assert watch.live == kept.untyped_storage().nbytes() == 800
        del kept
    assert watch.live == 0 and watch.peak == 4000


# ---- prefill --------------------------------------------------------------------------------------------------------


def watched_prefill(tokens: int, mask: torch.Tensor | None, **options) -> Watch:
    model = tiny_model(**SMALL)
    ids = random_ids(1, tokens, vocab_size=128)
    with torch.no_grad(), Watch() as watch:
        model(ids, attention_mask=mask, **options)
    assert "reference" in model.last_backend
    return watch


@pytest.mark.parametrize(
    ("mask", "cached"),
    [("no mask", False), ("mask of ones", True), ("one left pad", False), ("one left pad", True)],
)
def test_no_quadratic_tensor(mask, cached):
    """LP-02: no tensor above tokens * 64 * heads elements, and a peak that grows with the length."""
    peaks = []
    for tokens in (4096, 8192, 16384):
        given = None if mask == "no mask" else torch.ones(1, tokens, dtype=torch.long)
        if mask == "one left pad":
            given[0, 0] = 0
        watch = watched_prefill(tokens, given, use_cache=cached, logits_to_keep=0 if tokens == 4096 else 1)
        assert watch.largest <= tokens * 64 * HEADS
        peaks.append(watch.peak)
    assert peaks[2] < 2.4 * peaks[1]


def test_no_quadratic_tensor_in_training():
    """LP-02, and the recomputed blocks: a training step's peak grows with the length alone."""
    model = tiny_model(**SMALL).train()
    peaks = []
    for tokens in (2048, 4096):
        ids = random_ids(1, tokens, vocab_size=128)
        with Watch() as watch:
            model(ids, labels=ids).loss.backward()
        assert watch.largest <= max(tokens * 64 * HEADS, 1 << 20)
        peaks.append(watch.peak)
    assert peaks[1] < 2.4 * peaks[0]


@pytest.mark.parametrize("top_k", [8, None])
def test_dense_prefill_makes_no_mask(top_k):
    """LP-02: below M, and at every length where nothing is left out, no tokens x tokens mask is needed."""
    model = tiny_model(**{**SMALL, "recsa_top_k": top_k, "recsa_top_capacity": 4096})
    mask = torch.ones(2, 4096, dtype=torch.long)
    mask[1, :7] = 0
    with torch.no_grad(), Watch() as watch:
        model(random_ids(2, 4096, vocab_size=128), attention_mask=mask, use_cache=False, logits_to_keep=1)
    assert model.last_backend == "dense"
    assert watch.largest <= 2 * 4096 * 64 * HEADS


# ---- logits ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def head_rows():
    """A model, and the number of rows per sequence that each call of its head was given."""
    model = tiny_model(**SMALL, recsa_prefill_chunk=256)
    rows: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    return model, rows


def test_prefill_computes_one_row_of_logits(head_rows):
    """LP-01: generation from 2,000 tokens gives the head one row per sequence, however long the prompt."""
    model, rows = head_rows
    with torch.no_grad():
        model.generate(random_ids(2, 2000, vocab_size=128), max_new_tokens=4, do_sample=False)
    assert rows == [1] * 4


def test_logits_to_keep(head_rows):
    """LP-01: 0, 1, 5 and an index tensor are slices of the full result, in one shot and in chunks."""
    model, rows = head_rows
    ids = random_ids(2, 700, vocab_size=128)
    with torch.no_grad():
        full = model(ids, use_cache=False).logits
        for use_cache in (False, True):
            for keep, part in ((0, slice(None)), (1, slice(-1, None)), (5, slice(-5, None))):
                rows.clear()
                logits = model(ids, use_cache=use_cache, logits_to_keep=keep).logits
                assert rows == [keep or 700]
                torch.testing.assert_close(logits, full[:, part], rtol=0, atol=LOGITS_ATOL)
            index = torch.tensor([0, 5, 300, 699])
            logits = model(ids, use_cache=use_cache, logits_to_keep=index).logits
            torch.testing.assert_close(logits, full[:, index], rtol=0, atol=LOGITS_ATOL)
            # more than a chunk, more than there is
            logits = model(ids, use_cache=use_cache, logits_to_keep=300).logits
            torch.testing.assert_close(logits, full[:, -300:], rtol=0, atol=LOGITS_ATOL)
            assert model(ids, use_cache=use_cache, logits_to_keep=701).logits.shape == full.shape


@pytest.mark.parametrize("use_cache", [False, True])
def test_loss(head_rows, use_cache):
    """LP-01: the shifted mean over labelled tokens; ignored labels and `num_items_in_batch` as in every model."""
    model, _ = head_rows
    ids = random_ids(2, 600, vocab_size=128)
    labels = ids.clone()
    labels[0, :400], labels[1, -9:] = -100, -100
    with torch.no_grad():
        out = model(ids, labels=labels, use_cache=use_cache)
        rows = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        number = int((labels[:, 1:] != -100).sum())
        torch.testing.assert_close(out.loss, rows.sum() / number)
        again = model(ids, labels=labels, use_cache=use_cache, num_items_in_batch=torch.tensor(1000)).loss
        torch.testing.assert_close(again, rows.sum() / 1000)


# ---- decoding -------------------------------------------------------------------------------------------------------


def filled_cache(model, tokens: int) -> RecSACache:
    """A cache of random tokens, appended without running the model."""
    cache = RecSACache(model.config)
    kv_heads, head_dim = model.config.num_key_value_heads, model.config.head_dim
    with torch.no_grad():
        for layer, decoder in zip(cache.layers, model.model.layers, strict=True):
            keys, values = torch.randn(2, 1, kv_heads, tokens, head_dim)
            layer.append(keys, values, Rows.whole(1, tokens), tokens, decoder.self_attn.pooler)
    return cache


def test_bytes_written_per_step_do_not_grow():
    """LP-05: a step writes what it reads and a bounded number of nodes; storage grows rarely."""
    model = tiny_model(**SMALL)
    typical = []
    for tokens in (1000, 4000, 16000):
        cache, steps = filled_cache(model, tokens), []
        with torch.no_grad():
            for _ in range(40):
                with Watch() as watch:
                    model(random_ids(1, 1, vocab_size=128), cache=cache)
                steps.append(watch.written)
        assert cache.get_seq_length() == tokens + 40
        typical.append(statistics.median(steps))
        # each level may outgrow its storage once; a second time only after half as many tokens again
        assert sum(step > 1.5 * typical[-1] for step in steps) <= len(cache.layers[0].levels)
    stored = 2 * 4 * 16000 * model.config.num_key_value_heads * model.config.head_dim
    # between 1,000 and 16,000 tokens a walk gains one level
    assert typical[2] < 1.6 * typical[0] and typical[2] < stored / 4


def test_reserved_storage_never_grows():
    """LP-05: a cache made for the final length is never copied by a step."""
    model = tiny_model(**SMALL)
    stores: list[list[int]] = []

    def record(module, args, kwargs):
        cache = kwargs["cache"] if kwargs.get("cache") is not None else kwargs["past_key_values"]
        layer = cache.layers[0]
        if layer.is_initialized:
            stores.append([level.tensors["keys"].data_ptr() for level in layer.levels])

    model.model.register_forward_pre_hook(record, with_kwargs=True)
    with torch.no_grad():
        cache = {modeling_recsa_qwen3.CACHE_FIELD: RecSACache(model.config, reserve=580)}
        model.generate(random_ids(1, 500, vocab_size=128), max_new_tokens=80, do_sample=False, **cache)
    assert len(stores) == 79
    for earlier, later in zip(stores, stores[1:], strict=False):
        assert later[: len(earlier)] == earlier


def test_nodes_built_per_token(monkeypatch):
    """LP-05: one token completes at most one node per level, and each node is built exactly once."""
    model = tiny_model(**SMALL)
    built: list[int] = []
    build_nodes = cache_layer_recsa_qwen3.build_nodes

    def counting(pooler, pooled, values, branching):
        nodes = build_nodes(pooler, pooled, values, branching)
        built.append(nodes.keys.shape[2])
        return nodes

    monkeypatch.setattr(cache_layer_recsa_qwen3, "build_nodes", counting)
    cache = filled_cache(model, 500)
    counts = TreeGeometry.from_config(model.config).node_counts(500)[1:]
    assert built == counts
    total = sum(counts)
    for tokens in range(501, 600):
        built.clear()
        with torch.no_grad():
            model(random_ids(1, 1, vocab_size=128), cache=cache)
        completed = [level for level in range(1, 4) if tokens % 8**level == 0]
        assert built == [1] * len(completed)
        total += len(built)
    assert total == sum(cache.geometry.node_counts(599)[1:])


@pytest.mark.parametrize("how", ["greedy", "beams", "given back"])
def test_finished_caches_are_freed(how, monkeypatch):
    """LP-05: after 20 calls of generate every cache is gone, and no tensor is left behind."""
    model = tiny_model(**SMALL)
    caches: list[weakref.ref] = []

    class Recorded(RecSACache):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            caches.append(weakref.ref(self))

    Recorded.__name__ = RecSACache.__name__
    monkeypatch.setattr(modeling_recsa_qwen3, "RecSACache", Recorded)
    options = dict(max_new_tokens=3, do_sample=False)
    if how == "beams":
        options.update(num_beams=2)
    if how == "given back":
        options.update(return_dict_in_generate=True)
    alive = []
    for call in range(20):
        with torch.no_grad():
            model.generate(random_ids(1, 80, vocab_size=128), **options)
        if call in (1, 19):
            gc.collect()
            alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))
    assert len(caches) == 20 and all(cache() is None for cache in caches)
    assert alive[1] <= alive[0]
