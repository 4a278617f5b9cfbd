"""The sparse walk by Triton kernels: what they support, and which of them a block of queries takes."""

import functools

import torch

from .kernels_common_recsa_qwen3 import interpreted, launching_on
from .kernels_decode_recsa_qwen3 import decode_block
from .kernels_norm_recsa_qwen3 import rms_norm
from .kernels_prefill_recsa_qwen3 import PrefillBlock
from .memory_recsa_qwen3 import BLOCK_SHARE, bytes_of_block_query
from .tree_recsa_qwen3 import Levels, TreeGeometry

# Up to this many new queries a sequence, each query's candidates are split over programs; more are sorted by parent.
DECODE_QUERIES = 16
# Share of a GPU's memory that a block's temporaries may take in training, where much else is alive.
TRAINING_BLOCK_SHARE = 1 / 24


def unsupported(
    states: torch.Tensor, geometry: TreeGeometry | None = None, head_dim: int | None = None, packed: bool = False
) -> str | None:
    """Why the kernels cannot run on the device and dtype of `states`, with this tree; `None` where they can.

    `packed`: level 0 holds float8 codes.
    """
    if states.device.type != "cuda" and not interpreted():
        return f"needs a CUDA device, and the tensors are on {states.device.type!r}"
    if states.device.type == "cuda" and (lack := _lack_of_device(states.device)) is not None:
        return lack
    if states.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"supports float16, bfloat16 and float32, not {states.dtype}"
    if states.dtype == torch.bfloat16 and interpreted():
        return "cannot multiply bfloat16 under Triton's interpreter, float16 and float32 alone"
    if packed and states.device.type == "cuda" and torch.cuda.get_device_capability(states.device) < (8, 9):
        return "needs a GPU of compute capability 8.9 or newer for recsa_cache_dtype='fp8_e4m3'"
    if geometry is None or head_dim is None:
        return None
    if not 4 <= geometry.branching <= 64:
        return f"supports recsa_branching from 4 to 64, not {geometry.branching}"
    if geometry.top_capacity > 16_384:
        return f"supports a recsa_top_capacity up to 16,384, not {geometry.top_capacity}"
    if head_dim > 256 or head_dim % 2:
        return f"supports even head_dim up to 256, not {head_dim}"
    return None


@functools.cache
def _lack_of_device(device: torch.device) -> str | None:
    """Why kernels cannot be compiled for a CUDA device and launched on it; tried once, on a small one."""
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs a GPU of compute capability 8.0 or newer"
    try:
        states = torch.ones(1, 16, device=device)
        rms_norm(states, states[0], 1e-6)
    except Exception as error:  # no compiler, a driver that is too old
        return f"cannot be used here ({type(error).__name__}: {error})"
    return None


class TritonWalk:
    """The walk of one call of `recsa_attention`.

    Args:
        query: before RoPE, `[S, H, W, D]`.
        levels: keys before RoPE and values per level.
        starts: tokens before column 0 per sequence.
        geometry: r, k, s, M.
        rope: cos and sin `[>= M, D]`.
        scaling: on the logits.
        given: level -> chosen nodes `[S, H_kv, W, k]`, or `None` to choose.
        training: narrow blocks, all by the kernels of prefill, whose gradients there are.
    """

    def __init__(
        self,
        query,
        levels: Levels,
        starts,
        geometry: TreeGeometry,
        rope,
        scaling: float,
        given,
        training: bool = False,
    ):
        assert geometry.top_k is not None  # else every query is dense
        self.query, *flat = (
            tensor if tensor.stride(-1) == 1 else tensor.contiguous()
            for tensor in (query, *levels.keys, *levels.values)
        )
        levels = Levels(tuple(flat[: len(levels.keys)]), tuple(flat[len(levels.keys) :]), levels.exponents)
        self.levels, self.starts, self.geometry = levels, starts, geometry
        self.rope = tuple(table.float().contiguous() for table in rope)
        self.scaling, self.given, self.training = scaling, given, training

    def width(self, rows: int) -> int:
        """Columns that a block of this many sequences may have."""
        kv_heads, head_dim = self.levels.keys[0].shape[1], self.query.shape[3]
        k, r, group = self.geometry.top_k, self.geometry.branching, self.query.shape[1] // kv_heads
        a_query = rows * bytes_of_block_query(self.geometry, kv_heads, group, head_dim, self.query.element_size())
        if self.query.device.type == "cuda":
            share = TRAINING_BLOCK_SHARE if self.training else BLOCK_SHARE
            budget = int(torch.cuda.get_device_properties(self.query.device).total_memory * share)
        else:
            budget = 1 << 30
        # offsets within a head are 32 bits wide
        return max(min(budget // a_query, (2**31 - 1) // (k * group * max(head_dim, r))), 1)

    def run(self, rows: list[int], begin: int, end: int, depth: int, keep) -> torch.Tensor:
        """Output `[S', H_kv, w, G, D]` of the columns begin ... end - 1 of the sequences `rows`.

        Args:
            depth: the level where all these queries start.
            keep: called with (level, chosen nodes `[S', H_kv, w, k]`) for each level that chose.

        Raises:
            ValueError: a selection that does not fit the tree.
        """
        width = end - begin
        if width > DECODE_QUERIES or self.training:
            return self.run_block(rows, begin, end, depth, keep)[0]
        last = max(self.starts[row] for row in rows) + end - 1
        candidates = [self.geometry.max_candidates] * depth + [last // self.geometry.branching**depth + 1]
        given = self._given(rows, begin, end, depth, keep)
        with launching_on(self.query.device):
            return decode_block(
                self.query, self.levels, *self._places(rows), begin, width, candidates, self.geometry, self.rope,
                self.scaling, given, keep,
            )  # fmt: skip

    def run_block(self, rows: list[int], begin: int, end: int, depth: int, keep) -> tuple[torch.Tensor, torch.Tensor]:
        """As `run`, by the kernels of prefill whatever the width; also the log-sum-exp, in units of log2."""
        given = self._given(rows, begin, end, depth, keep)
        with launching_on(self.query.device):
            return self.block(rows, begin, end, depth, PrefillBlock).run(depth, given, keep)

    def block(self, rows: list[int], begin: int, end: int, depth: int, kind):
        """A `PrefillBlock`, or what extends it, of these columns."""
        last = max(self.starts[row] for row in rows) + end - 1
        return kind(
            self.query, self.levels, *self._places(rows), begin, end - begin, last, self.geometry, self.rope,
            self.scaling,
        )  # fmt: skip

    def _places(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The sequences and the tokens before their column 0, on the device."""
        starts = [self.starts[row] for row in rows]
        row_index, start = torch.tensor([rows, starts], dtype=torch.int32).to(self.query.device)
        return row_index, start

    def _given(self, rows: list[int], begin: int, end: int, depth: int, keep) -> dict[int, torch.Tensor] | None:
        given = self._checked(rows, begin, end, depth)
        for level, nodes in (given or {}).items():
            keep(level, nodes)
        return given

    def _checked(self, rows: list[int], begin: int, end: int, depth: int) -> dict[int, torch.Tensor] | None:
        """The given selection of a block as int32; kernels follow it without looking."""
        if self.given is None:
            return None
        device, r, k = self.query.device, self.geometry.branching, self.geometry.top_k
        assert k is not None
        starts = torch.tensor([self.starts[row] for row in rows], device=device)
        position = starts[:, None, None] + torch.arange(begin, end, device=device)  # [S', 1, w]
        checked: dict[int, torch.Tensor] = {}
        for level in range(depth, 0, -1):
            if level not in self.given:
                raise ValueError(
                    f"selection: has no level {level}, at which queries choose; it has {sorted(self.given)}."
                )
            nodes = self.given[level][rows, :, begin:end].to(device)
            fits = nodes.shape[-1] == k and bool(
                ((nodes[..., -1] == position // r**level) & (nodes[..., 0] >= 0)).all()
                & (nodes.diff(dim=-1) > 0).all()
            )
            if fits and level < depth:
                parents = checked[level + 1]
                wanted = (nodes // r).to(torch.int32)
                place = torch.searchsorted(parents, wanted.contiguous()).clamp(max=k - 1)
                fits = bool((parents.gather(-1, place) == wanted).all())
            if not fits:
                raise ValueError(
                    f"selection[{level}]: must hold top_k = {k} ascending nodes per sparse query, each "
                    "a candidate at its level, the query's own path node last."
                )
            checked[level] = nodes.to(torch.int32).contiguous()
        return checked
