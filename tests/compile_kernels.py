"""Compiles every kernel that one prefill block and one decoding step launch, for a GPU that need not be here.

    python tests/compile_kernels.py CAPABILITY DTYPE R,K,M,HEADS,KV_HEADS,HEAD_DIM

prints one JSON object: kernel name -> shared memory of each variant in bytes. Launches are intercepted and compiled
with the arguments that the host code passes; nothing runs.
"""

import json
import sys

import torch
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


def compile_launch(kernel, grid):
    def launch(*args, **kwargs):
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
        sizes = shared.setdefault(kernel.fn.__name__, [])
        if compiled.metadata.shared not in sizes:
            sizes.append(compiled.metadata.shared)

    return launch


driver.set_active(AbsentGPU())
JITFunction.__getitem__ = compile_launch

from recsa_qwen3 import Levels, RecSAPooler, TreeGeometry  # noqa: E402
from recsa_qwen3.kernels_build_recsa_qwen3 import append_tokens, build_nodes_by_kernel  # noqa: E402
from recsa_qwen3.kernels_decode_recsa_qwen3 import decode_block  # noqa: E402
from recsa_qwen3.kernels_prefill_recsa_qwen3 import PrefillBlock  # noqa: E402


def main() -> None:
    dtype = getattr(torch, sys.argv[2])
    r, k, m, heads, kv_heads, head_dim = (int(number) for number in sys.argv[3].split(","))
    geometry = TreeGeometry(branching=r, top_k=k, recent=1, top_capacity=m)
    tokens, width = 2 * m * r, 64  # depth 2
    keys, values = (
        tuple(torch.empty(1, kv_heads, tokens // r**level, head_dim, dtype=dtype) for level in range(3)) for _ in "kv"
    )
    levels = Levels(keys, values)
    query, rope = torch.empty(1, heads, width, head_dim, dtype=dtype), (torch.ones(m, head_dim),) * 2
    rows, starts = torch.zeros(1, dtype=torch.int32), torch.full((1,), tokens - width, dtype=torch.int32)
    block = PrefillBlock(query, levels, rows, starts, 0, width, tokens - 1, geometry, rope, 1.0)
    block.run(2, None, lambda level, nodes: None)
    candidates = [k * r, k * r, 2 * m // r + 1]
    decode_block(query, levels, rows, starts, 0, 1, candidates, geometry, rope, 1.0)
    pooler = RecSAPooler(kv_heads, r, head_dim).to(dtype)
    token = levels.keys[0][:, :, :1]
    append_tokens(token, token, levels.keys, levels.values, levels.keys, starts, pooler)
    build_nodes_by_kernel(pooler, keys[1], values[1], r)
    print(json.dumps(shared))


if __name__ == "__main__":
    main()
