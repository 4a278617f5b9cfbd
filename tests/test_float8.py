"""Float8 storage: the codes themselves, and that every path reads exactly the numbers that they stand for."""

import copy

import pytest
import torch

from conftest import DENSE, LENGTHS, LOGITS_ATOL, random_ids, relative_rms, tiny_config, tiny_model
from operands import make_case
from recsa_qwen3 import Levels, RecSACache, RecSAPooler
from recsa_qwen3.float8_recsa_qwen3 import CODES, pack, unpack
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD
from recsa_qwen3.rows_recsa_qwen3 import Rows

torch.set_num_threads(1)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
# Half a unit in the last of four significant bits, relative to the value; and below the normal codes, to the largest.
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-10 / 224


def test_codes_are_the_nearest_and_no_scale_is_wasted():
    magnitude = torch.logspace(-30, 30, 61)[:, None, None]
    states = torch.randn(61, 5, 48) * magnitude
    codes, exponents = pack(states)
    assert codes.dtype == CODES and exponents.dtype == torch.int8 and exponents.shape == states.shape[:2]
    largest = codes.float().abs().amax(-1)
    assert bool(((largest > 223) & (largest <= 448)).all())  # one more power of two would overflow
    error = (unpack(codes, exponents, torch.float32).double() - states.double()).abs()
    bound = RELATIVE * states.double().abs() + ABSOLUTE * states.double().abs().amax(-1, keepdim=True)
    assert bool((error <= bound).all())
    assert relative_rms(unpack(codes, exponents, torch.float32)[0], states[0]) < 0.04


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_rounds_nothing(dtype):
    """Packing what was unpacked gives the same codes, and both dtypes hold the same numbers."""
    packed = pack(torch.randn(7, 64) * torch.logspace(-6, 6, 7)[:, None])
    read = unpack(*packed, dtype)
    assert torch.equal(read.float(), unpack(*packed, torch.float64).float())
    again = pack(read)
    assert torch.equal(unpack(*again, dtype), read)


def test_special_values():
    nan, inf = float("nan"), float("inf")
    read = unpack(
        *pack(torch.tensor([[0.0, -0.0], [448.0, -1.0], [449.0, 1.0], [nan, 2.0], [-inf, 2.0]])), torch.float32
    )
    assert read[0].tolist() == [0, 0] and read[1].tolist() == [448, -1] and read[2].tolist() == [448, 1]
    assert bool(read[3:, 0].isnan().all()) and read[3:, 1].tolist() == [2, 2]


def packed_levels(levels: Levels) -> tuple[Levels, Levels]:
    """The same tree with level 0 as codes, and with the numbers that these stand for."""
    (keys, key_exponents), (values, value_exponents) = pack(levels.keys[0]), pack(levels.values[0])
    dtype = levels.keys[0].dtype
    read = unpack(keys, key_exponents, dtype), unpack(values, value_exponents, dtype)
    return (
        Levels((keys, *levels.keys[1:]), (values, *levels.values[1:]), (key_exponents, value_exponents)),
        Levels((read[0], *levels.keys[1:]), (read[1], *levels.values[1:])),
    )


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("width", [3, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_reads_codes_as_their_numbers(backend, width, dtype):
    """Bit for bit, over dense queries and three depths, ragged rows, and a storage with more behind the rows."""
    case = make_case((9, 55, 215), (width, width, width - 1), dtype=dtype)
    for name in ("query", "keys", "values", "pooler"):
        setattr(case, name, getattr(case, name).to(DEVICE))
    case.rope = tuple(table.to(DEVICE) for table in case.rope)
    codes, numbers = packed_levels(case.levels())
    actual, expected = (case.run(levels=levels, backend=backend) for levels in (codes, numbers))
    assert backend in actual.backend.split("+") and torch.equal(actual.output, expected.output)
    assert all(torch.equal(actual.selection[level], nodes) for level, nodes in expected.selection.items())
    assert not torch.equal(actual.output, case.run(backend=backend).output)  # something was rounded


def test_attention_matrices_from_codes():
    case = make_case((30,), (20,), dtype=torch.float32)
    codes, numbers = packed_levels(case.levels())
    actual, expected = (case.run(levels=levels, return_weights=True) for levels in (codes, numbers))
    assert torch.equal(actual.weights, expected.weights) and torch.equal(actual.output, expected.output)


def test_codes_that_are_not_numbers_show():
    case = make_case((40,), (20,), dtype=torch.float32)
    codes, _ = packed_levels(case.levels())
    codes.values[0][:, :, 59, 0] = float("nan")  # the last query's own
    output = case.run(levels=codes).output
    assert bool(output[0, :, -1, 0].isnan().all()) and bool(output[0, :, :-4].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 80])
def test_kernels_pack_bit_for_bit(dtype, head_dim):
    kernels_build = pytest.importorskip("recsa_qwen3.kernels_build_recsa_qwen3")
    states = torch.randn(2, 3, 37, head_dim) * torch.logspace(-3, 3, 37)[:, None]
    states[0, 0, 3], states[1, 2, 5, 1], states[1, 1, 6, 2] = 0, float("nan"), float("inf")
    states = states.to(DEVICE, dtype).transpose(1, 2).contiguous().transpose(1, 2)
    actual, expected = kernels_build.pack_by_kernel(states), pack(states)
    assert torch.equal(actual.exponents, expected.exponents)
    assert torch.equal(actual.codes.view(torch.uint8) & 0x7F, expected.codes.view(torch.uint8) & 0x7F)
    read = [unpack(*packed, torch.float32).nan_to_num(7e7) for packed in (actual, expected)]
    assert torch.equal(*read)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_stores_what_prefill_stores(dtype):
    """One token at a time by the kernel of decoding, all at once by those of prefill: the same bits on each level."""
    kernels_build = pytest.importorskip("recsa_qwen3.kernels_build_recsa_qwen3")
    r, kv_heads, head_dim, tokens = 4, 2, 48, 23
    config = tiny_config(head_dim=head_dim, num_hidden_layers=1, recsa_cache_dtype="fp8_e4m3")
    pooler = RecSAPooler(kv_heads, r, head_dim).to(DEVICE, dtype).requires_grad_(False)
    for parameter in pooler.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    keys, values = (torch.randn(2, kv_heads, tokens, head_dim).to(DEVICE, dtype) for _ in "kv")
    by = (kernels_build.build_nodes_by_kernel, kernels_build.pack_by_kernel)
    whole, stepped = (RecSACache(config, reserve=tokens).layers[0] for _ in range(2))
    whole.append(keys, values, Rows.whole(2, tokens), tokens, pooler, *by)
    stepped.append(keys[:, :, :2], values[:, :, :2], Rows.whole(2, 2), 2, pooler, *by)
    stepped.make_room(tokens)
    tensors = [level.tensors for level in stepped.levels]
    lengths = torch.full((2,), 2, dtype=torch.int32, device=DEVICE)
    for t in range(2, tokens):
        kernels_build.append_tokens(
            keys[:, :, t : t + 1], values[:, :, t : t + 1],
            *(tuple(held[name] for held in tensors) for name in ("keys", "values")),
            tuple(held.get("pooled", held["keys"]) for held in tensors), lengths, pooler,
            (tensors[0]["key_exponents"], tensors[0]["value_exponents"]),
        )  # fmt: skip
        lengths += 1
    for level, held in enumerate(whole.levels):
        for name, tensor in held.tensors.items():
            number = tokens // r**level
            ours, theirs = (
                t[:, :, :number].contiguous().view(torch.uint8) for t in (stepped.levels[level].tensors[name], tensor)
            )
            assert torch.equal(ours, theirs), (level, name)


# ---- the cache ------------------------------------------------------------------------------------------------------


def forward(model, ids, cache, size: int, **options) -> torch.Tensor:
    with torch.no_grad():
        parts = [model(part, cache=cache, **options).logits for part in ids.split(size, 1)]
    return torch.cat(parts, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_and_single_tokens_agree(length):
    """Nodes come from what is stored, so no chunking can change them."""
    model, ids = tiny_model(recsa_cache_dtype="fp8_e4m3").double(), random_ids(2, length)
    caches = [RecSACache(model.config) for _ in range(3)]
    whole, sevens, singles = (forward(model, ids, c, n) for c, n in zip(caches, (length, 7, 1), strict=True))
    for other, cache in ((sevens, caches[1]), (singles, caches[2])):
        torch.testing.assert_close(other, whole, rtol=0, atol=LOGITS_ATOL)
        for one, another in zip(caches[0].layers, cache.layers, strict=True):
            for level in range(len(one.levels)):
                torch.testing.assert_close(one.node_keys(level), another.node_keys(level), rtol=0, atol=1e-9)


def test_half_the_memory_and_the_model_stays_itself():
    model, ids = tiny_model(), random_ids(1, 6 * DENSE)
    plain, packed = RecSACache(model.config), RecSACache(model.config, dtype="fp8_e4m3")
    logits = [forward(model, ids, cache, 6 * DENSE) for cache in (plain, packed)]
    assert torch.equal(logits[0], forward(model, ids, RecSACache(model.config), 6 * DENSE))
    sizes = [cache.layers[0].levels[0].nbytes for cache in (plain, packed)]
    assert sizes[1] * 32 * 4 == sizes[0] * (32 + 1)  # float32, width 32, one exponent
    assert packed.layers[0].levels[1].tensors["keys"].dtype == torch.float32
    assert packed.layers[0].keys.dtype == torch.float32 and packed.layers[0].keys.shape == plain.layers[0].keys.shape


def test_every_method_of_the_cache_knows_codes():
    """Copies, crops, reordering, repeating, selecting and moving give what a fresh cache of the same rows gives."""
    model, ids = tiny_model(recsa_cache_dtype="fp8_e4m3").double(), random_ids(2, 5 * DENSE + 3)

    def fill(rows):
        cache = RecSACache(model.config)
        forward(model, rows, cache, 11)
        return cache

    more = random_ids(2, 9)
    changed = fill(ids)
    changed.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(forward(model, more, changed, 9), forward(model, more, fill(ids.flip(0)), 9))
    changed = copy.deepcopy(fill(ids))
    changed.batch_select_indices(torch.tensor([1]))
    changed.batch_repeat_interleave(2)
    assert torch.equal(forward(model, more, changed, 9), forward(model, more, fill(ids[[1, 1]]), 9))
    changed = fill(torch.cat([ids, more], 1))
    changed.crop(-9)
    assert torch.equal(forward(model, more, changed, 9), forward(model, more, fill(ids), 9))
    changed = fill(ids).move_to(dtype=torch.float32)
    assert changed.layers[0].levels[0].tensors["keys"].dtype == CODES
    assert forward(model.float(), more, changed, 9).dtype == torch.float32


@pytest.mark.parametrize("how", ["config", "cache", "generate"])
def test_asked_for_in_three_places(how):
    model, ids = tiny_model(), random_ids(1, 3 * DENSE)
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    if how == "config":
        model.config.recsa_cache_dtype = "fp8_e4m3"
    elif how == "cache":
        options[CACHE_FIELD] = RecSACache(model.config, dtype="fp8_e4m3")
    else:
        options["cache_config"] = {"dtype": "fp8_e4m3"}
    cache = getattr(model.generate(ids, **options), CACHE_FIELD)
    assert cache.layers[0].levels[0].tensors["keys"].dtype == CODES


@pytest.mark.parametrize("wrong", ["fp8", "float8_e4m3fn", torch.float8_e4m3fn, None])
def test_other_names_are_refused(wrong):
    with pytest.raises(ValueError, match="recsa_cache_dtype"):
        tiny_config(recsa_cache_dtype=wrong)
    if wrong is not None:
        with pytest.raises(ValueError, match="recsa_cache_dtype"):
            RecSACache(tiny_config(), dtype=wrong)
    model = tiny_model()
    with pytest.raises(ValueError, match="cache_config"):
        model.generate(random_ids(1, 5), max_new_tokens=1, cache_config={"typo": 1})


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("training", [False, True])
def test_codes_refuse_gradients(length, training):
    """A code would cut them off, and a loss would look as usual."""
    model = tiny_model(recsa_cache_dtype="fp8_e4m3").train(training)
    ids = random_ids(1, length)
    with pytest.raises(ValueError, match="recsa_cache_dtype.*gradient"):
        model(ids, labels=ids, use_cache=True)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert model.model.layers[0].self_attn.v_proj.weight.grad.norm() > 0
    with torch.no_grad():
        model(ids, use_cache=True)
