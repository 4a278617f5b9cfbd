"""`RecSACache` and `RecSALayer`: the contract of the installed transformers' own caches, and rearranged rows.

After each operation every row's levels are compared with `build_levels` over that row computed alone, and again after
more tokens, which also shows that what the recursion carries was kept. Models are float64 wherever two paths must
agree, so that no near-tie of a selection can make a test flaky.
"""

import copy
import io
import pickle
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicCache, DynamicLayer

from conftest import DENSE, LOGITS_ATOL, TINY, random_ids, tiny_config, tiny_model
from recsa_qwen3 import (
    RecSACache,
    RecSAPooler,
    RecSAQwen3ForCausalLM,
    build_levels,
    cache_layer_recsa_qwen3,
    recsa_trace,
)
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD
from recsa_qwen3.rows_recsa_qwen3 import Rows

torch.set_num_threads(1)

R = TINY["recsa_branching"]
LAYERS = 2
# Two float64 paths; RMSNorm rounds to float32 inside.
EXACT = 1e-6


@pytest.fixture(scope="module")
def double() -> RecSAQwen3ForCausalLM:
    """TINY with two layers in float64."""
    return tiny_model(num_hidden_layers=LAYERS).double()


class Session:
    """A cache, and the same tokens kept beside it as plain lists.

    Attributes:
        mask: `[B, columns]`, 0 at padding.
        ids: `[B, columns]`.
    """

    def __init__(self, model: RecSAQwen3ForCausalLM, rows: int):
        self.model = model
        self.cache = RecSACache(model.config)
        self.ids = torch.empty(rows, 0, dtype=torch.long)
        self.mask = torch.empty(rows, 0, dtype=torch.long)

    @torch.no_grad()
    def feed(self, columns: int, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Runs random new columns; returns their logits."""
        ids = random_ids(len(self.ids), columns)
        self.ids = torch.cat((self.ids, ids), 1)
        self.mask = torch.cat((self.mask, torch.ones_like(ids) if mask is None else mask.long()), 1)
        return self.model(ids, attention_mask=self.mask, cache=self.cache).logits

    def rearrange(self, indices: Sequence[int]) -> None:
        """What a rearrangement of the cache does to the tokens."""
        self.ids, self.mask = self.ids[indices], self.mask[indices]

    def crop(self, columns: int) -> None:
        """Keeps the first columns of the record."""
        self.ids, self.mask = self.ids[:, :columns], self.mask[:, :columns]

    def row(self, index: int) -> torch.Tensor:
        """One row's tokens `[1, length]`, padding left out."""
        return self.ids[index][self.mask[index].bool()][None]

    @torch.no_grad()
    def check(self) -> None:
        """Every level of every row against `build_levels` over the row alone."""
        cache = self.cache
        lengths = self.mask.sum(1).tolist()
        assert cache.lengths == lengths
        assert cache.get_seq_length() == self.mask.shape[1]
        for index, length in enumerate(lengths):
            if not length:
                continue
            alone = RecSACache(self.model.config)
            self.model(self.row(index), cache=alone)
            for layer, fresh in zip(cache.layers, alone.layers, strict=True):
                assert layer.history.lengths == lengths and layer.get_seq_length() == cache.get_seq_length()
                pooler = self.model.model.layers[cache.layers.index(layer)].self_attn.pooler
                counts = cache.geometry.node_counts(length)
                expected = build_levels(fresh.keys, fresh.values, pooler, R, len(counts) - 1)
                for level, number in enumerate(counts):
                    for got, want in (
                        (layer.node_keys(level), expected.keys[level]),
                        (layer.node_values(level), expected.values[level]),
                    ):
                        torch.testing.assert_close(
                            got[index, :, :number], want[0, :, :number].to(got.dtype), rtol=EXACT, atol=EXACT
                        )

    def check_and_continue(self) -> None:
        """Checks, decodes on over several borders, and compares logits with whole runs of each row."""
        self.check()
        logits = torch.cat([self.feed(1) for _ in range(R + 1)] + [self.feed(R * R + 3)], 1)
        self.check()
        new = logits.shape[1]
        with torch.no_grad():
            for index in range(len(self.ids)):
                whole = self.model(self.row(index), use_cache=False).logits[0, -new:]
                torch.testing.assert_close(logits[index], whole, rtol=0, atol=LOGITS_ATOL)
        assert "reference" in self.model.last_backend


def ragged(model: RecSAQwen3ForCausalLM) -> Session:
    """Three rows: left padding at first, holes in the middle, a run without padding at the end."""
    session = Session(model, 3)
    start = torch.tensor([0, 38, 71])
    session.feed(75, torch.arange(75) >= start[:, None])
    holes = torch.rand(3, 19) < 0.5
    holes[:, -1] = True
    session.feed(19, holes)
    session.feed(1)
    assert 4 * DENSE < max(session.cache.lengths) and len(set(session.cache.lengths)) == 3
    return session


# ---- the contract (CA-12) -------------------------------------------------------------------------------------------

# What each public name of the installed DynamicLayer / DynamicCache must give; a function of the filled object.
REFUSED = (TypeError, NotImplementedError, ValueError)


def _states(batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (batch, TINY["num_key_value_heads"], 2, TINY["head_dim"])
    return torch.randn(shape), torch.randn(shape)


COMMON: dict[str, Callable] = {
    "get_seq_length": lambda c: c.get_seq_length() == 95,
    "get_max_length": lambda c: c.get_max_length() == -1,
    "get_max_cache_shape": lambda c: c.get_max_cache_shape() == -1,
    "is_compileable": lambda c: c.is_compileable is False,
    "is_croppable": lambda c: c.is_croppable is True,
    "reorder_cache": lambda c: c.reorder_cache(torch.tensor([2, 0, 0])) is None,
    "batch_select_indices": lambda c: c.batch_select_indices(torch.tensor([2, 0])) is None,
    "batch_repeat_interleave": lambda c: c.batch_repeat_interleave(2) is None,
    "crop": lambda c: c.crop(-3) is None and c.get_seq_length() == 92,
    "reset": lambda c: c.reset() is None and c.get_seq_length() == 0,
}
LAYER_CONTRACT: dict[str, Callable] = COMMON | {
    "get_mask_sizes": lambda c: c.get_mask_sizes(1) == (96, 0) and c.get_mask_sizes(7) == (102, 0),
    "is_sliding": lambda c: c.is_sliding is False,
    "supports_early_init": lambda c: c.supports_early_init is True,
    "lazy_initialization": lambda c: c.reset() or c.lazy_initialization(*_states()) is None and c.is_initialized,
}
LAYER_REFUSED: dict[str, Callable] = {
    "update": lambda c: c.update(*_states()),
    "offload": lambda c: c.offload(),
    "prefetch": lambda c: c.prefetch(),
}
CACHE_CONTRACT: dict[str, Callable] = COMMON | {
    "get_mask_sizes": lambda c: c.get_mask_sizes(1, 0) == (96, 0) and c.get_mask_sizes(7, LAYERS - 1) == (102, 0),
    "is_sliding": lambda c: c.is_sliding == [False] * LAYERS,
    "is_linear": lambda c: c.is_linear == [False] * LAYERS,
    "is_dummy": lambda c: c.is_dummy == [False] * LAYERS,
    "is_initialized": lambda c: c.is_initialized is True,
    "batch_size": lambda c: c.batch_size == 3,
    "max_batch_size": lambda c: c.max_batch_size == 3,
    "max_cache_len": lambda c: c.max_cache_len == -1,
    "get_query_offset": lambda c: c.get_query_offset() == 95,
    "activate_past_recording": lambda c: c.activate_past_recording() is None,
    "is_recording_past": lambda c: c.is_recording_past(0) is False,
    "early_initialization": lambda c: c.early_initialization(3, 2, 32, torch.float64, "cpu") is None,
}
CACHE_REFUSED: dict[str, Callable] = {
    "update": lambda c: c.update(*_states(), 0),
    "offload": lambda c: c.offload(0),
    "prefetch": lambda c: c.prefetch(0),
    "update_indexer": lambda c: c.update_indexer(_states()[0], 0),
    "update_conv_state": lambda c: c.update_conv_state(_states()[0], 0),
    "update_recurrent_state": lambda c: c.update_recurrent_state(_states()[0], 0),
    "get_conv_state": lambda c: c.get_conv_state(0),
    "get_recurrent_state": lambda c: c.get_recurrent_state(0),
    "has_previous_state": lambda c: c.has_previous_state(0),
}


def public_names(cls: type) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_")]


@pytest.fixture(scope="module")
def filled(double) -> Session:
    return ragged(double)


@pytest.mark.parametrize("name", public_names(DynamicLayer))
def test_each_public_name_of_the_installed_layer_works_or_is_refused(filled, name):
    """CA-12: a name that a version adds fails here until it is decided."""
    layer = copy.deepcopy(filled.cache).layers[1]
    if name in LAYER_REFUSED:
        with pytest.raises(REFUSED, match="RecSACache"):
            LAYER_REFUSED[name](layer)
    else:
        assert LAYER_CONTRACT[name](layer)


@pytest.mark.parametrize("name", public_names(DynamicCache))
def test_each_public_name_of_the_installed_cache_works_or_is_refused(filled, name):
    """CA-12: as for the layer; states of other kinds of layers are refused with the layer's class named."""
    cache = copy.deepcopy(filled.cache)
    if name in CACHE_REFUSED:
        with pytest.raises(REFUSED, match="RecSA|Attention layer|LinearAttention"):
            CACHE_REFUSED[name](cache)
    else:
        assert CACHE_CONTRACT[name](cache)


def test_an_unused_cache_reports_itself_as_empty(double):
    """CA-12: length, mask sizes, iteration and rearrangements before anything was stored."""
    cache = RecSACache(double.config)
    assert isinstance(cache, DynamicCache) and isinstance(cache.layers[0], DynamicLayer)
    assert len(cache) == LAYERS and cache.get_seq_length() == 0 and cache.lengths == [] and cache.batch_size == -1
    assert cache.get_mask_sizes(1, 0) == (1, 0) and cache.get_mask_sizes(7, 0) == (7, 0)
    assert not cache.is_initialized and [entry[:2] for entry in cache] == [(None, None)] * LAYERS
    assert cache.layers[0].node_keys(1) is None and "RecSALayer" in repr(cache)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([0]))
    cache.crop(-1)
    cache.reset()
    assert cache.move_to(dtype=torch.float32) is cache and cache.get_seq_length() == 0


def test_iteration_and_length_of_a_filled_cache(filled):
    """CA-12: one (keys, values, None) per layer, as the installed cache yields."""
    entries = list(filled.cache)
    assert len(filled.cache) == len(entries) == LAYERS
    for layer, (keys, values, window) in zip(filled.cache.layers, entries, strict=True):
        assert torch.equal(keys, layer.node_keys(0)) and torch.equal(values, layer.node_values(0)) and window is None
        assert keys.shape == (3, TINY["num_key_value_heads"], max(filled.cache.lengths), TINY["head_dim"])
        assert layer.node_keys(9) is None


def test_early_initialised_storage_is_rearranged_and_used(double):
    """CA-12: storage made before the first token takes part in what follows."""
    session = Session(double, 4)
    session.cache.early_initialization(2, 2, 32, torch.float64, torch.device("cpu"))
    assert session.cache.is_initialized and session.cache.get_seq_length() == 0 and session.cache.batch_size == 2
    session.cache.batch_repeat_interleave(2)
    session.cache.reorder_cache(torch.tensor([3, 0, 1, 2]))
    session.feed(70)
    session.check()


# ---- appending ------------------------------------------------------------------------------------------------------


def _append(layer, length: int, count: int = 1, pooler: RecSAPooler | None = None):
    shape = (1, TINY["num_key_value_heads"], count, TINY["head_dim"])
    return layer.append(torch.randn(shape), torch.randn(shape), Rows.whole(1, count, [length]), count, pooler)


@pytest.mark.parametrize("reserve", [0, 2000])
@torch.no_grad()
def test_two_thousand_single_appends_reallocate_rarely(reserve):
    """Storage grows geometrically, or not at all where the length was announced; contents are exact either way."""
    cache, pooler = RecSACache(tiny_config(), reserve), RecSAPooler(2, R, TINY["head_dim"])
    torch.nn.init.normal_(pooler.query)
    layer = cache.layers[0]
    storages, moves = {}, Counter()
    for length in range(2000):
        _append(layer, length, pooler=pooler)
        for level in range(len(cache.geometry.node_counts(length + 1))):
            pointer = layer.node_keys(level).untyped_storage().data_ptr()
            moves[level] += storages.get(level, pointer) != pointer
            storages[level] = pointer
    assert max(moves.values()) <= (0 if reserve else 12), moves
    levels = len(cache.geometry.node_counts(2000))
    expected = build_levels(layer.keys, layer.values, pooler, R, levels - 1)
    for level in range(levels):
        number = 2000 // R**level
        torch.testing.assert_close(layer.node_keys(level), expected.keys[level][:, :, :number])
        torch.testing.assert_close(layer.node_values(level), expected.values[level][:, :, :number])


class ElementCount(TorchDispatchMode):
    """Counts the elements of every new tensor that operations produce."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            # an in-place operation's result may be the part that it wrote
            self.elements += result.numel()
        return result


@torch.no_grad()
def test_an_append_costs_one_node_per_completed_level(monkeypatch):
    """Token n completes a node at each level l with r^l | n; nothing else is built, written or copied."""
    cache, pooler = RecSACache(tiny_config(), 3000), RecSAPooler(2, R, TINY["head_dim"])
    built = []
    build = cache_layer_recsa_qwen3.build_nodes

    def counting(pooler, pooled, values, branching):
        built.append(pooled.shape[2] // branching)
        return build(pooler, pooled, values, branching)

    monkeypatch.setattr(cache_layer_recsa_qwen3, "build_nodes", counting)
    layer, cost = cache.layers[0], {}
    for length in range(2, 2100):
        built.clear()
        with ElementCount() as count:
            _append(layer, length - 1 if length > 2 else 0, 2 if length == 2 else 1, pooler)
        completed = sum(length % R**level == 0 for level in range(1, 7))
        assert built == [1] * completed
        cost.setdefault(completed, []).append(count.elements)
    entry = TINY["num_key_value_heads"] * TINY["head_dim"]
    for completed, elements in cost.items():
        assert max(elements[1:], default=0) <= 10 * entry * (1 + 3 * R * completed)
        assert elements[-1] <= elements[1 if completed == 0 else 0]  # as cheap at 2,000 tokens as at the start


@pytest.mark.parametrize("length", [3 * R, DENSE, DENSE + 1, 4 * R**3])
def test_a_reserved_cache_equals_a_growing_one(double, length):
    ids = random_ids(2, length)
    with torch.no_grad():
        grown, reserved = RecSACache(double.config), RecSACache(double.config, reserve=length + 1)
        assert torch.equal(double(ids, cache=grown).logits, double(ids, cache=reserved).logits)
    for one, other in zip(grown.layers, reserved.layers, strict=True):
        for level in range(len(grown.geometry.node_counts(length))):
            assert torch.equal(one.node_keys(level), other.node_keys(level))


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_interrupted_forward_changes_nothing(double, columns, layer):
    """Ctrl-C in any layer, in a chunk or a step, leaves what was held before, at once usable."""
    session = Session(double, 2)
    session.feed(50)

    def interrupt(*_):
        raise KeyboardInterrupt

    handle = double.model.layers[layer].mlp.register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.feed(columns)
    finally:
        handle.remove()
    session.crop(50)
    assert all(cached.history.lengths == [50, 50] for cached in session.cache.layers)
    session.feed(20)
    session.check_and_continue()


def test_an_interrupted_first_forward_leaves_an_empty_cache(double):
    cache = RecSACache(double.config)
    handle = double.model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            double(random_ids(1, 20), cache=cache)
    finally:
        handle.remove()
    ids = random_ids(2, 70)
    with torch.no_grad():
        assert torch.equal(double(ids, cache=cache).logits, double(ids, cache=RecSACache(double.config)).logits)


def test_layers_of_different_lengths_are_refused(double):
    """With the way out named; after it the cache is as good as new."""
    session = Session(double, 1)
    session.feed(50)
    session.cache.layers[1].crop(-1)
    for columns in (1, 3):
        with pytest.raises(RuntimeError, match=r"interrupted.*cache\.reset\(\)"), torch.no_grad():
            double(random_ids(1, columns), cache=session.cache)
    session.cache.reset()
    again = Session(double, 2)
    again.cache = session.cache
    again.feed(70)
    again.check_and_continue()


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("length", [11, 41, 70])
def test_what_was_forgotten_is_never_read(double, dtype, length):
    """NaN behind the end, left by tokens that were cropped or by a fork, in one row and in ragged ones."""
    mask = (torch.arange(length) >= torch.tensor([[0], [5]])).long()
    ids, more = random_ids(2, length), random_ids(2, 2)
    poison = double.model.embed_tokens(random_ids(2, 7)).detach()
    poison[:, 1] = float("nan")
    wide = torch.nn.functional.pad(mask, (0, 7), value=1)

    def fill():
        cache = RecSACache(double.config, reserve=length + 40, dtype=dtype)
        double(ids, attention_mask=mask, cache=cache)
        return cache

    with torch.no_grad():
        expected = double(more, attention_mask=wide[:, : length + 2], cache=fill()).logits
        cropped, prefix = fill(), fill()
        double(inputs_embeds=poison, attention_mask=wide, cache=cropped)
        cropped.crop(-7)
        double(inputs_embeds=poison, attention_mask=wide, cache=prefix.fork())
        for cache in (cropped, prefix):
            actual = double(more, attention_mask=wide[:, : length + 2], cache=cache).logits
            assert not actual.isnan().any()
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


# ---- rearranging ----------------------------------------------------------------------------------------------------


def test_ragged_filling(double):
    session = ragged(double)
    session.check_and_continue()


def test_rows_kept_without_padding_need_no_mask(double):
    """Newer versions of transformers pass no mask where it would be all ones."""
    ids, mask = random_ids(2, 40), torch.ones(2, 40, dtype=torch.long)
    mask[1, :5] = 0
    cache = RecSACache(double.config)
    with torch.no_grad():
        double(ids, attention_mask=mask, cache=cache)
    cache.batch_select_indices(torch.tensor([0]))
    history = torch.cat((ids[:1], random_ids(1, 3)), 1)
    options = {"attention_mask": torch.ones_like(history), "max_new_tokens": 5, "do_sample": False}
    answer = double.generate(history, **options, **{CACHE_FIELD: cache})
    assert torch.equal(answer, double.generate(history, **options))


@pytest.mark.parametrize("argument", [0, -1, -5, -19, -20, -60, 1, 40, 90, 94])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_crop_by_columns(double, argument, as_tensor):
    """n <= 0 removes |n| columns, n > 0 keeps n; padding and holes count as the columns that they are."""
    session = ragged(double)
    session.cache.crop(torch.tensor(argument) if as_tensor else argument)
    session.crop(argument if argument > 0 else 95 + argument)
    session.check_and_continue()


@pytest.mark.parametrize("argument", [95, 96, 1000])
def test_crop_to_more_than_there_is_changes_nothing(double, argument):
    session = ragged(double)
    session.cache.crop(argument)
    session.check_and_continue()


@pytest.mark.parametrize("argument", [-95, -1000])
def test_crop_past_the_beginning_empties_the_cache(double, argument):
    session = ragged(double)
    session.cache.crop(argument)
    session.crop(0)
    assert session.cache.lengths == [0, 0, 0] and session.cache.get_seq_length() == 0
    session.feed(70, torch.arange(70) >= torch.tensor([5, 0, 60])[:, None])
    session.check_and_continue()


def test_repeated_crops_and_turns(double):
    """Assisted decoding's pattern: append several, take some back, again and again."""
    session = ragged(double)
    for appended, removed in [(6, 3), (2, 2), (11, 1), (1, 0), (7, 7), (4, 9)]:
        session.feed(appended, torch.rand(3, appended) < 0.8)
        session.cache.crop(-removed)
        session.crop(session.ids.shape[1] - removed)
        session.check()
    session.check_and_continue()


@pytest.mark.parametrize(
    "call, rows",
    [
        (lambda c: c.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda c: c.reorder_cache(torch.tensor([1, 1, 1], dtype=torch.int32)), [1, 1, 1]),
        (lambda c: c.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
        (lambda c: c.batch_repeat_interleave(1), [0, 1, 2]),
        (lambda c: c.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
        (lambda c: c.batch_select_indices([1]), [1]),
        (lambda c: c.batch_select_indices(torch.tensor([-1, 1])), [2, 1]),
        (lambda c: c.batch_select_indices(torch.tensor([True, False, True])), [0, 2]),
    ],
    ids=["reorder", "reorder-int32", "repeat-2", "repeat-1", "select", "list", "negative", "mask"],
)
def test_rows_are_rearranged_on_every_level(double, call, rows):
    session = ragged(double)
    call(session.cache)
    session.rearrange(rows)
    session.check_and_continue()


def test_rearranged_rows_share_nothing(double):
    """Repeated rows diverge afterwards; a crop after a rearrangement still knows each row's padding."""
    session = ragged(double)
    session.cache.batch_repeat_interleave(2)
    session.rearrange([0, 0, 1, 1, 2, 2])
    session.feed(9)
    session.check()
    session.cache.batch_select_indices(torch.tensor([5, 1, 2]))
    session.rearrange([5, 1, 2])
    session.cache.crop(-25)
    session.crop(session.ids.shape[1] - 25)
    session.check_and_continue()


def test_reset_then_reuse_with_another_batch(double):
    session = ragged(double)
    session.cache.reset()
    assert session.cache.get_seq_length() == 0 and session.cache.lengths == [] and not session.cache.is_initialized
    again = Session(double, 2)
    again.cache = session.cache
    again.feed(30, torch.arange(30) >= torch.tensor([0, 22])[:, None])
    again.feed(50)
    again.check_and_continue()


# ---- copies, storage ------------------------------------------------------------------------------------------------


def storages(cache: RecSACache) -> set[int]:
    """The storages of all tensors of a cache."""
    return {
        tensor.untyped_storage().data_ptr()
        for layer in cache.layers
        for level in layer.levels
        for tensor in level.tensors.values()
    }


def snapshot(cache: RecSACache) -> list:
    """Everything that must not change while a cache is only copied."""
    return [
        [layer.get_seq_length(), list(layer.history.lengths)]
        + [tensor.clone() for level in layer.levels for tensor in level.tensors.values()]
        for layer in cache.layers
    ]


def assert_unchanged(cache: RecSACache, before: list) -> None:
    for old, new in zip(before, snapshot(cache), strict=True):
        assert old[:2] == new[:2] and len(old) == len(new)
        assert all(torch.equal(a, b) for a, b in zip(old[2:], new[2:], strict=True))


def torch_round_trip(cache: RecSACache) -> RecSACache:
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), torch_round_trip],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_are_whole_and_share_no_storage(double, duplicate):
    """CA-04: the original stays bit-unchanged while the copy goes on, and both are usable."""
    session = ragged(double)
    before = snapshot(session.cache)
    copied = Session(double, 3)
    copied.ids, copied.mask, copied.cache = session.ids, session.mask, duplicate(session.cache)
    assert not storages(session.cache) & storages(copied.cache)
    assert copied.cache.geometry == session.cache.geometry
    copied.check_and_continue()
    copied.cache.crop(-30)
    assert_unchanged(session.cache, before)
    session.check_and_continue()


def test_a_stored_prefix_serves_several_questions(double):
    """CA-04: prefill once; each deepcopy answers like a cold run and the stored cache never changes."""
    prefix = random_ids(1, 96)
    stored = RecSACache(double.config)
    with torch.no_grad():
        double(prefix, cache=stored)
    before = snapshot(stored)
    for suffix in (3, 17, 30):
        ids = torch.cat((prefix, random_ids(1, suffix)), 1)
        options = dict(max_new_tokens=20, do_sample=False)
        warm = double.generate(ids, **{CACHE_FIELD: copy.deepcopy(stored)}, **options)
        assert double.last_backend == "reference"
        assert torch.equal(warm, double.generate(ids, **options))
        assert_unchanged(stored, before)


def test_move_to_another_dtype_and_back(double):
    """Every level moves; the cache then serves the model in that dtype."""
    single = copy.deepcopy(double).float()
    session = ragged(double)
    before = [layer.node_keys(1).clone() for layer in session.cache.layers]
    assert session.cache.move_to(dtype=torch.float32) is session.cache
    for layer, old in zip(session.cache.layers, before, strict=True):
        assert layer.dtype == torch.float32
        assert all(t.dtype == torch.float32 for level in layer.levels for t in level.tensors.values())
        assert torch.equal(layer.node_keys(1), old.float())
    session.model = single
    assert session.feed(7).dtype == torch.float32
    session.model = double
    session.cache.move_to(dtype=torch.float64)
    assert session.feed(1).dtype == torch.float64
    assert session.cache.lengths == session.mask.sum(1).tolist()


def test_move_to_another_device(double):
    """The meta device stands in for a second one: no tensor of any level stays behind."""
    cache = ragged(double).cache
    cache.move_to("cpu")
    assert all(layer.device == torch.device("cpu") for layer in cache.layers)
    cache.move_to("meta")
    for layer in cache.layers:
        assert layer.device.type == "meta"
        assert all(t.device.type == "meta" for level in layer.levels for t in level.tensors.values())


@pytest.mark.parametrize("operation", ["append", "crop", "reorder", "repeat"])
def test_a_cache_filled_in_inference_mode_is_used_outside(double, operation):
    with torch.inference_mode():
        session = ragged(double)
    session.ids, session.mask = session.ids.clone(), session.mask.clone()
    if operation == "crop":
        session.cache.crop(-30)
        session.crop(65)
    elif operation == "reorder":
        session.cache.reorder_cache(torch.tensor([1, 2, 0]))
        session.rearrange([1, 2, 0])
    elif operation == "repeat":
        session.cache.batch_repeat_interleave(2)
        session.rearrange([0, 0, 1, 1, 2, 2])
    session.check_and_continue()
    # and back again, then with gradients enabled
    with torch.inference_mode():
        session.feed(5)
    session.ids, session.mask = session.ids.clone(), session.mask.clone()
    logits = double(random_ids(len(session.ids), 2), cache=session.cache).logits
    assert logits.requires_grad and bool(logits.isfinite().all())


# ---- incremental summaries (CA-09) ----------------------------------------------------------------------------------

SETTINGS = [
    dict(recsa_branching=4, recsa_top_k=4, recsa_top_capacity=16),
    dict(recsa_branching=8, recsa_top_k=3, recsa_top_capacity=24),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=["r=4", "r=8"])
def test_decoding_across_level_borders_equals_one_forward(setting):
    """CA-09: from one below, at and one above each border of a level or of the dense length, 2r + 3 steps each."""
    model = tiny_model(**setting).double()
    r, m = setting["recsa_branching"], setting["recsa_top_capacity"]
    borders = sorted({r, r * r, 4 * r * r, 16 * r, m, m * r})
    longest = borders[-1] + 2 * r + 4
    ids = random_ids(1, longest)
    with torch.no_grad(), recsa_trace(model) as trace:
        reference = model(ids, use_cache=False).logits[0]
        assert model.last_backend == "dense+reference" and longest > 4 * m
    whole = trace.forwards[0]
    assert len(whole[0].selection) == 2  # some queries walk two levels above the tokens
    for border in borders:
        for start in (border - 1, border, border + 1):
            cache = RecSACache(model.config)
            with torch.no_grad(), recsa_trace(model) as trace:
                steps = [model(ids[:, :start], cache=cache).logits[0, -1]]
                for column in range(start, start + 2 * r + 3):
                    steps.append(model(ids[:, column : column + 1], cache=cache).logits[0, -1])
            expected = reference[start - 1 : start + 2 * r + 3]
            torch.testing.assert_close(torch.stack(steps), expected, rtol=0, atol=LOGITS_ATOL)
            for layer, record in trace.forwards[-1].items():  # the same nodes were read
                for level, nodes in record.selection.items():
                    column = start + 2 * r + 2
                    assert torch.equal(nodes[:, :, 0], whole[layer].selection[level][:, :, column])


def test_float32_decoding_equals_one_forward():
    """CA-09 in float32: equal up to the first near-tie that rounding decides otherwise, which is rare.

    Such a query reads another node, so the columns from it on are not compared.
    """
    model, decided_alike = tiny_model(), 0
    length = 5 * DENSE + 9
    for _ in range(3):
        ids, cache, parts = random_ids(1, length), RecSACache(model.config), []
        with torch.no_grad(), recsa_trace(model) as whole:
            reference = model(ids, use_cache=False).logits[0]
        with torch.no_grad(), recsa_trace(model) as pieces:
            for columns in ids.split([33, *[1] * (length - 33 - 21), 21], dim=1):
                parts.append(model(columns, cache=cache).logits[0])
        logits = torch.cat(parts)
        alike = torch.ones(length, dtype=torch.bool)
        for layer, record in whole.forwards[0].items():
            for level, expected in record.selection.items():
                begin = 0
                for part, forward in zip(parts, pieces.forwards, strict=True):
                    end = begin + len(part)
                    nodes = forward[layer].selection.get(level, torch.tensor(-1))
                    same = (expected[:, :, begin:end] == nodes).all(-1)  # [1, H_kv, columns]
                    alike[begin:end] &= same.all(1)[0]
                    begin = end
        compared = alike.cumprod(0).bool()
        decided_alike += bool(compared.all())
        torch.testing.assert_close(logits[compared], reference[compared], rtol=0, atol=LOGITS_ATOL)
    assert decided_alike >= 2


# ---- beams (CA-01) --------------------------------------------------------------------------------------------------

BEAMS = {
    "beam-61": ([61], dict(num_beams=4, num_return_sequences=3)),
    "beam-130": ([130], dict(num_beams=4, num_return_sequences=3)),
    "beam-batch": ([61, 130], dict(num_beams=3)),
    "sampling-61": ([61], dict(do_sample=True, num_return_sequences=4)),
    "sampling-130": ([130], dict(do_sample=True, num_return_sequences=4)),
}


@pytest.mark.parametrize("case", BEAMS)
def test_beams_and_several_samples_equal_uncached_ones(double, case):
    """CA-01: 40 new tokens; sequences and scores, with left padding where there are two prompts."""
    lengths, options = BEAMS[case]
    width = max(lengths)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    ids = torch.where(mask.bool(), random_ids(len(lengths), width), 0)
    seed = int(torch.randint(1 << 30, ()))
    results = []
    for use_cache in (True, False):
        torch.manual_seed(seed)
        results.append(
            double.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=40,
                use_cache=use_cache,
                return_dict_in_generate=True,
                output_scores=True,
                **{"do_sample": False, **options},
            )
        )
        assert double.last_backend in ("reference", "dense+reference")
    cached, plain = results
    assert cached.sequences.shape == (options.get("num_return_sequences", 1) * len(lengths), width + 40)
    assert torch.equal(cached.sequences, plain.sequences)
    if "num_beams" in options:
        torch.testing.assert_close(cached.sequences_scores, plain.sequences_scores, rtol=0, atol=LOGITS_ATOL)
        assert any(len(set(beams)) > 1 for beams in cached.beam_indices.tolist())  # beams did change places
    for one, other in zip(cached.scores, plain.scores, strict=True):
        finite = torch.isfinite(one)
        torch.testing.assert_close(one[finite], other[finite], rtol=0, atol=LOGITS_ATOL)
