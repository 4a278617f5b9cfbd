"""Compiles every kernel that one prefill block and one decoding step launch, for a GPU that need not be here.

    python tests/compile_kernels.py CAPABILITY DTYPE R,K,M,HEADS,KV_HEADS,HEAD_DIM [TOKENS ...]

prints one JSON object: kernel name -> shared memory of each variant in bytes. Launches are intercepted and compiled
with the arguments that the host code passes; nothing runs. With numbers of TOKENS nothing is compiled either: the
object is kernel name -> variants that prompts of these lengths ask for.
"""

import json
import sys

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

CAPABILITY = int(sys.argv[1])


class AbsentGPU:
    """What Triton asks of a driver in order to compile."""

    def get_current_target(self):
        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


shared: dict[str, list[int]] = {}
variants: dict[str, set[str]] = {}


def compile_launch(kernel, grid):
    def launch(*args, **kwargs):
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
        if compiled is None:
            return
        sizes = shared.setdefault(kernel.fn.__name__, [])
        if compiled.metadata.shared not in sizes:
            sizes.append(compiled.metadata.shared)

    return launch


driver.set_active(AbsentGPU())
JITFunction.__getitem__ = compile_launch

from recsa_qwen3 import Levels, RecSAPooler, TreeGeometry  # noqa: E402
from recsa_qwen3.kernels_backward_recsa_qwen3 import GradientBlock, Gradients  # noqa: E402
from recsa_qwen3.kernels_build_recsa_qwen3 import append_tokens, build_nodes_by_kernel  # noqa: E402
from recsa_qwen3.kernels_decode_recsa_qwen3 import decode_block  # noqa: E402
from recsa_qwen3.kernels_linear_recsa_qwen3 import add_product, gated, project  # noqa: E402
from recsa_qwen3.kernels_norm_recsa_qwen3 import rms_norm  # noqa: E402


def note_variant(key, fn, **_) -> bool:
    """Stands in for compiling."""
    variants.setdefault(fn.name, set()).add(str(key))
    return True


def main() -> None:
    dtype = getattr(torch, sys.argv[2])
    r, k, m, heads, kv_heads, head_dim = (int(number) for number in sys.argv[3].split(","))
    geometry = TreeGeometry(branching=r, top_k=k, recent=1, top_capacity=m)
    shape = (geometry, heads, kv_heads, head_dim, dtype)
    if len(sys.argv) == 4:
        launch_all(2 * m * r, 64, *shape)  # depth 2
        print(json.dumps(shared))
        return
    knobs.runtime.jit_cache_hook = note_variant
    for tokens in map(int, sys.argv[4:]):
        launch_all(tokens, tokens % 97 + 17, *shape)
    print(json.dumps({name: len(keys) for name, keys in variants.items()}))


def launch_all(
    tokens: int, width: int, geometry: TreeGeometry, heads: int, kv_heads: int, head_dim: int, dtype
) -> None:
    """The last `width` of so many tokens by the kernels of prefill and of gradients, one more by those of decoding."""
    r, k, m = geometry.branching, geometry.top_k, geometry.top_capacity
    depth = geometry.depth(tokens - 1)
    stored = [-(-(tokens + 64) // r**level // r) * r for level in range(depth + 1)]
    keys, values = (tuple(torch.empty(1, kv_heads, nodes, head_dim, dtype=dtype) for nodes in stored) for _ in "kv")
    levels = Levels(keys, values)
    query, rope = torch.empty(1, heads, width, head_dim, dtype=dtype), (torch.ones(m, head_dim),) * 2
    rows, starts = torch.zeros(1, dtype=torch.int32), torch.full((1,), tokens - width, dtype=torch.int32)
    if depth:
        block = GradientBlock(query, levels, rows, starts, 0, width, tokens - 1, geometry, rope, 1.0)
        chosen: dict = {}
        output, lse = block.run(depth, None, chosen.__setitem__)
        wide = [[torch.zeros(states.shape) for states in tensors] for tensors in (keys, values)]
        into = Gradients(query.unflatten(1, (kv_heads, -1)), *wide)
        block.gradients(depth, chosen, output, output, lse, into)
    candidates = [k * r] * depth + [tokens // r**depth + 1]
    decode_block(query, levels, rows, starts, 0, 1, candidates, geometry, rope, 1.0)
    pooler = RecSAPooler(kv_heads, r, head_dim).to(dtype)
    token = levels.keys[0][:, :, :1]
    append_tokens(token, token, levels.keys, levels.values, levels.keys, starts, pooler)
    build_nodes_by_kernel(pooler, keys[0], values[0], r)
    hidden = torch.empty(1, 1, heads * head_dim, dtype=dtype)
    weight, narrow = (torch.empty(count * head_dim, heads * head_dim, dtype=dtype) for count in (heads, kv_heads))
    project(hidden, weight, narrow, narrow)
    add_product(gated(hidden, weight, weight), weight, hidden)
    rms_norm(query, torch.empty(head_dim, dtype=dtype), 1e-6)


if __name__ == "__main__":
    main()
