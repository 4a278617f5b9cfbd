"""The Triton kernels at the product's shapes, and decoding steps as CUDA graphs; `make test-gpu` runs all of it.

Every check is a function of sizes, so that small ones can run under Triton's interpreter too.
"""

import copy
import dataclasses
import gc
import weakref

import pytest
import torch

import oracle
from conftest import DENSE, LOGITS_ATOL, RELATIVE_RMS, random_ids, relative_rms, tiny_model
from operands import selections_of
from recsa_qwen3 import (
    Levels,
    RecSACache,
    RecSAPooler,
    TreeGeometry,
    attention_recsa_qwen3,
    build_levels,
    recsa_attention,
)
from recsa_qwen3.attention_recsa_qwen3 import RecSAOutput
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD
from recsa_qwen3.tree_recsa_qwen3 import build_nodes

kernels_prefill = pytest.importorskip("recsa_qwen3.kernels_prefill_recsa_qwen3")
kernels_build = pytest.importorskip("recsa_qwen3.kernels_build_recsa_qwen3")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPTURES = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = TreeGeometry(branching=16, top_k=8, recent=1, top_capacity=256)
DEFAULT = TreeGeometry(branching=16, top_k=128, recent=1, top_capacity=8192)
# Where the default geometry's walk begins to start from level 2.
FAR = DEFAULT.first_position(2)
# By how much of the greatest importance a chosen candidate may lie below one left out: keys and queries are rounded
# after each rotation in half precision.
GAP = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}


# ---- operands and judges --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Operands:
    """One call of the operator on random tensors of the device."""

    geometry: TreeGeometry
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    query: torch.Tensor
    levels: Levels
    pooler: RecSAPooler
    tables: tuple[torch.Tensor, torch.Tensor]  # float64

    def run(self, **options) -> RecSAOutput:
        query, levels = options.pop("query", self.query), options.pop("levels", self.levels)
        rope = tuple(table.to(torch.promote_types(query.dtype, torch.float32)) for table in self.tables)
        options = {"backend": "triton", "return_selection": True, **options}
        return recsa_attention(query, levels, self.starts, self.counts, self.geometry, rope, **options)

    def exact(self, selection: dict[int, torch.Tensor] | None) -> torch.Tensor:
        """The reference's output in float64, given the selection."""
        levels = Levels(*(tuple(tensor.double() for tensor in tensors) for tensors in self.levels[:2]))
        return self.run(query=self.query.double(), levels=levels, selection=selection, backend="reference").output

    def at(self, start: int, count: int, query: torch.Tensor | None = None) -> "Operands":
        """The trees cut to `start + count` tokens, and queries (fresh ones, unless given) at their end."""
        r, sequences = self.geometry.branching, self.query.shape[0]
        if query is None:
            query = torch.randn_like(self.query[:, :, :1].expand(-1, -1, count, -1))
        depth = self.geometry.depth(start + count - 1)
        nodes = [-(-((start + count) // r**level) // r) * r for level in range(depth + 1)]
        cut = (tuple(t[:, :, :n] for t, n in zip(tensors, nodes, strict=False)) for tensors in self.levels[:2])
        return dataclasses.replace(
            self, starts=(start,) * sequences, counts=(count,) * sequences, query=query, levels=Levels(*cut)
        )

    def dense_queries(self, row: int) -> int:
        """Of one sequence: its first queries, which PyTorch's attention computes."""
        return min(max(self.geometry.top_capacity - self.starts[row], 0), self.counts[row])

    def row(self, row: int) -> "Operands":
        """One of the sequences, alone."""
        start, count = self.starts[row], self.counts[row]
        return dataclasses.replace(
            self.at(start, count, self.query[:, :, :count]),
            starts=(start,),
            counts=(count,),
            query=self.query[row : row + 1, :, :count],
            levels=Levels(*(tuple(t[row : row + 1] for t in tensors) for tensors in self.levels[:2])),
        )


def random_pooler(kv_heads: int, branching: int, head_dim: int, dtype: torch.dtype) -> RecSAPooler:
    pooler = RecSAPooler(kv_heads, branching, head_dim).requires_grad_(False)
    pooler.query.normal_().mul_(0.3)
    pooler.slot_bias.normal_()
    pooler.proj.normal_().mul_(head_dim**-0.5)
    return pooler.to(DEVICE, dtype)


def random_operands(
    geometry: TreeGeometry, starts, counts, dtype: torch.dtype, group: int = 4, head_dim: int = 128, kv_heads: int = 2
) -> Operands:
    sequences, width = len(starts), max(counts)
    tokens = max(start + count for start, count in zip(starts, counts, strict=True))
    query, keys, values = (
        torch.randn(sequences, heads, length, head_dim, device=DEVICE).to(dtype)
        for heads, length in ((group * kv_heads, width), (kv_heads, tokens), (kv_heads, tokens))
    )
    pooler = random_pooler(kv_heads, geometry.branching, head_dim, dtype)
    levels = build_levels(keys, values, pooler, geometry.branching, geometry.depth(tokens - 1))
    tables = oracle.rope_tables(1e6, head_dim, range(geometry.top_capacity))
    tables = (tables[0].to(DEVICE), tables[1].to(DEVICE))
    return Operands(geometry, tuple(starts), tuple(counts), query, levels, pooler, tables)


def shortfall(operands: Operands, selection: dict[int, torch.Tensor]) -> float:
    """Checks what a selection must hold, and returns by how much of the greatest importance one fell short at most.

    Importance in float64 along the chosen walk, written apart from the reference.
    """
    worst, geometry = 0.0, operands.geometry
    for row, (start, count) in enumerate(zip(operands.starts, operands.counts, strict=True)):
        depth = torch.tensor([geometry.depth(t) for t in range(start, start + count)], device=DEVICE)
        assert not count or int(depth[-1]) <= max(selection, default=0)
        for level, nodes in selection.items():
            assert torch.all(nodes[row, :, :count][:, depth < level] == -1)
            for top in (True, False):
                columns = torch.nonzero(depth == level if top else depth > level).flatten()
                for part in columns.split(50) if len(columns) else ():
                    worst = max(worst, _shortfall_of(operands, selection, row, level, part, top))
    return worst


def _shortfall_of(operands, selection, row: int, level: int, columns: torch.Tensor, top: bool) -> float:
    r, k, recent = operands.geometry.branching, operands.geometry.top_k, operands.geometry.recent
    keys, (cos, sin) = operands.levels.keys[level][row], operands.tables
    path = (operands.starts[row] + columns) // r**level
    chosen = selection[level][row][:, columns]  # [H_kv, w, k]
    number = path if top else (k - 1) * r + path % r  # candidates before the path
    slot = torch.arange(int(number.max()), device=DEVICE)
    if top:
        candidates = slot.expand(*chosen.shape[:2], -1)
        keys = keys[:, None, : len(slot)].double()  # [H_kv, 1, n, D]
    else:
        parents = selection[level + 1][row][:, columns]
        candidates = (parents[..., None] * r + torch.arange(r, device=DEVICE)).flatten(-2)[..., : len(slot)]
        index = candidates.clamp(max=keys.shape[1] - 1).flatten(1)
        keys = torch.stack([head[nodes] for head, nodes in zip(keys, index, strict=True)])
        keys = keys.unflatten(1, candidates.shape[1:]).double()  # [H_kv, w, n, D]
    keys = oracle.rotate(keys, cos[slot], sin[slot])
    query = operands.query[row][:, columns].double().unflatten(0, (len(chosen), -1)).transpose(1, 2)
    query = oracle.rotate(query, cos[number][:, None], sin[number][:, None])  # [H_kv, w, G, D]
    scored = slot < number[:, None]
    logits = (query @ keys.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~scored[:, None], float("-inf"))
    importance = torch.softmax(logits, -1).sum(2)
    place = torch.searchsorted(chosen.contiguous(), candidates.contiguous()).clamp(max=k - 1)
    taken = (chosen.gather(-1, place) == candidates) & scored
    free = slot < number[:, None] - recent
    assert torch.all(chosen[..., -1] == path) and torch.all(chosen.diff(dim=-1) > 0)
    assert torch.all(taken.sum(-1) == k - 1) and torch.all(taken | free | ~scored)
    least = importance.masked_fill(~(taken & free), float("inf")).amin(-1)
    left_out = importance.masked_fill(taken | ~free, 0.0).amax(-1)
    return float(((left_out - least) / importance.amax(-1)).max())


def check(operands: Operands, exact: torch.Tensor | None = None) -> RecSAOutput:
    """Output of the sparse queries given the same selection, together and each; selection by importance gap."""
    result, dtype = operands.run(), operands.query.dtype
    assert result.output.dtype == dtype and bool(result.output.isfinite().all())
    assert "triton" in result.backend
    exact = operands.exact(result.selection) if exact is None else exact
    for row, count in enumerate(operands.counts):
        assert torch.all(result.output[row, :, count:] == 0)
        dense = operands.dense_queries(row)
        if dense < count:
            actual, expected = result.output[row, :, dense:count], exact[row, :, dense:count]
            assert relative_rms(actual, expected) < RELATIVE_RMS[dtype]
            each = (actual.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
            assert float(each.max()) < 5 * RELATIVE_RMS[dtype]
    assert shortfall(operands, result.selection) < GAP[dtype]
    return result


def equal_results(first: RecSAOutput, second: RecSAOutput) -> bool:
    return torch.equal(first.output, second.output) and all(
        torch.equal(nodes, second.selection[level]) for level, nodes in first.selection.items()
    )


# ---- the operator ---------------------------------------------------------------------------------------------------


def check_borders(geometry: TreeGeometry, borders, dtype: torch.dtype, wide: int = 32, few: int = 16, **shape) -> None:
    """Blocks of prefill (wide) and of decoding (few) that end, begin or lie on both sides of each border."""
    tree = random_operands(geometry, (0,), (max(borders) + 2 * wide,), dtype, **shape)
    for border in borders:
        blocks = [(border - wide + shift, wide) for shift in (-1, 0, 1)]
        blocks += [(border - wide, 2 * wide), (border, wide), (border + 1, wide)]
        blocks += [(border - 2, 1), (border - 1, 1), (border, 1), (border - few, 2 * few)]
        for start, count in blocks:
            if start + count > geometry.top_capacity:
                check(tree.at(start, count))


@pytest.mark.parametrize(
    ("dtype", "depths"), [(torch.float32, (1, 2, 3)), (torch.bfloat16, (1, 2, 3)), (torch.float16, (2,))]
)
def test_around_every_border(dtype, depths):
    """CA-09, TK-03: lengths around M, M r and M r r."""
    check_borders(SMALL, [SMALL.first_position(depth) for depth in depths], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_geometry_far_out(dtype):
    """131,072 tokens and 320 queries on both sides, with all 8191 candidates at the top; 1 to 16 queries likewise."""
    tree = random_operands(DEFAULT, (0,), (FAR + 160,), dtype)
    for start, count in ((FAR - 160, 320), (FAR - 1, 1), (FAR, 1), (FAR - 16, 16), (FAR, 16)):
        check(tree.at(start, count))


@pytest.mark.parametrize(
    ("head_dim", "group", "dtype"), [(64, 1, torch.float16), (80, 3, torch.float32), (96, 8, torch.bfloat16)]
)
def test_other_shapes(head_dim, group, dtype):
    border = SMALL.first_position(2)
    tree = random_operands(SMALL, (0,), (border + 32,), dtype, group=group, head_dim=head_dim)
    for start, count in ((border - 32, 64), (border - 16, 32)):
        check(tree.at(start, count))


def check_oracle(geometry: TreeGeometry, start: int, count: int, dtype: torch.dtype, **shape) -> None:
    operands = random_operands(geometry, (start,), (count,), dtype, **shape)
    result = operands.run()
    expected, _, _ = oracle.attention(
        operands.query,
        operands.levels.keys[0][:, :, : start + count],
        operands.levels.values[0][:, :, : start + count],
        operands.pooler.query,
        operands.pooler.slot_bias,
        operands.pooler.proj,
        r=geometry.branching,
        k=geometry.top_k,
        s=geometry.recent,
        M=geometry.top_capacity,
        scaling=operands.query.shape[-1] ** -0.5,
        cos=operands.tables[0].cpu(),
        sin=operands.tables[1].cpu(),
        positions=[range(start, start + count)],
        selections=[selections_of(result.selection, 0, count)],
    )
    assert relative_rms(result.output.cpu(), expected) < RELATIVE_RMS[dtype]


@pytest.mark.parametrize("before", [32, 16])
def test_the_oracle(before):
    """32 queries: one block of prefill below the border M r, and two of decoding around it."""
    check_oracle(SMALL, SMALL.first_position(2) - before, 32, torch.float32)


# ---- batches, memory that nobody wrote, repetition, chunks ----------------------------------------------------------


def check_ragged(operands: Operands) -> None:
    """CA-10: sparse queries bit for bit; dense ones go through PyTorch's attention, which rounds by its own layout."""
    together = operands.run()
    for row, count in enumerate(operands.counts):
        assert torch.all(together.output[row, :, count:] == 0)
        if not count:
            assert all(torch.all(nodes[row] == -1) for nodes in together.selection.values())
            continue
        alone, dense = operands.row(row).run(), operands.dense_queries(row)
        assert torch.equal(together.output[row, :, dense:count], alone.output[0, :, dense:])
        if dense:
            error = relative_rms(together.output[row, :, :dense], alone.output[0, :, :dense])
            assert error < RELATIVE_RMS[operands.query.dtype]
        for level, nodes in together.selection.items():
            mine = alone.selection.get(level)
            assert torch.all(nodes[row] == -1) if mine is None else torch.equal(nodes[row, :, :count], mine[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["prefill", "decode"])
def test_ragged_batches_equal_single_sequences(path, dtype):
    """Dense throughout, one depth, in prefill across two of them, deep, and empty."""
    width, before = (64, 32) if path == "prefill" else (16, 16)
    starts = (60, 700, SMALL.first_position(2) - before, 30_000, 0)
    check_ragged(random_operands(SMALL, starts, (width,) * 4 + (0,), dtype))


def poisoned(operands: Operands) -> Operands:
    """The same call, with NaN past each sequence's end and complete nodes, and in the rows around."""

    def move(tensor: torch.Tensor, lengths, room: int) -> torch.Tensor:
        sequences, heads, length, head_dim = tensor.shape
        buffer = torch.full((sequences + 2, heads, length + room, head_dim), float("nan")).to(tensor)
        for row, number in enumerate(lengths):
            buffer[row + 1, :, :number] = tensor[row, :, :number]
        return buffer[1:-1]

    lengths = [start + count for start, count in zip(operands.starts, operands.counts, strict=True)]
    r = operands.geometry.branching
    levels = Levels(
        *(
            tuple(move(tensor, [n // r**level for n in lengths], 2 * r) for level, tensor in enumerate(tensors))
            for tensors in operands.levels[:2]
        )
    )
    return dataclasses.replace(operands, query=move(operands.query, operands.counts, 0), levels=levels)


@pytest.mark.parametrize("count", [32, 16])
def test_nothing_past_an_end_is_read(count):
    """TK-03: NaN there does not reach a result; partial groups at every level, rows of one depth and of another."""
    starts = (600, 3001, 5003, 30_007)
    operands = random_operands(SMALL, starts, (count,) * 4, torch.bfloat16)
    assert equal_results(operands.run(), poisoned(operands).run())


def check_repetition(operands: Operands, times: int) -> None:
    first = operands.run()
    for _ in range(times - 1):
        assert equal_results(operands.run(), first)


@pytest.mark.parametrize("count", [320, 1])
def test_repeated_runs_are_equal(count):
    """TK-04: 20 runs, bit for bit, though atomic operations order the pairs."""
    check_repetition(random_operands(DEFAULT, (100_000,), (count,), torch.bfloat16), 20)


def check_chunks(tree: Operands, start: int, widths, differing: int) -> None:
    """CA-07: cut into chunks of these widths as at once, except for so many (query, KV head) whose nodes differ."""
    count = sum(widths)
    whole = tree.at(start, count)
    together, outputs, begin = whole.run(), [], 0
    other = torch.zeros(together.output.shape[0], tree.levels.keys[0].shape[1], count, dtype=torch.bool, device=DEVICE)
    for width in widths:
        part = tree.at(start + begin, width, whole.query[:, :, begin : begin + width]).run()
        outputs.append(part.output)
        for level, nodes in together.selection.items():
            mine = part.selection.get(level, torch.full_like(nodes[:, :, :width], -1))
            other[:, :, begin : begin + width] |= (mine != nodes[:, :, begin : begin + width]).any(-1)
        begin += width
    assert int(other.sum()) <= differing
    same = ~other.repeat_interleave(together.output.shape[1] // other.shape[1], 1)
    assert relative_rms(torch.cat(outputs, 2)[same], together.output[same]) < RELATIVE_RMS[together.output.dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_chunking_equals_one_shot(dtype):
    """Chunks of prefill choose exactly alike; decoding adds up in another order, so one near-tie may differ."""
    tree = random_operands(DEFAULT, (0,), (FAR + 160,), dtype)
    for widths in ((96, 96, 128), (32, 288), (19, 301)):
        check_chunks(tree, FAR - 160, widths, 0)
    check_chunks(tree, FAR - 32, (16, 16) + (1,) * 32, 1)


# ---- 64-bit offsets -------------------------------------------------------------------------------------------------


def check_large(geometry: TreeGeometry, tokens: int, dtype: torch.dtype, kv_heads: int, group: int, head_dim: int):
    """Nodes by the kernel, the last token appended by the other; then prefill and a step at the storage's end."""
    r = geometry.branching
    pooler = random_pooler(kv_heads, r, head_dim, dtype)
    keys, values = (torch.randn(1, kv_heads, tokens, head_dim, device=DEVICE, dtype=dtype) for _ in range(2))
    pooled, all_keys, all_values = [keys], [keys], [values]
    for _ in range(geometry.depth(tokens - 1)):
        nodes = kernels_build.build_nodes_by_kernel(pooler, pooled[-1], all_values[-1], r)
        children = slice((nodes.keys.shape[2] - 2) * r, None)
        last = build_nodes(pooler, pooled[-1][:, :, children], all_values[-1][:, :, children], r)
        for actual, expected in zip(nodes, last, strict=True):
            assert relative_rms(actual[:, :, -2:], expected) < RELATIVE_RMS[dtype]
        pooled.append(nodes.pooled)
        all_keys.append(nodes.keys)
        all_values.append(nodes.values)
    stored = [tensor for tensors in (pooled, all_keys, all_values) for tensor in tensors]
    expected = [tensor[:, :, -1:].clone() for tensor in stored]
    before = [tensor[:, :, :-1].sum((0, 2, 3), dtype=torch.float32) for tensor in stored]
    for tensor in stored:
        tensor[:, :, -1:] = float("nan")
    lengths = torch.tensor([tokens - 1], dtype=torch.int32, device=DEVICE)
    last = expected[0], expected[2 * len(pooled)]  # key and value of the token
    kernels_build.append_tokens(*last, tuple(all_keys), tuple(all_values), tuple(pooled), lengths, pooler)
    for tensor, node, rest in zip(stored, expected, before, strict=True):
        assert torch.equal(tensor[:, :, -1:], node)
        assert torch.equal(tensor[:, :, :-1].sum((0, 2, 3), dtype=torch.float32), rest)

    check_end(geometry, tokens, dtype, Levels(tuple(all_keys), tuple(all_values)), pooler, group, head_dim)
    packed = [kernels_build.pack_by_kernel(states) for states in (keys, values)]
    del stored, pooled, keys, values
    all_keys[0], all_values[0] = (codes for codes, _ in packed)
    exponents = packed[0].exponents, packed[1].exponents
    check_end(geometry, tokens, dtype, Levels(tuple(all_keys), tuple(all_values), exponents), pooler, group, head_dim)


def check_end(geometry: TreeGeometry, tokens: int, dtype: torch.dtype, levels: Levels, pooler, group, head_dim):
    """Prefill and a step of the last queries against the reference on their slices, all in float64."""
    kv_heads = levels.keys[0].shape[1]
    tables = tuple(table.to(DEVICE) for table in oracle.rope_tables(1e6, head_dim, range(geometry.top_capacity)))
    for count in (20, 1):
        query = torch.randn(1, kv_heads * group, count, head_dim, device=DEVICE).to(dtype)
        operands = Operands(geometry, (tokens - count,), (count,), query, levels, pooler, tables)
        # the reference widens what it reads, so the levels need not be copied
        exact = operands.run(query=query.double(), selection=operands.run().selection, backend="reference").output
        check(operands, exact)


def test_offsets_beyond_32_bits():
    """Level 0 of 2.2M tokens has more than 2^31 elements, as vectors and as float8 codes; the last token completes
    three levels."""
    if torch.cuda.get_device_properties(0).total_memory < 80 << 30:
        pytest.skip("needs 80 GB")
    tokens = 538 * 16**3
    assert tokens * 8 * 128 > 2**31
    check_large(DEFAULT, tokens, torch.bfloat16, kv_heads=8, group=4, head_dim=128)


# ---- decoding steps -------------------------------------------------------------------------------------------------


def kernel_model(seed: int = 0, **changes):
    """TINY on the kernels, in float32."""
    return tiny_model(seed=seed, recsa_backend="triton", **changes).to(DEVICE)


def filled(model, ids: torch.Tensor, mask: torch.Tensor | None = None) -> RecSACache:
    cache = RecSACache(model.config)
    model(ids, mask, cache=cache)
    return cache


def walked(model, cache: RecSACache, ids: torch.Tensor) -> torch.Tensor:
    """Logits of new tokens behind a copy of the cache, without a decoding step."""
    model.config.recsa_cuda_graph = False
    logits = model(ids, cache=copy.deepcopy(cache)).logits
    model.config.recsa_cuda_graph = True
    return logits


def take_steps(model, cache: RecSACache, number: int = 3) -> object:
    """Checks steps of random tokens against the walk; the last of several is a replayed graph. Returns the step."""
    for _ in range(number):
        ids = random_ids(cache.layers[0].batch_size, 1).to(DEVICE)
        expected = walked(model, cache, ids)
        torch.testing.assert_close(model(ids, cache=cache).logits, expected, atol=LOGITS_ATOL, rtol=0)
        assert cache.step is not None
    assert not CAPTURES or number < 2 or cache.step.graph is not None
    return cache.step


@pytest.fixture
def no_gradients():
    with torch.no_grad():
        yield


def ids_and_mask(rows: int, width: int, padding: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows, the first of them padded on the left."""
    ids, mask = random_ids(rows, width), torch.ones(rows, width, dtype=torch.long)
    ids[0, :padding], mask[0, :padding] = 0, 0
    return ids.to(DEVICE), mask.to(DEVICE)


def generated(model, graph: bool, ids, mask, **options):
    model.config.recsa_cuda_graph = graph
    torch.manual_seed(11)
    options = {"max_new_tokens": 14, "do_sample": False, **options}
    return model.generate(ids, attention_mask=mask, return_dict_in_generate=True, **options)


HOW = {
    "greedy": dict(),
    "beams": dict(num_beams=3),
    "sampled": dict(do_sample=True),
    "lookup": dict(prompt_lookup_num_tokens=3),
    "assistant": dict(),
}


@pytest.mark.parametrize(
    ("how", "rows"), [(how, rows) for rows in (1, 2) for how in HOW if rows == 1 or how not in ("lookup", "assistant")]
)
def test_generate(how, rows):
    """CA-01, CA-03, CA-10: the same tokens with steps and without, through M r, growth and beside padding."""
    model, options = kernel_model(), dict(HOW[how])
    if how == "assistant":
        options["assistant_model"] = kernel_model(seed=1, num_hidden_layers=1)
    for width in (DENSE - 5, 4 * DENSE - 7):
        ids, mask = ids_and_mask(rows, width, padding=6 * (rows - 1))
        stepped, plain = (generated(model, graph, ids, mask, **options) for graph in (True, False))
        assert torch.equal(stepped.sequences, plain.sequences)
        if how in ("greedy", "sampled") and CAPTURES:
            assert getattr(stepped, CACHE_FIELD).step.graph is not None


def test_a_second_turn(no_gradients):
    """CA-05: generate behind the cache of the turn before, cut back as well."""
    model = kernel_model()
    ids, _ = ids_and_mask(1, 3 * DENSE)
    cache = getattr(generated(model, True, ids, None, max_new_tokens=6), CACHE_FIELD)
    for cut in (0, 9):
        cache.crop(-cut)
        turn = torch.cat((random_ids(1, cache.get_seq_length()), random_ids(1, 11)), 1).to(DEVICE)
        name = {CACHE_FIELD: copy.deepcopy(cache)}
        plain = generated(model, False, turn, None, **name)
        stepped = generated(model, True, turn, None, **{CACHE_FIELD: cache})
        assert torch.equal(stepped.sequences, plain.sequences)
        cache = getattr(stepped, CACHE_FIELD)


@pytest.mark.parametrize("padding", [0, 41])
def test_steps_across_borders_growth_crop_and_turns(padding, no_gradients):
    """CA-09: from below M r, through growth and completed nodes of three levels, back by a crop, and on."""
    model = kernel_model()
    cache = filled(model, *ids_and_mask(2, 4 * DENSE - 8, padding))
    take_steps(model, cache, 12)
    cache.crop(-7)
    take_steps(model, cache, 9)
    model(random_ids(2, 25).to(DEVICE), cache=cache)
    take_steps(model, cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    take_steps(model, cache)
    cache.batch_select_indices(torch.tensor([1]))
    take_steps(model, cache)


def test_what_a_graph_sees_of_a_changed_model(no_gradients):
    """Weights changed in place belong to the same step; another module, other places and other settings do not."""
    model = kernel_model()
    cache = filled(model, ids_and_mask(1, 3 * DENSE)[0])
    layer = model.model.layers[1]
    first = take_steps(model, cache)
    layer.mlp.up_proj.weight.add_(torch.randn_like(layer.mlp.up_proj.weight), alpha=0.1)
    layer.self_attn.pooler.query.mul_(1.5)
    assert take_steps(model, cache) is first
    layer.mlp = copy.deepcopy(layer.mlp)
    layer.mlp.up_proj.weight.mul_(2)
    second = take_steps(model, cache)
    assert second is not first
    held = [parameter.data for parameter in model.parameters()]  # or a round trip could end where it began
    model.to("cpu").to(DEVICE)
    third = take_steps(model, cache)
    assert (third is second) == (DEVICE == "cpu")  # where it stayed in place
    del held
    layer.self_attn.q_proj.weight = torch.nn.Parameter(layer.self_attn.q_proj.weight * 1.5)
    assert take_steps(model, cache) is not third


@pytest.mark.parametrize("field", ["recsa_recent", "recsa_count_bias", "recsa_top_k"])
def test_a_graph_follows_an_edited_configuration(field, no_gradients):
    """SQ-05: fields may be edited after load, between two tokens too."""
    model = kernel_model()
    cache = filled(model, ids_and_mask(1, 5 * DENSE)[0])
    take_steps(model, cache)
    setattr(model.config, field, {"recsa_recent": 0, "recsa_count_bias": True, "recsa_top_k": 3}[field])
    take_steps(model, cache)


def test_a_graph_belongs_to_one_model(no_gradients):
    """Another model behind the same cache does not replay the graph of the first."""
    model, other = kernel_model(), kernel_model(seed=1)
    cache = filled(model, ids_and_mask(1, 3 * DENSE)[0])
    for runner in (model, other, model):
        take_steps(runner, cache)


def test_a_graph_keeps_what_it_reads(no_gradients, monkeypatch):
    """Rotary tables are shared and replaced by longer ones; a graph that reads the old ones must hold them."""
    monkeypatch.setattr(attention_recsa_qwen3, "_rotary_tables", {})
    model = kernel_model()
    cache = filled(model, ids_and_mask(1, 3 * DENSE)[0])
    take_steps(model, cache)
    longer = kernel_model(recsa_top_capacity=1024)
    longer(random_ids(1, 20).to(DEVICE))
    gc.collect()
    filling = [torch.full(shape, float("nan"), device=DEVICE) for shape in ((256, 32), (4, 16)) for _ in range(64)]
    take_steps(model, cache)
    del filling


def test_inference_mode_may_end_between_steps():
    """A cache filled and stepped under inference_mode goes on under no_grad, and the other way round."""
    model = kernel_model()
    with torch.inference_mode():
        cache = filled(model, ids_and_mask(1, 3 * DENSE)[0])
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            take_steps(model, cache)


def test_a_failed_capture_is_not_replayed(no_gradients, monkeypatch):
    """Out of memory or interrupted while a graph is captured: the next token is right."""
    model = kernel_model()
    cache = filled(model, ids_and_mask(1, 3 * DENSE)[0])
    step = take_steps(model, cache, 1)

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(step, "attend", fail)
    with pytest.raises(MemoryError):
        model(random_ids(1, 1).to(DEVICE), cache=cache)
    monkeypatch.undo()
    take_steps(model, cache)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one(no_gradients):
    """Triton launches on the current device, whatever device the tensors are on."""
    model, ids = kernel_model().to("cuda:1"), random_ids(1, 4 * DENSE + 3).to("cuda:1")
    cache, logits = RecSACache(model.config), []
    for begin, end in ((0, 4 * DENSE), *((n, n + 1) for n in range(4 * DENSE, 4 * DENSE + 3))):
        logits.append(model(ids[:, begin:end], cache=cache).logits)
    model.config.recsa_backend = "reference"
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=LOGITS_ATOL, rtol=0)


def test_copied_and_interleaved_caches(no_gradients):
    """CA-04: a copy has storage and a step of its own; two caches of one model take turns."""
    model = kernel_model()
    first, second = (filled(model, ids_and_mask(rows, 3 * DENSE + rows)[0]) for rows in (1, 2))
    take_steps(model, first)
    copied = copy.deepcopy(first)
    assert copied.step is None
    for _ in range(4):
        steps = [take_steps(model, cache, 1) for cache in (first, copied, second)]
    assert len({id(step) for step in steps}) == 3
    assert not CAPTURES or all(step.graph is not None for step in steps)


def test_memory_is_given_back():
    """LP-05: three prompts and replies, each with its cache and graph, leave nothing behind."""
    model = kernel_model()
    ids, mask = ids_and_mask(1, 20_000 if DEVICE == "cuda" else 70)

    def left() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    before = None
    for _ in range(4):  # the first one leaves what is kept for good: rotary tables, workspaces
        output = generated(model, True, ids, mask, max_new_tokens=5)
        cache = weakref.ref(getattr(output, CACHE_FIELD))
        assert not CAPTURES or cache().step.graph is not None
        del output
        now = left()
        assert cache() is None
        before = now if before is None else before
        assert abs(now - before) < 2 << 20


# ---- hardware limits ------------------------------------------------------------------------------------------------


def test_every_launch_fits_consumer_gpus(monkeypatch):
    """TK-01: 99 KB of shared memory at the product's shapes, where the device's own limit is that."""
    jit = pytest.importorskip("triton.runtime.jit")
    launch, launched = jit.JITFunction.run, {}

    def recording(self, *args, **kwargs):
        kernel = launch(self, *args, **kwargs)
        launched[self.fn.__name__] = max(launched.get(self.fn.__name__, 0), kernel.metadata.shared)
        return kernel

    monkeypatch.setattr(jit.JITFunction, "run", recording)
    monkeypatch.setattr(kernels_prefill, "shared_memory", lambda device: 99 * 1024, raising=False)
    tree = random_operands(DEFAULT, (0,), (FAR + 64,), torch.bfloat16)
    for count in (64, 1):
        block = tree.at(FAR + 64 - count, count)
        block.run(selection=block.run().selection)
    assert {"children_kernel", "level_kernel", "select_kernel", "top_output_kernel"} <= set(launched)
    assert max(launched.values()) <= 99 * 1024, launched
