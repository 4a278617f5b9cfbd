"""Shared fixtures. Uninitialised memory is NaN in every test; tolerances are written here and nowhere else."""

import os
import sys
from pathlib import Path

import pytest
import torch

# Without a GPU the kernels run under Triton's interpreter, which must be known before they are imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent
for folder in (ROOT / "scripts", ROOT / "tests"):
    sys.path.insert(0, str(folder))

from recsa_qwen3 import RecSAQwen3Config, RecSAQwen3ForCausalLM  # noqa: E402

# Largest difference of logits between two float32 paths that must agree, and relative RMS errors of an
# output given the same selection against float64 (METHOD section 4).
LOGITS_ATOL = 1e-4
RELATIVE_RMS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}

TINY = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    # large enough that attention is far from uniform, so that selection matters
    initializer_range=0.2,
    recsa_branching=4,
    recsa_top_k=4,
    recsa_recent=1,
    recsa_top_capacity=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
# The length up to which TINY is exactly dense.
DENSE = TINY["recsa_top_capacity"]
# Below M, at M + 1, and at 4M and more.
LENGTHS = (DENSE - 3, DENSE + 1, 4 * DENSE + 6)


def relative_rms(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS(actual - expected) / RMS(expected), in float64."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm())


def tiny_config(**changes) -> RecSAQwen3Config:
    """The TINY configuration with `changes`."""
    return RecSAQwen3Config(**{**TINY, **changes})


def randomise_poolers(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Random, untied pooler weights, so that no test passes because a pooler is the plain mean."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".pooler." in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = (noise * (0.2 if name.endswith("proj") else 0.5)).to(parameter.dtype)
    return model


def tiny_model(model_class=RecSAQwen3ForCausalLM, seed: int = 0, **changes):
    """A random TINY model in eval mode with random poolers, which never generates the pad id.

    `generate` takes a pad id among the ids for padding where no mask is given.
    """
    torch.manual_seed(seed)
    model = randomise_poolers(model_class(tiny_config(**changes)), seed).eval()
    if hasattr(model, "lm_head") and not model.config.tie_word_embeddings and model.config.pad_token_id is not None:
        model.lm_head.weight.data[model.config.pad_token_id] = 0
    return model


def random_ids(*shape: int, vocab_size: int = TINY["vocab_size"]) -> torch.Tensor:
    """Fresh random ids that avoid the special tokens 0 and 1."""
    return torch.randint(2, vocab_size, shape)


@pytest.fixture(autouse=True)
def fresh_random_inputs(request):
    """Fresh inputs in every run; the seed is printed where a test fails, RECSA_TEST_SEED repeats it."""
    seed = int(os.environ.get("RECSA_TEST_SEED", torch.seed() % 2**31))
    torch.manual_seed(seed)
    print(f"RECSA_TEST_SEED={seed}")


@pytest.fixture(autouse=True)
def poison_empty_tensors(monkeypatch):
    """Fills every `torch.empty` and `empty_like` with NaN, so that memory nobody wrote shows in the result."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if tensor.is_floating_point() and tensor.device.type != "meta":
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture(autouse=True)
def full_float32_products(monkeypatch):
    """TF32 would round the products that results are compared with."""
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture
def model():
    """A random TINY causal language model with random poolers."""
    return tiny_model()
