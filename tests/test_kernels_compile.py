"""The kernels compile for GPUs that are not here, and fit the 99 KB of shared memory that consumer GPUs have."""

import json
import os
import random
import subprocess
import sys

import pytest

from conftest import ROOT

pytest.importorskip("recsa_qwen3.kernels_walk_recsa_qwen3")


def compile_kernels(*arguments) -> dict:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, ROOT / "tests" / "compile_kernels.py", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("capability", "dtype", "shape"),
    [
        (90, "bfloat16", "16,128,8192,32,8,128"),  # Qwen3-4B, the defaults
        (89, "bfloat16", "16,128,8192,32,8,128"),
        (89, "float32", "64,32,2048,6,2,96"),
    ],
)
def test_every_kernel_compiles_and_fits(capability, dtype, shape):
    shared = compile_kernels(capability, dtype, shape)
    asked = {"children_kernel", "children_gradient_kernel", "level_kernel", "select_kernel", "build_kernel"}
    assert asked <= set(shared)
    assert max(max(sizes) for sizes in shared.values()) <= 99 * 1024, shared


def test_nothing_is_compiled_anew_as_prompts_grow():
    """TK-04: variants stay few over prompts of any length, up to depth 2."""
    shape = "16,32,1024,4,2,64"
    lengths = [random.randrange(1025, 16**2 * 1024) for _ in range(30)]
    variants = compile_kernels(90, "bfloat16", shape, *lengths)
    assert max(variants.values()) <= 4 and sum(variants.values()) <= 1.5 * len(variants), variants
