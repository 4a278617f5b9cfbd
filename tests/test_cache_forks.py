"""`RecSACache.fork`: many questions on one prefix, without a copy of it where they come one after another.

A fork must compute to the bit what a cache that shares nothing computes (a deep copy of the prefix, or a cold one),
and no other fork may see a bit of it. Garbage collection is off: a dropped fork must be gone at once.
"""

import copy
import gc
import pickle

import pytest
import torch

from conftest import DENSE, LENGTHS, random_ids, tiny_model
from recsa_qwen3 import RecSACache
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD
from test_cache_files import assert_same_entries, go_on, mask_of

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOM = 400


@pytest.fixture(autouse=True)
def no_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def places(cache: RecSACache) -> list[list[int]]:
    """Where the keys of each layer's levels lie."""
    return [[level.tensors["keys"].data_ptr() for level in layer.levels] for layer in cache.layers]


def shared(one: RecSACache, other: RecSACache) -> bool:
    """Whether all of level 0 and of the levels that both have lie in one place; `None` where only some of them do."""
    same = [
        a == b
        for ours, theirs in zip(places(one), places(other), strict=True)
        for a, b in zip(ours, theirs, strict=False)
    ]
    return all(same) if all(same) or not any(same) else None


class Copies:
    """A fork beside a deep copy: both are given the same tokens, and must stay equal to the bit."""

    def __init__(self, model, cache: RecSACache, twin: RecSACache | None = None):
        self.model, self.cache = model, cache
        self.twin = copy.deepcopy(cache) if twin is None else twin

    def fork(self) -> "Copies":
        return Copies(self.model, self.cache.fork(), copy.deepcopy(self.twin))

    def both(self, change) -> None:
        change(self.cache)
        change(self.twin)
        self.check()

    def feed(self, columns: int) -> None:
        """A chunk, then steps; logits are compared."""
        ids = random_ids(len(self.cache.lengths), columns)
        for ours, theirs in zip(*(go_on(self.model, cache, ids) for cache in (self.cache, self.twin)), strict=True):
            assert torch.equal(ours, theirs)

    def check(self) -> None:
        assert_same_entries(self.cache, self.twin)


def prefix_of(model, length: int, rows: int = 1, dtype: str = "auto", reserve: int = ROOM) -> Copies:
    """A prefix; with several rows, each has a padding of its own."""
    cache = RecSACache(model.config, reserve=reserve, dtype=dtype)
    mask = (torch.arange(length) >= 2 * torch.arange(rows)[:, None]).long()
    with torch.no_grad():
        model(random_ids(rows, length), attention_mask=mask, cache=cache)
    return Copies(model, cache)


CASES = [(length, rows, dtype) for length in LENGTHS for rows, dtype in ((1, "auto"), (3, "auto"), (2, "fp8_e4m3"))]


@pytest.mark.parametrize("length, rows, dtype", CASES)
def test_questions_one_after_another_copy_nothing(model, length, rows, dtype):
    prefix = prefix_of(model, length, rows, dtype)
    for columns in (17, 30, 6):
        question = prefix.fork()
        question.feed(columns)
        question.check()
        prefix.check()
        assert shared(question.cache, prefix.cache) is True
        del question
    before = places(prefix.cache)
    prefix.feed(20)  # and the prefix goes on where it lies
    prefix.check()
    assert [layer[: len(old)] for layer, old in zip(places(prefix.cache), before, strict=True)] == before


@pytest.mark.parametrize("length, rows, dtype", CASES)
def test_questions_side_by_side_copy(model, length, rows, dtype):
    prefix = prefix_of(model, length, rows, dtype)
    first, second, third = prefix.fork(), prefix.fork(), prefix.fork()
    for columns in (7, 11, 26):
        for one in (first, second, prefix, third):
            one.feed(columns)
            for other in (first, second, third, prefix):
                other.check()
    caches = [one.cache for one in (first, second, third, prefix)]
    for layer in zip(*(places(cache) for cache in caches), strict=True):
        assert len({levels[0] for levels in layer}) == len(caches)  # a level without new nodes may stay shared


@pytest.mark.parametrize("length", LENGTHS)
def test_answers_are_those_of_a_cold_cache(model, length):
    ids = random_ids(1, length)
    cache = RecSACache(model.config, reserve=ROOM)
    with torch.no_grad():
        model(ids, cache=cache)
    for number in range(3):
        whole = torch.cat((ids, random_ids(1, 4 + number)), 1)
        options = dict(attention_mask=torch.ones_like(whole), max_new_tokens=20, do_sample=False)
        cold = RecSACache(model.config)
        with torch.no_grad():
            model(ids, cache=cold)  # in the same chunks
        fork = cache.fork()
        answer = model.generate(whole, **{CACHE_FIELD: fork}, **options)
        assert torch.equal(answer, model.generate(whole, **{CACHE_FIELD: cold}, **options))
        assert_same_entries(fork, cold)
        assert shared(fork, cache) is True and cache.lengths == [length]
        del fork


@pytest.mark.parametrize("first", ["parent", "fork"])
def test_the_one_that_writes_second_copies(model, first):
    prefix = prefix_of(model, 70)
    fork = prefix.fork()
    before = places(prefix.cache)
    one, other = (prefix, fork) if first == "parent" else (fork, prefix)
    one.feed(9)
    assert places(one.cache) == before
    other.feed(9)
    assert shared(one.cache, other.cache) is None or shared(one.cache, other.cache) is False
    assert all(a[0] != b[0] for a, b in zip(places(one.cache), places(other.cache), strict=True))
    for cache in (one, other):
        cache.feed(20)
        cache.check()


def test_a_level_is_copied_only_where_a_node_is_read(model):
    """A fork one token ahead has completed no node yet: the levels above may still be written in place."""
    prefix = prefix_of(model, 64)
    fork = prefix.fork()
    go_on(model, fork.cache, random_ids(1, 1))
    go_on(model, prefix.cache, random_ids(1, 4))
    for ours, theirs in zip(places(prefix.cache), places(fork.cache), strict=True):
        assert ours[0] != theirs[0] and ours[1:3] == theirs[1:3]


def test_a_fork_of_a_fork(model):
    prefix = prefix_of(model, 70, 2)
    child = prefix.fork()
    child.feed(9)
    grandchild = child.fork()
    grandchild.feed(12)
    assert shared(grandchild.cache, prefix.cache) is True
    child.feed(15)
    great = grandchild.fork()
    for one in (prefix, great, grandchild, child):
        one.feed(21)
        for other in (prefix, child, grandchild, great):
            other.check()


def test_a_dropped_fork_leaves_its_place(model):
    """Without garbage collection, after generate and after a step: nothing keeps a fork that nobody holds."""
    prefix = prefix_of(model, 70)
    before = places(prefix.cache)
    for _ in range(3):
        fork = prefix.cache.fork()
        model.generate(random_ids(1, 75), **{CACHE_FIELD: fork}, max_new_tokens=5)
        fork.reset()  # no longer a reader, though it lives
        again = prefix.fork()
        again.feed(9)
        assert places(again.cache) == before
        again.check()
        del again
        with torch.no_grad():
            model(random_ids(1, 80), cache=fork)  # filled anew, with storage of its own
        prefix.check()


@pytest.mark.parametrize("kept", [75, 70, 69, 64, 40, 3])
@pytest.mark.parametrize("who", ["prefix", "fork"])
def test_a_crop_on_either_side(model, kept, who):
    """Above and below the point where they parted; then both go on."""
    prefix = prefix_of(model, 70, 2)
    fork = prefix.fork()
    (prefix if who == "prefix" else fork).feed(12)
    cropped = prefix if who == "prefix" else fork
    cropped.both(lambda cache: cache.crop(kept))
    cropped.feed(17)
    for cache in (prefix, fork):
        cache.check()
        cache.feed(30)
        cache.check()
    prefix.check()


def test_a_crop_to_nothing_and_another_batch(model):
    prefix = prefix_of(model, 70)
    fork = prefix.cache.fork()
    fork.crop(-70)
    with torch.no_grad():
        model(random_ids(2, 30), cache=fork)
    prefix.check()
    prefix.feed(20)
    prefix.check()


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_rearranged_forks(model, dtype):
    prefix = prefix_of(model, 70, 3, dtype)
    for change in (
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])),
        lambda cache: cache.batch_select_indices(torch.tensor([1])),
        lambda cache: cache.batch_repeat_interleave(2),
    ):
        fork = prefix.fork()
        fork.both(change)
        fork.feed(18)
        fork.check()
        prefix.check()
    prefix.feed(20)
    prefix.check()


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(num_beams=4, num_return_sequences=2)])
def test_beams_on_a_fork(model, options):
    prefix = prefix_of(model, 70, reserve=ROOM)
    for _ in range(2):
        ids = random_ids(1, 76)
        options = {**options, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
        beams = []
        for cache in (prefix.cache.fork(), copy.deepcopy(prefix.twin)):
            cache.batch_repeat_interleave(options["num_beams"])  # as transformers expects of a cache that it is given
            beams.append(model.generate(ids, **{CACHE_FIELD: cache}, **options))
        assert torch.equal(*beams)
        prefix.check()


def test_ragged_rows_part_row_by_row(model):
    """A row that is not longer elsewhere does not matter; one that is does, also where another row is shorter."""
    prefix = prefix_of(model, 40, 2)
    fork = prefix.fork()
    ids = random_ids(2, 6)
    for first, second in (([1, 0], [0, 1]), ([0, 1], [1, 0])):  # each row's tokens alone, in turn
        for cache, rows in ((prefix, first), (fork, second)):
            mask = mask_of(cache.cache, 6)
            mask[:, -6:] = torch.tensor(rows)[:, None]
            with torch.no_grad():
                ours, theirs = (
                    model(ids, attention_mask=mask, cache=held).logits for held in (cache.cache, cache.twin)
                )
            assert torch.equal(ours, theirs)
            for other in (prefix, fork):
                other.check()


def test_copies_of_a_fork_share_nothing(model):
    prefix = prefix_of(model, 70)
    fork = prefix.fork()
    for copied in (copy.deepcopy(fork.cache), pickle.loads(pickle.dumps(fork.cache))):
        assert shared(copied, prefix.cache) is False
        before = places(copied)
        other = Copies(model, copied)
        other.feed(15)
        assert places(copied) == before  # it asks nobody
        for cache in (other, fork, prefix):
            cache.check()
    fork.feed(9)
    prefix.feed(9)
    fork.check()


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_moving_a_fork(model, dtype):
    """To where it lies already, it stays shared and guarded; to another dtype, it is apart."""
    prefix = prefix_of(model, 70, 1, dtype)
    fork = prefix.fork()
    fork.cache.move_to("cpu", torch.float32)
    prefix.feed(9)
    fork.feed(11)
    for cache in (prefix, fork):
        cache.check()
    double = tiny_model().double()
    moved = prefix.cache.fork().move_to(dtype=torch.float64)
    with torch.no_grad():
        double(random_ids(1, 8), cache=moved)
    prefix.check()


def test_growth_parts_what_was_shared(model):
    prefix = prefix_of(model, 64, reserve=64)
    fork = prefix.fork()
    fork.feed(9)
    assert all(a[0] != b[0] for a, b in zip(places(fork.cache), places(prefix.cache), strict=True))
    prefix.feed(20)
    for cache in (prefix, fork):
        cache.check()


def test_early_storage_and_an_unused_cache(model):
    empty = RecSACache(model.config)
    fork = empty.fork()
    for cache in (empty, fork):
        with torch.no_grad():
            model(random_ids(1, 30), cache=cache)
    empty = RecSACache(model.config)
    empty.early_initialization(1, 2, 32, torch.float32, torch.device("cpu"))
    fork = empty.fork()
    with torch.no_grad():
        model(random_ids(1, 30), cache=fork)
        twin = copy.deepcopy(fork)
        model(random_ids(1, 40), cache=empty)
    assert_same_entries(fork, twin)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_forward_that_breaks_off_is_not_seen(model, broken):
    """Layers that were written already lie behind what the others hold."""
    prefix = prefix_of(model, 70)
    fork = prefix.fork()
    handle = model.model.layers[broken].mlp.register_forward_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError), torch.no_grad():
            model(random_ids(1, 9), cache=fork.cache)
    finally:
        handle.remove()
    prefix.check()
    prefix.feed(9)
    prefix.check()
    fork.cache.roll_back(70)
    fork.check()
    fork.feed(12)
    for cache in (prefix, fork):
        cache.check()


@pytest.mark.parametrize("filled_in, asked_in", [(True, False), (False, True), (True, True)])
def test_inference_mode_on_either_side(model, filled_in, asked_in):
    with torch.inference_mode(filled_in):
        cache = RecSACache(model.config, reserve=ROOM)
        model(random_ids(1, 70), cache=cache)
    twin = copy.deepcopy(cache)
    with torch.inference_mode(asked_in):
        forks = [cache.fork() for _ in range(2)]
        for fork in forks:
            model(random_ids(1, 9), cache=fork)
            assert_same_entries(cache, twin)


def test_saving_forks(model, tmp_path):
    """Each is stored as it is, without what another wrote behind it."""
    prefix = prefix_of(model, 70)
    fork = prefix.fork()
    fork.feed(20)
    for name, cache in (("prefix", prefix), ("fork", fork)):
        cache.cache.save(tmp_path / name)
        assert_same_entries(RecSACache.load(tmp_path / name, model), cache.twin)
    loaded = Copies(model, RecSACache.load(tmp_path / "prefix", model, reserve=ROOM))
    for _ in range(2):
        question = loaded.fork()
        question.feed(9)
        assert shared(question.cache, loaded.cache) is True
        question.check()
        loaded.check()
        del question


# ---- decoding steps -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
@torch.no_grad()
def test_steps_of_forks(dtype):
    """Captured steps write in place, too: forks side by side part before one sees the other's token."""
    pytest.importorskip("triton")
    model = tiny_model(num_hidden_layers=1, recsa_backend="triton").to(DEVICE)
    cache = RecSACache(model.config, reserve=100, dtype=dtype)
    model(random_ids(1, DENSE + 2).to(DEVICE), cache=cache)
    forks = [Copies(model, cache)]
    forks += [forks[0].fork(), forks[0].fork()]
    for turn in range(4 if DEVICE == "cpu" else 12):
        for fork in forks:
            token = random_ids(1, 1).to(DEVICE)
            ours, theirs = (model(token, cache=held).logits for held in (fork.cache, fork.twin))
            assert torch.equal(ours, theirs)
            assert (fork.cache.step is None) == (fork.twin.step is None)
            if turn == 0:
                steps = fork.cache.step
            for other in forks:
                other.check()
    assert len({fork.cache.step for fork in forks}) == 3 or steps is None
    kept = forks[1].cache.step
    for _ in range(3):
        model(random_ids(1, 1).to(DEVICE), cache=forks[1].cache)
    assert forks[1].cache.step is kept  # a step is not made anew where nothing is shared any more


@torch.no_grad()
def test_steps_one_after_another_stay_in_place():
    pytest.importorskip("triton")
    model = tiny_model(num_hidden_layers=1, recsa_backend="triton").to(DEVICE)
    cache = RecSACache(model.config, reserve=100)
    model(random_ids(1, DENSE + 2).to(DEVICE), cache=cache)
    model(random_ids(1, 1).to(DEVICE), cache=cache)  # its own step has made room on all levels
    twin, before = copy.deepcopy(cache), places(cache)
    for _ in range(2):
        fork = cache.fork()
        for _ in range(3):
            model(random_ids(1, 1).to(DEVICE), cache=fork)
        assert places(fork) == before and fork.step is not None
        del fork
    assert_same_entries(cache, twin)
    token = random_ids(1, 1).to(DEVICE)
    assert torch.equal(model(token, cache=cache).logits, model(token, cache=twin).logits)
