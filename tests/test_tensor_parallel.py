"""Tensor parallelism: `tp_plan="auto"` under torchrun gives what one process gives, and saves whole weights.

The file is also the script that torchrun starts in each of its two processes.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from recsa_qwen3 import RecSAQwen3ForCausalLM, recsa_trace

if __name__ != "__main__":
    from conftest import DENSE, LOGITS_ATOL, random_ids, tiny_model

PROCESSES = 2
NEW_TOKENS = 8

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)


def everything(model, inputs: dict[int, torch.Tensor]) -> dict:
    """Logits, selections, greedy tokens and gradients of a model for inputs of several lengths."""
    results: dict = {"logits": {}, "selection": {}, "tokens": {}}
    for length, ids in inputs.items():
        with recsa_trace(model) as trace, torch.no_grad():
            results["logits"][length] = model(ids).logits
        results["selection"][length] = [layer.selection for layer in trace.forwards[0].values()]
        results["tokens"][length] = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS)
    longest = inputs[max(inputs)]
    model(longest, labels=longest).loss.backward()
    results["gradients"] = {name: full(p.grad) for name, p in model.named_parameters()}
    model(longest, labels=longest).loss.backward()  # accumulates
    results["accumulated"] = {name: full(p.grad) for name, p in model.named_parameters() if ".pooler." in name}
    return results


def full(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the whole of a tensor that may be split over the processes."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def run_in_one_process_of_many(folder: Path) -> None:
    """What torchrun starts: loads the model split over the processes and stores what it gives."""
    torch.set_num_threads(1)
    model = RecSAQwen3ForCausalLM.from_pretrained(folder / "model", tp_plan="auto", dtype=torch.float64)
    attention = model.model.layers[0].self_attn
    results = everything(model, torch.load(folder / "inputs.pt"))
    results["local heads"] = attention.k_proj.weight.to_local().shape[0] // attention.head_dim
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")
    model.save_pretrained(folder / "saved")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(model, results of one process, results of each of several, folder)."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    model = tiny_model().double()
    model.save_pretrained(folder / "model")
    inputs = {length: random_ids(2, length) for length in (DENSE - NEW_TOKENS, DENSE + 1, 5 * DENSE)}
    torch.save(inputs, folder / "inputs.pt")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={PROCESSES}"]
    command += ["--master_addr=127.0.0.1", f"--master_port={port}", __file__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(PROCESSES)]
    return model, everything(model, inputs), ranks, folder


def test_logits_and_greedy_tokens_equal_one_process(runs):
    """Below M, at M + 1 and at 5 M, where most nodes are left out."""
    _, expected, ranks, _ = runs
    assert expected["selection"][5 * DENSE][0], "nothing was left out"
    for rank in ranks:
        for length, logits in expected["logits"].items():
            assert (rank["logits"][length] - logits).abs().max() < LOGITS_ATOL
            assert torch.equal(rank["tokens"][length], expected["tokens"][length])


def test_each_process_selects_for_its_own_heads_only(runs):
    """A process holds part of the KV heads; its selections are those of the same heads in one process."""
    model, expected, ranks, _ = runs
    assert all(rank["local heads"] * PROCESSES == model.config.num_key_value_heads for rank in ranks)
    for number, rank in enumerate(ranks):
        heads = slice(number * rank["local heads"], (number + 1) * rank["local heads"])
        for length, layers in expected["selection"].items():
            for mine, whole in zip(rank["selection"][length], layers, strict=True):
                assert mine.keys() == whole.keys()
                assert all(torch.equal(mine[level], whole[level][:, heads]) for level in whole)


def test_gradients_equal_one_process(runs):
    """Every parameter's; the poolers', which every process keeps whole, also where they accumulate."""
    _, expected, ranks, _ = runs
    for rank in ranks:
        for kind in ("gradients", "accumulated"):
            for name, gradient in expected[kind].items():
                assert torch.allclose(rank[kind][name], gradient, rtol=1e-5, atol=1e-6), (kind, name)
    assert all(gradient.abs().max() > 1e-4 for gradient in expected["accumulated"].values())


def test_saved_weights_are_whole(runs):
    """save_pretrained under tensor parallelism writes what one process would have written."""
    model, _, _, folder = runs
    saved = RecSAQwen3ForCausalLM.from_pretrained(folder / "saved", dtype=torch.float64).state_dict()
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_plan_without_the_pooler_is_refused():
    """KV heads split by a plan that leaves the pooler whole would pool with another head's parameters."""
    pooler = tiny_model().model.layers[0].self_attn.pooler
    with pytest.raises(ValueError, match="tp_plan"):
        pooler(torch.zeros(1, 1, 1, 4, 32))


def test_uneven_split_of_the_heads_is_refused():
    """Three processes cannot share two KV heads."""

    class Mesh:
        def size(self):
            return 3

    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    pooler = tiny_model().model.layers[0].self_attn.pooler
    with pytest.raises(ValueError, match="num_key_value_heads=2"):
        ALL_PARALLEL_STYLES["recsa_pooler"].install_forward(pooler, Mesh())


if __name__ == "__main__":
    run_in_one_process_of_many(Path(sys.argv[1]))
