"""`RecSACache.save` and `load`: what comes back is bit-identical, what does not fit is refused by name."""

import copy
import gc
import json
import pickle
import shutil
import subprocess
import sys
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conftest import DENSE, LENGTHS, ROOT, random_ids, tiny_config, tiny_model
from recsa_qwen3 import RecSACache, cache_files_recsa_qwen3
from recsa_qwen3.cache_files_recsa_qwen3 import fingerprint
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD

torch.set_num_threads(1)

INDEX = "recsa_cache.json"


@torch.no_grad()
def filled(model, length: int, rows: int = 1, dtype: str = "auto", **options) -> RecSACache:
    """A cache of random tokens; with several rows, row b > 0 is padded on the left and has a hole."""
    cache = RecSACache(model.config, dtype=dtype, **options)
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(1, rows):
        mask[row, : 2 * row] = mask[row, length // 2] = 0
    model(random_ids(rows, length), attention_mask=mask, cache=cache)
    return cache


def mask_of(cache: RecSACache, more: int) -> torch.Tensor:
    """The mask of the columns held, and `more` tokens."""
    held = (cache.history.column_positions() >= 0).long()
    return torch.cat((held, torch.ones(len(held), more, dtype=torch.long)), 1)


@torch.no_grad()
def go_on(model, cache: RecSACache, ids: torch.Tensor) -> list[torch.Tensor]:
    """Logits of `ids` `[B, T]`, in a chunk and in steps."""
    parts = [ids[:, :5], *ids[:, 5:].split(1, 1)]
    return [model(p, attention_mask=mask_of(cache, p.shape[1]), cache=cache).logits for p in parts if p.numel()]


def assert_same_entries(one: RecSACache, other: RecSACache) -> None:
    """Everything held is the same to the bit, spare room left out."""
    assert one.lengths == other.lengths and one.get_seq_length() == other.get_seq_length()
    assert one.history.offsets == other.history.offsets and one.cache_dtype == other.cache_dtype
    assert torch.equal(one.history.column_positions(), other.history.column_positions())
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert ours.dtype == theirs.dtype and ours.history.lengths == theirs.history.lengths
        left, right = ours.entries(), theirs.entries()
        assert left.keys() == right.keys()
        for key in left:
            for row, length in enumerate(one.lengths):  # shorter rows end in what nobody reads
                held = length // one.geometry.branching ** key[0]
                a, b = (entries[key][row, :, :held].contiguous() for entries in (left, right))
                assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# ---- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_a_loaded_cache_goes_on_as_the_saved_one(model, tmp_path, length, rows, dtype):
    cache = filled(model, length, rows, dtype)
    cache.save(tmp_path / "cache")
    cold, warm = RecSACache.load(tmp_path / "cache"), RecSACache.load(tmp_path / "cache", model=model, reserve=300)
    assert_same_entries(cache, cold)
    assert_same_entries(cache, warm)
    ids = random_ids(rows, 30)
    expected = go_on(model, cache, ids)
    for loaded in (cold, warm):
        assert all(map(torch.equal, go_on(model, loaded, ids), expected))
        assert_same_entries(cache, loaded)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_of_the_model(tmp_path, dtype):
    model = tiny_model().to(dtype)
    cache = filled(model, 4 * DENSE + 7)
    cache.save(tmp_path)
    assert_same_entries(cache, RecSACache.load(tmp_path, model))


def test_nothing_but_entries_in_use_is_stored(model, tmp_path):
    """Neither spare capacity nor what a crop left behind; and what the index says is what lies there."""
    cache = filled(model, 200, reserve=5000)
    cache.crop(-130)
    cache.save(tmp_path / "cache")
    index = json.loads((tmp_path / "cache" / INDEX).read_text())
    tensors = {}
    for name, size in index["files"].items():
        assert (tmp_path / "cache" / name).stat().st_size == size
        tensors |= load_file(tmp_path / "cache" / name)  # the library's own reader
    assert set(tensors) == set(index["tensors"])
    for name, tensor in tensors.items():
        level = int(name.split(".")[3])
        assert tensor.shape[2] == 70 // 4**level
    assert sum(t.nbytes for t in tensors.values()) < sum(index["files"].values())
    assert {name.split(".")[3] for name in tensors} == {"0", "1", "2", "3"}
    loaded = RecSACache.load(tmp_path / "cache", model)
    assert_same_entries(cache, loaded)
    ids = random_ids(1, 200)
    assert all(map(torch.equal, go_on(model, loaded, ids), go_on(model, cache, ids)))  # a level more than was held


def test_room_is_made_at_once(model, tmp_path):
    filled(model, 70).save(tmp_path)
    for reserve, least in ((0, 70), (500, 500)):
        cache = RecSACache.load(tmp_path, model, reserve=reserve)
        for layer in cache.layers:
            assert least <= layer.levels[0].capacity < least + 8
            places = [layer.levels[level].tensors["keys"].data_ptr() for level in range(3)]
            with torch.no_grad():
                layer.make_room(least)
            assert places == [layer.levels[level].tensors["keys"].data_ptr() for level in range(3)]


@pytest.mark.parametrize("rows, dtype", [(1, "auto"), (3, "fp8_e4m3")])
def test_shards_of_any_size(model, tmp_path, rows, dtype):
    """Each file keeps the limit unless it holds a single tensor; narrow and wide entries lie side by side."""
    cache = filled(model, 91, rows, dtype)
    for limit in (1, 3000, 40_000, 1 << 30):
        cache.save(tmp_path, overwrite=True, shard_bytes=limit)
        index = json.loads((tmp_path / INDEX).read_text())
        files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
        assert files == sorted(index["files"]) and files[-1].endswith(f"-of-{len(files):05}.safetensors")
        for name in files:
            tensors = load_file(tmp_path / name)
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
        assert (len(files) == 1) == (limit == 1 << 30) and (limit > 1 or len(files) == len(index["tensors"]))
        assert_same_entries(cache, RecSACache.load(tmp_path, model))


@pytest.mark.parametrize("saved, used", [(True, False), (False, True), (True, True)])
def test_inference_mode_on_either_side(model, tmp_path, saved, used):
    with torch.inference_mode(saved):
        filled(model, 50).save(tmp_path)
        cache = RecSACache.load(tmp_path, model)
    place = cache.layers[0].levels[0].tensors["keys"].data_ptr()
    with torch.inference_mode(used):
        model(random_ids(1, 2), cache=cache)
    assert cache.layers[0].levels[0].tensors["keys"].data_ptr() == place


def test_position_offsets_come_back(model, tmp_path):
    cache = RecSACache(model.config)
    with torch.no_grad():
        model(random_ids(2, 20), position_ids=torch.arange(5, 25)[None], cache=cache)
    cache.save(tmp_path)
    loaded = RecSACache.load(tmp_path)
    assert loaded.history.offsets == cache.history.offsets == [5, 5]
    with pytest.raises(ValueError, match="position_ids"), torch.no_grad():
        model(random_ids(2, 1), position_ids=torch.tensor([[20]]), cache=loaded)


def test_a_loaded_cache_is_saved_forked_and_copied(model, tmp_path):
    """Also before any model used it: then the fingerprint goes along."""
    cache = filled(model, 70)
    cache.save(tmp_path / "first")
    loaded = RecSACache.load(tmp_path / "first")
    for number, other in enumerate((loaded, loaded.fork(), copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded)))):
        other.save(tmp_path / str(number))
        assert_same_entries(RecSACache.load(tmp_path / str(number), model), cache)
        with pytest.raises(ValueError, match="other weights"), torch.no_grad():
            tiny_model(seed=1)(random_ids(1, 2), cache=other)


CHILD = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from conftest import tiny_model
from recsa_qwen3 import RecSACache
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD
torch.set_num_threads(1)
model = tiny_model()
ids = torch.load(sys.argv[3])
cache = {CACHE_FIELD: RecSACache.load(sys.argv[2], model=model)}
out = model.generate(ids, **cache, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
torch.save(out, sys.argv[4])
"""


@pytest.mark.parametrize("length", [DENSE - 3, 5 * DENSE + 2])
def test_another_process_goes_on_with_the_same_tokens(model, tmp_path, length):
    """A fresh process, which never saw the first one's model, answers as if nothing had been saved."""
    ids = random_ids(1, length + 6)
    cache = RecSACache(model.config)
    with torch.no_grad():
        model(ids[:, :length], cache=cache)
    cache.save(tmp_path / "cache")
    torch.save(ids, tmp_path / "ids.pt")
    arguments = [str(ROOT / "tests"), *(str(tmp_path / name) for name in ("cache", "ids.pt", "out.pt"))]
    subprocess.run([sys.executable, "-c", CHILD, *arguments], check=True, capture_output=True, text=True, timeout=300)
    expected = model.generate(
        ids, **{CACHE_FIELD: cache}, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
    )
    assert torch.equal(torch.load(tmp_path / "out.pt"), expected)


# ---- a whole cache or none ------------------------------------------------------------------------------------------


def test_a_save_that_breaks_off_leaves_what_was_there(model, tmp_path, monkeypatch):
    """At the first, second, ... shard: no cache where there was none, else the old one, untouched; nothing else."""
    old, new = filled(model, 40), filled(model, 70)
    write = cache_files_recsa_qwen3._write_shard
    for place, before in ((tmp_path / "none", None), (tmp_path / "old", old)):
        if before is not None:
            before.save(place)
        for broken in range(3):
            left = [broken]

            def breaking(path, tensors, save_id, left=left):
                left[0] -= 1
                if left[0] < 0:
                    path.write_bytes(b"half")
                    raise KeyboardInterrupt
                return write(path, tensors, save_id)

            monkeypatch.setattr(cache_files_recsa_qwen3, "_write_shard", breaking)
            with pytest.raises(KeyboardInterrupt):
                new.save(place, overwrite=True, shard_bytes=10_000)
            monkeypatch.setattr(cache_files_recsa_qwen3, "_write_shard", write)
            assert not list(place.glob("*.part"))
            if before is None:
                with pytest.raises(FileNotFoundError, match="cut short"):
                    RecSACache.load(place)
            else:
                assert_same_entries(RecSACache.load(place, model), before)
        (place / "cache-00001-of-00009.safetensors.part").write_bytes(b"a process that was killed")
        new.save(place, overwrite=before is not None)
        assert_same_entries(RecSACache.load(place, model), new)
        assert sorted(path.name for path in place.iterdir()) == ["cache-00001-of-00001.safetensors", INDEX]


def test_a_save_that_breaks_off_while_files_change_places_is_no_cache(model, tmp_path, monkeypatch):
    filled(model, 40).save(tmp_path)
    replace = cache_files_recsa_qwen3.os.replace
    calls = []

    def breaking(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(cache_files_recsa_qwen3.os, "replace", breaking)
    with pytest.raises(KeyboardInterrupt):
        filled(model, 70).save(tmp_path, overwrite=True, shard_bytes=10_000)
    with pytest.raises(FileNotFoundError, match=INDEX):
        RecSACache.load(tmp_path)
    monkeypatch.setattr(cache_files_recsa_qwen3.os, "replace", replace)
    filled(model, 30).save(tmp_path)
    assert RecSACache.load(tmp_path, model).lengths == [30]


def test_what_is_no_cache_is_not_overwritten(model, tmp_path):
    cache = filled(model, 20)
    (tmp_path / "file").write_text("text")
    with pytest.raises(FileExistsError, match="is a file"):
        cache.save(tmp_path / "file", overwrite=True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("text")
    with pytest.raises(FileExistsError, match="thesis.txt"):
        cache.save(tmp_path / "folder", overwrite=True)
    (tmp_path / "folder" / INDEX).write_text('{"format": "something"}')
    with pytest.raises(ValueError, match="no index of a cache"):
        cache.save(tmp_path / "folder", overwrite=True)
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "text"
    cache.save(tmp_path / "cache")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        cache.save(tmp_path / "cache")
    (tmp_path / "cache" / "notes.txt").write_text("kept")
    filled(model, 30).save(tmp_path / "cache", overwrite=True)
    assert RecSACache.load(tmp_path / "cache").lengths == [30]
    assert (tmp_path / "cache" / "notes.txt").read_text() == "kept"


def test_what_cannot_be_saved_is_refused(model, tmp_path):
    with pytest.raises(ValueError, match="no tokens"):
        RecSACache(model.config).save(tmp_path / "a")
    apart = filled(model, 20)
    apart.layers[1].crop(-1)
    with pytest.raises(ValueError, match="interrupted"):
        apart.save(tmp_path / "a")
    with pytest.raises(ValueError, match="shard_bytes"):
        filled(model, 20).save(tmp_path / "a", shard_bytes=0)
    with pytest.raises(TypeError, match="RecSAQwen3Model"):
        filled(model, 20).save(tmp_path / "a", model=torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="recsa_top_k=4, the model has recsa_top_k=3"):
        filled(model, 20).save(tmp_path / "a", model=tiny_model(recsa_top_k=3))
    assert not (tmp_path / "a").exists()
    copied = copy.deepcopy(filled(model, 20))
    with pytest.raises(ValueError, match="model=model"):
        copied.save(tmp_path / "a")
    copied.save(tmp_path / "a", model=model)
    gone = tiny_model(seed=3)
    cache = filled(gone, 20)
    del gone
    gc.collect()  # the cache does not keep its model
    with pytest.raises(ValueError, match="gone"):
        cache.save(tmp_path / "b")
    cache.save(tmp_path / "b", model=tiny_model(seed=3))
    assert RecSACache.load(tmp_path / "b", tiny_model(seed=3)).lengths == [20]


# ---- damaged files --------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(model, tmp_path):
    """A folder with a cache in several files."""
    filled(model, 70, 2, "fp8_e4m3").save(tmp_path / "saved", shard_bytes=20_000)
    return tmp_path / "saved"


def edit_index(folder, **changes):
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**index, **changes}))


def test_places_without_a_cache(tmp_path):
    with pytest.raises(FileNotFoundError, match="no directory"):
        RecSACache.load(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match=INDEX):
        RecSACache.load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "other"}', "\x00\x01"])
def test_an_index_that_is_none(saved, text):
    (saved / INDEX).write_text(text)
    with pytest.raises(ValueError, match="no index of a cache"):
        RecSACache.load(saved)


def test_an_unknown_format(saved):
    edit_index(saved, format_version=99, package_version="9.9")
    with pytest.raises(ValueError, match="format_version=99.*reads 1.*9.9"):
        RecSACache.load(saved)


@pytest.mark.parametrize("name", cache_files_recsa_qwen3._KINDS)
def test_each_entry_of_the_index_is_asked_for(saved, name):
    index = json.loads((saved / INDEX).read_text())
    del index[name]
    (saved / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{name} is missing"):
        RecSACache.load(saved)


@pytest.mark.parametrize(
    "changes, match",
    [
        (dict(lengths=[70, 66]), "history.mask"),
        (dict(lengths=[700, 67]), "lengths"),
        (dict(lengths=[]), "lengths"),
        (dict(lengths=[70, 67, 70], columns=70), r"\[2, 2, 70, 32\].*\[3, 2, 70, 32\]"),
        (dict(lengths=[60, 60]), r"\[2, 2, 70, 32\].*\[2, 2, 60, 32\]"),
        (dict(kv_heads=4), r"\[2, 2, 70, 32\].*\[2, 4, 70, 32\]"),
        (dict(head_dim=16), r"\[2, 2, 70, 32\].*\[2, 2, 70, 16\]"),
        (dict(dtype="bfloat16"), "F32.*BF16"),
        (dict(dtype="int3"), "int3"),
        (dict(cache_dtype="auto"), "F8_E4M3.*F32"),
        (dict(cache_dtype="fp3"), "recsa_cache_dtype"),
        (dict(tensors={}), "lists no tensor"),
    ],
)
def test_an_index_that_does_not_fit_its_shards(saved, changes, match):
    edit_index(saved, **changes)
    with pytest.raises(ValueError, match=match):
        RecSACache.load(saved)


def test_shards_that_are_missing_cut_or_swapped(saved):
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) > 3
    whole = {file: file.read_bytes() for file in files}
    for file in (files[0], files[2], files[-1]):
        file.unlink()
        with pytest.raises(FileNotFoundError, match=file.name):
            RecSACache.load(saved)
        file.write_bytes(whole[file][:-1])
        with pytest.raises(ValueError, match=f"{file.name}.*bytes"):
            RecSACache.load(saved)
        file.write_bytes(b"\xff" * len(whole[file]))
        with pytest.raises(ValueError, match=f"{file.name}.*damaged"):
            RecSACache.load(saved)
        file.write_bytes(whole[file])
    tensors = load_file(files[0])
    name, tensor = tensors.popitem()
    with safe_open(files[0], framework="pt") as file:
        metadata = file.metadata()
    save_file({**tensors, name.replace("layers", "lawyers"): tensor}, files[0], metadata)
    edit_index(saved, files={file.name: file.stat().st_size for file in files})
    with pytest.raises(ValueError, match=name):
        RecSACache.load(saved)


def test_shards_of_another_save_are_refused(model, tmp_path):
    """Same shapes, same model, another text: a copy that was cut short leaves such a mixture."""
    for name in ("one", "other"):
        filled(model, 40).save(tmp_path / name, shard_bytes=10_000)
    shard = sorted((tmp_path / "one").glob("*.safetensors"))[1]
    shutil.copy(tmp_path / "other" / shard.name, shard)
    with pytest.raises(ValueError, match=f"{shard.name}.*another save"):
        RecSACache.load(tmp_path / "one", model)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_heads": -1},
        {"head_dim": "16"},
        {"offsets": ["x"]},
        {"offsets": [0, 0, 0]},
        {"files": {"cache-00001-of-00001.safetensors": "12"}},
        {"tensors": {"layers.0.levels.0.keys": ["a"]}},
    ],
)
def test_an_index_with_damaged_entries_is_refused(model, tmp_path, changes):
    filled(model, 40).save(tmp_path / "kept")
    edit_index(tmp_path / "kept", **changes)
    with pytest.raises(ValueError, match="damaged"):
        RecSACache.load(tmp_path / "kept")


def test_places_where_nothing_can_be_written_are_refused_first(model, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for place in (tmp_path / "file" / "below", tmp_path / "link"):
        with pytest.raises(OSError):
            cache_files_recsa_qwen3.check_target(place)
    with pytest.raises(ValueError, match="path"):
        cache_files_recsa_qwen3.check_target("")
    (tmp_path / "odd" / "cache-00001-of-00001.safetensors").mkdir(parents=True)
    with pytest.raises(FileExistsError):
        cache_files_recsa_qwen3.check_target(tmp_path / "odd")
    with pytest.raises(ValueError, match="path"):
        filled(model, 40).save("")
    filled(model, 40).save(tmp_path / "kept")
    with pytest.raises(ValueError, match="meta"):
        RecSACache.load(tmp_path / "kept", device="meta")


# ---- whose states ---------------------------------------------------------------------------------------------------


def test_a_change_between_filling_and_saving_is_noticed(tmp_path):
    """Settings, weights, another model: the files would name what did not fill them."""
    model = tiny_model(seed=5)
    stored = model.config.recsa_top_k
    cache = filled(model, 90)
    cache.save(tmp_path / "before")
    model.config.recsa_top_k = stored - 1
    with pytest.raises(ValueError, match="recsa_top_k"):
        cache.save(tmp_path / "after")
    loaded = RecSACache.load(tmp_path / "before")
    with pytest.raises(ValueError, match="recsa_top_k"), torch.no_grad():
        model(random_ids(1, 2), cache=loaded)
    model.config.recsa_top_k = stored
    cache.save(tmp_path / "after")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match="weights were changed"):
        cache.save(tmp_path / "later")
    assert not (tmp_path / "later").exists()


def test_a_cache_that_two_models_filled_is_not_saved(model, tmp_path):
    other = tiny_model(seed=6)
    cache = filled(model, 40)
    with pytest.raises(ValueError, match="other weights"):
        cache.save(tmp_path / "kept", model=other)
    with torch.no_grad():
        other(random_ids(1, 3), cache=cache)
    for named in (None, model, other):
        with pytest.raises(ValueError, match="several models"):
            cache.save(tmp_path / "kept", model=named)
    cache.crop(-43)
    with torch.no_grad():
        other(random_ids(1, 30), cache=cache)
    cache.save(tmp_path / "kept", model=other)  # filled anew


def test_a_loaded_cache_that_is_filled_anew_belongs_to_who_fills_it(model, tmp_path):
    filled(model, 40).save(tmp_path / "kept")
    other, loaded = tiny_model(seed=6), RecSACache.load(tmp_path / "kept", model)
    loaded.crop(-40)
    with torch.no_grad():
        other(random_ids(1, 30), cache=loaded)
        other(random_ids(1, 2), cache=copy.deepcopy(loaded))
    loaded.save(tmp_path / "anew")
    assert RecSACache.load(tmp_path / "anew", other).lengths == [30]
    with pytest.raises(ValueError, match="other weights"):
        RecSACache.load(tmp_path / "anew", model)


def test_a_cache_of_padding_alone_is_not_saved(model, tmp_path):
    cache = RecSACache(model.config)
    with torch.no_grad():
        model(random_ids(2, 5), attention_mask=torch.zeros(2, 5, dtype=torch.long), cache=cache)
    with pytest.raises(ValueError, match="no tokens"):
        cache.save(tmp_path / "kept")


def test_a_dense_cache_is_kept_as_well(tmp_path):
    model = tiny_model(recsa_top_k=None, recsa_top_capacity=None)
    cache = filled(model, 40)
    cache.save(tmp_path / "kept")
    for loaded in (RecSACache.load(tmp_path / "kept"), RecSACache.load(tmp_path / "kept", model)):
        with torch.no_grad():
            model(random_ids(1, 2), cache=loaded)


def test_no_file_outside_the_directory_is_read(saved):
    outside = saved.parent / "outside.safetensors"
    shutil.copy(next(saved.glob("*.safetensors")), outside)
    index = json.loads((saved / INDEX).read_text())
    tensors = dict.fromkeys(index["tensors"], "../outside.safetensors")
    edit_index(saved, tensors=tensors, files={"../outside.safetensors": outside.stat().st_size})
    with pytest.raises(FileNotFoundError, match="outside"):
        RecSACache.load(saved)


def test_a_cache_that_does_not_fit_the_device_is_refused_before_it_is_read(model, tmp_path, monkeypatch):
    filled(model, 70).save(tmp_path)
    monkeypatch.setattr(cache_files_recsa_qwen3, "_read_shard", None)
    with pytest.raises(MemoryError, match="GiB"):
        RecSACache.load(tmp_path, model, reserve=1 << 42)
    with pytest.raises(ValueError, match="recsa_gpu_budget"):
        RecSACache.load(tmp_path, model, gpu_budget=1.0)
    with pytest.raises(ValueError, match="not both"):
        RecSACache.load(tmp_path, model, device="cpu")


# ---- the model behind it --------------------------------------------------------------------------------------------

OTHER_FIELDS = [
    dict(recsa_top_k=3),
    dict(recsa_top_k=None),
    dict(recsa_recent=2),
    dict(recsa_top_capacity=20),
    dict(recsa_count_bias=True),
    dict(rms_norm_eps=1e-5),
    dict(rope_parameters={"rope_type": "default", "rope_theta": 5e4}),
    dict(recsa_branching=2),
    dict(num_hidden_layers=2),
    dict(num_key_value_heads=1),
    dict(vocab_size=300),
]


@pytest.mark.parametrize("changes", OTHER_FIELDS, ids=str)
def test_a_model_that_computes_otherwise_is_refused_by_field(model, tmp_path, changes):
    """At once with the model at hand, at the first forward without it; both values are named."""
    filled(model, 40).save(tmp_path)
    other = tiny_model(**changes)
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=f"{name}=.*{name}="):
        RecSACache.load(tmp_path, other)
    with pytest.raises(ValueError, match=f"{name}|recsa_branching"), torch.no_grad():
        other(torch.full((1, 2), 7), cache=RecSACache.load(tmp_path))


def test_settings_that_change_no_state_are_free(model, tmp_path):
    cache = filled(model, 70)
    cache.save(tmp_path)
    free = dict(
        recsa_backend="reference", recsa_prefill_chunk=7, recsa_cuda_graph=False, recsa_cache_dtype="fp8_e4m3",
        max_position_embeddings=99, recsa_top_capacity=None,  # k * r is what TINY has
    )  # fmt: skip
    loaded = RecSACache.load(tmp_path, tiny_model(**free))
    assert loaded.cache_dtype == "auto"
    assert_same_entries(cache, loaded)


def edited(edit):
    model = tiny_model()
    with torch.no_grad():
        edit(model)
    return model


OTHER_WEIGHTS = {
    "another seed": lambda: tiny_model(seed=1),
    "a cast": lambda: tiny_model().bfloat16(),
    "the embedding": lambda: edited(lambda m: m.model.embed_tokens.weight.mul_(1.001)),
    "the first value": lambda: edited(lambda m: m.model.layers[2].mlp.up_proj.weight[0, 0].add_(1e-3)),
    "the last value": lambda: edited(lambda m: m.model.layers[0].self_attn.k_proj.weight[-1, -1].add_(1e-3)),
    "a pooler": lambda: edited(lambda m: m.model.layers[1].self_attn.pooler.slot_bias[1].add_(1)),
    "a norm": lambda: edited(lambda m: m.model.layers[1].self_attn.k_norm.weight.mul_(2)),
    "layers swapped": lambda: edited(lambda m: m.model.layers.insert(0, m.model.layers.pop(1))),
}


@pytest.mark.parametrize("change", OTHER_WEIGHTS)
def test_other_weights_are_refused(model, tmp_path, change):
    filled(model, 40).save(tmp_path)
    other = OTHER_WEIGHTS[change]()
    assert fingerprint(other) != fingerprint(model) == fingerprint(model.model) == fingerprint(tiny_model())
    match = "other weights.*torch.float32.*torch.bfloat16" if change == "a cast" else "other weights"
    with pytest.raises(ValueError, match=match):
        RecSACache.load(tmp_path, other)
    cache = RecSACache.load(tmp_path)
    for _ in range(2):  # not remembered as checked
        with pytest.raises(ValueError, match=match), torch.no_grad():
            other(random_ids(1, 2), cache=cache)
    with pytest.raises(ValueError, match=match):
        other.generate(random_ids(1, 42), **{CACHE_FIELD: cache}, max_new_tokens=2)
    with pytest.raises(ValueError, match=match):
        cache.save(tmp_path / "again", model=other)
    with torch.no_grad():
        model(random_ids(1, 2), cache=cache)
    with pytest.raises(ValueError, match=match), torch.no_grad():
        other(random_ids(1, 2), cache=cache)  # nor is the right one's check taken for another model's


def test_the_head_does_not_count(model, tmp_path):
    filled(model, 40).save(tmp_path)
    other = edited(lambda m: m.lm_head.weight.mul_(2))
    assert RecSACache.load(tmp_path, other).lengths == [40]


def test_adapters_count(model, tmp_path):
    """LoRA attached, switched off, scaled otherwise or merged: each computes, or says it computes, something else."""
    peft = pytest.importorskip("peft")
    prints = [fingerprint(model)]
    adapted = peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    prints.append(fingerprint(adapted))
    with adapted.disable_adapter():
        prints.append(fingerprint(adapted))
    for layer in adapted.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.scaling["default"] *= 2
    prints.append(fingerprint(adapted))
    cache = RecSACache(model.config)
    with torch.no_grad():
        adapted(input_ids=random_ids(1, 30), **{CACHE_FIELD: cache})
    cache.save(tmp_path)
    assert RecSACache.load(tmp_path, adapted).lengths == [30]
    with pytest.raises(ValueError, match="other weights"):
        RecSACache.load(tmp_path, model)
    prints.append(fingerprint(adapted.merge_and_unload()))
    assert len(set(prints)) == len(prints)


def test_offloaded_weights_cannot_be_compared():
    model = tiny_model()
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="layers.1.*offloaded"):
        fingerprint(model)


def test_odd_parameters(model):
    """Not contiguous, empty, of one value: the values count, not how they lie."""
    other = tiny_model()
    weight = other.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.t().contiguous().t()
    assert not weight.is_contiguous() and fingerprint(other) == fingerprint(model)
    other.model.register_buffer("one", torch.tensor(3.0))
    first = fingerprint(other)
    other.model.one += 1
    assert fingerprint(other) != first
    other.model.one = torch.empty(0, 4)
    assert len(fingerprint(other)) == 64


def test_the_fingerprint_is_taken_once(model, tmp_path, monkeypatch):
    """At the first forward of a model that a loaded cache meets; never for a cache that was not loaded."""
    calls = []
    take = cache_files_recsa_qwen3.fingerprint
    monkeypatch.setattr(cache_files_recsa_qwen3, "fingerprint", lambda m: calls.append(m) or take(m))
    cache = filled(model, 40)
    assert not calls
    cache.save(tmp_path)
    calls.clear()
    loaded = RecSACache.load(tmp_path)
    assert not calls
    for _ in range(3):
        with torch.no_grad():
            model(random_ids(1, 1), cache=loaded)
    assert calls == [model.model]
    loaded.reset()
    with torch.no_grad():
        tiny_model(seed=5)(random_ids(1, 20), cache=loaded)  # forgotten with the tokens


def test_a_model_made_of_the_stored_settings_is_not_needed(tmp_path):
    """Without a model the configuration comes from the index, and nothing of it is lost."""
    model = tiny_model(
        recsa_top_capacity=None, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    )
    filled(model, 40).save(tmp_path)
    cache = RecSACache.load(tmp_path)
    assert cache_files_recsa_qwen3.deciding_fields(cache.config) == cache_files_recsa_qwen3.deciding_fields(
        model.config
    )
    assert cache.geometry == RecSACache(model.config).geometry
    with torch.no_grad():
        model(random_ids(1, 2), cache=cache)


# ---- cost -----------------------------------------------------------------------------------------------------------


def entries_cache(length: int) -> RecSACache:
    """A cache of random states; no model reads a text for it."""
    config = tiny_config(num_hidden_layers=2, head_dim=64, recsa_branching=16, recsa_top_k=4, recsa_top_capacity=64)
    cache = RecSACache(config)
    for layer in cache.layers:
        layer.allocate(torch.empty(1, 2, 0, 64), length)
        layer.history = cache_files_recsa_qwen3.RowHistory.of([length], length, [], None)
        for tensor in layer.entries().values():
            tensor.normal_()
    cache.fields, cache.fingerprint = cache_files_recsa_qwen3.deciding_fields(config), "a" * 64
    return cache


def test_time_grows_with_the_length_alone(tmp_path):
    times = []
    for length in (16_384, 131_072):
        cache = entries_cache(length)
        cache.save(tmp_path / str(length))
        spent = []
        for _ in range(3):
            began = time.perf_counter()
            loaded = RecSACache.load(tmp_path / str(length))
            spent.append(time.perf_counter() - began)
        assert loaded.lengths == [length]
        times.append(min(spent))
    assert times[1] < 20 * times[0] + 0.05  # 8 times the length


def test_no_second_copy_in_memory(tmp_path, monkeypatch):
    """Entries pass through memory a row and a head at a time, both ways."""
    cache, largest = entries_cache(20_000), []
    parts = cache_files_recsa_qwen3._parts

    def watched(tensor):
        for part in parts(tensor):
            largest.append(tensor[part].nbytes)
            yield part

    monkeypatch.setattr(cache_files_recsa_qwen3, "_parts", watched)
    cache.save(tmp_path)
    assert_same_entries(cache, RecSACache.load(tmp_path))
    assert max(largest) == 20_000 * 64 * 4 and len(largest) == 2 * 2 * 2 * (2 + 3 * 3)


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", ["auto", "fp8_e4m3"])
def test_from_a_gpu_to_the_host_and_back(tmp_path, dtype):
    """Devices and places of level 0 may differ between saving and loading."""
    here = tiny_model()
    there = tiny_model().cuda()
    assert fingerprint(here) == fingerprint(there)
    cache = filled_on(there, dtype)
    cache.save(tmp_path)
    ids = random_ids(1, 20).cuda()
    loaded = [RecSACache.load(tmp_path, there), RecSACache.load(tmp_path, there, gpu_budget=0.0)]
    assert all(layer.device.type == "cuda" for one in loaded for layer in one.layers)
    copied = RecSACache.load(tmp_path, here)
    assert all(layer.device.type == "cpu" for layer in copied.layers)
    expected = go_on(there, cache, ids)
    for one in loaded:
        assert all(map(torch.equal, go_on(there, one, ids), expected))


def filled_on(model, dtype: str) -> RecSACache:
    cache = RecSACache(model.config, dtype=dtype)
    with torch.no_grad():
        model(random_ids(1, 90).to(model.device), cache=cache)
    return cache
