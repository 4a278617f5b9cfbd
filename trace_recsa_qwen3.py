"""`recsa_trace`: what each forward selected and which backend ran, for tests, pictures and users who ask.

Attention modules record into the active trace; this file never touches what they compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .attention_recsa_qwen3 import RecSAOutput
from .rows_recsa_qwen3 import Rows


@dataclass
class LayerTrace:
    """One layer's part of a forward.

    Attributes:
        selection: level (>= 1) -> chosen nodes `[B, H_kv, T, k]` int64, ascending, -1 = none (dense query or padding).
        backend: what ran.
    """

    selection: dict[int, torch.Tensor]
    backend: str


class RecSATrace:
    """What was read, forward by forward.

    Attributes:
        forwards: one dict per forward (per chunk of a chunked prefill): layer -> `LayerTrace`.
    """

    def __init__(self):
        self.forwards: list[dict[int, LayerTrace]] = []

    def begin(self) -> None:
        """Opens the record of the next forward."""
        self.forwards.append({})

    def record(self, layer_idx: int, rows: Rows, result: RecSAOutput) -> None:
        """Keeps one layer's selection by column; a recomputed layer overwrites its own entry."""
        if not self.forwards:
            self.begin()
        selection = {level: rows.scatter(nodes + 1) - 1 for level, nodes in (result.selection or {}).items()}
        self.forwards[-1][layer_idx] = LayerTrace(selection, result.backend)


@contextmanager
def recsa_trace(model: nn.Module) -> Iterator[RecSATrace]:
    """Collects what each forward inside the `with` block selects, per layer and level; costs nothing when unused.

    A block inside another one collects alone; the outer one goes on after it.

    Args:
        model: any RecSA-Qwen3 model, wrapped or not.

    Yields:
        A `RecSATrace`, filled by every forward.

    Raises:
        ValueError: the model has no RecSA attention.
    """
    # by name: remote code defines the class anew
    layers: list[Any] = [m for m in model.modules() if type(m).__name__ == "RecSAQwen3Attention"]
    if not layers:
        raise ValueError("recsa_trace: this model has no RecSA attention layer.")
    trace = RecSATrace()
    outer = [layer.trace for layer in layers]
    for layer in layers:
        layer.trace = trace
    try:
        yield trace
    finally:
        for layer, before in zip(layers, outer, strict=True):
            layer.trace = before
