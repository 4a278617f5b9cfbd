"""One decoding step with fixed shapes and addresses: lengths live on the device, so that it can be one CUDA graph.

A step belongs to a cache as long as its storage stays in place. It appends one token to each row, attends through the
Triton kernels, and never synchronises with the host. The model decides when to take it. With a single row the linear
layers run on kernels too, on the weights of the modules, which are known to be plain.
"""

from itertools import chain, repeat
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from .cache_layer_recsa_qwen3 import operator_levels
from .cache_recsa_qwen3 import RecSACache
from .kernels_build_recsa_qwen3 import append_tokens
from .kernels_decode_recsa_qwen3 import decode_block
from .kernels_linear_recsa_qwen3 import add_product, gated, project
from .kernels_norm_recsa_qwen3 import rms_norm
from .tree_recsa_qwen3 import RecSAPooler, TreeGeometry


class PlainModules:
    """The modules of a model as a captured step relies on them: the same objects and parameters, nothing hooked in.

    Adapters, quantised layers, offloading and tensor parallelism replace or hook modules, and may do something else at
    each call; a moved model has its parameters elsewhere.
    """

    # What else of a module its forward depends on: an own forward, the scale of the logits, the norms' addition.
    _READ = ("forward", "scaling", "variance_epsilon")

    def __init__(self, model: nn.Module):
        self._modules = list(model.modules())
        self._types: list[Any] = list(map(type, self._modules))
        self._forwards = {kind: kind.forward for kind in set(self._types)}
        self._members: list[dict[str, Any]] = [
            held for m in self._modules for held in (m._modules, m._parameters) if held
        ]
        self._objects = self._listed()
        self._parameters = [member for member in self._objects if isinstance(member, torch.Tensor)]
        self._addresses, self._layouts = self._addresses_now(), self._layouts_now()
        self._hooks = [hooks for m in self._modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._hooks += [_global_forward_hooks, _global_forward_pre_hooks]
        self._attributes = [vars(m) for m in self._modules]
        self._read = self._read_now()

    def _listed(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._members)))

    def _addresses_now(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._parameters))

    def _layouts_now(self) -> list[list[Any]]:
        return [list(map(read, self._parameters)) for read in (torch.Tensor.size, torch.Tensor.stride)]

    def _read_now(self) -> list[list[Any]]:
        return [list(map(dict.get, self._attributes, repeat(name))) for name in self._READ]

    @staticmethod
    def are_all(model: nn.Module, forwards: dict[type, Any]) -> bool:
        """Whether the model consists of these types alone, with these forwards, plain parameters and no hooks."""
        return not (_global_forward_hooks or _global_forward_pre_hooks) and all(
            type(m) in forwards
            and type(m).forward is forwards[type(m)]
            and not (m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m))
            and all(type(p) in (nn.Parameter, torch.Tensor, type(None)) for p in m._parameters.values())
            for m in model.modules()
        )

    def in_place(self) -> bool:
        """Whether all parameters lie where they lay, so that a captured graph reads memory that is still theirs."""
        return self._addresses_now() == self._addresses

    def unchanged(self) -> bool:
        """Whether all is as it was. Asked at every token, so nothing here runs a line of Python per module."""
        listed = self._listed()
        return (
            len(listed) == len(self._objects)
            and all(map(is_, listed, self._objects))
            and self.in_place()
            and self._layouts_now() == self._layouts
            and not any(self._hooks)
            and self._read_now() == self._read
            and list(map(type, self._modules)) == self._types
            and all(kind.forward is forward for kind, forward in self._forwards.items())
        )


class DecodingStep:
    """What one step reads and writes.

    Args:
        model: the decoder whose modules the step runs.
        cache: filled; has room for one more token in each row (`RecSACache.make_room`).
        geometry: r, k, s, M.
        rope: cos and sin `[>= M, D]` float32; kept, since a graph reads them where they lie.

    Attributes:
        graph: the captured step, or `None`.
        runs_layers: whether `run_layer` takes the place of the layers' own forward.
    """

    def __init__(
        self, model: nn.Module, cache: RecSACache, geometry: TreeGeometry, rope: tuple[torch.Tensor, torch.Tensor]
    ):
        self.geometry, self.rope = geometry, rope
        self._model, self._modules = model, PlainModules(model)
        device = cache.layers[0].levels[0].tensors["keys"].device
        self.candidates = self._candidates_of(cache, geometry)
        self.levels = [list(layer.levels) for layer in cache.layers]
        self._versions = self._versions_of(cache)
        self.rows = torch.arange(len(cache.lengths), dtype=torch.int32, device=device)
        self.lengths = torch.empty_like(self.rows)
        self._known: list[int] = []  # what `lengths` holds
        self.graph: torch.cuda.CUDAGraph | None = None
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        one_dtype = len({parameter.dtype for parameter in model.parameters()}) == 1
        self.runs_layers = (
            len(cache.lengths) == 1
            and one_dtype
            and all(module.bias is None and module.weight.is_contiguous() for module in linears)
        )

    @staticmethod
    def _candidates_of(cache: RecSACache, geometry: TreeGeometry) -> list[int]:
        """The most candidates that any row's next token reads at each level, 0 first; changes where a depth does."""
        depths = [geometry.depth(length) for length in cache.lengths]
        most = []
        for level in range(max(depths) + 1):
            top = min(geometry.top_capacity, cache.layers[0].levels[0].capacity // geometry.branching**level + 1)
            gathered = geometry.max_candidates if max(depths) > level else 0
            most.append(max(gathered, top if level in depths else 0))
        return most

    def fits(
        self, model: nn.Module, cache: RecSACache, geometry: TreeGeometry, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> bool:
        """Whether model, tree, tables and storage are what this step knows, and no row reads more than it allows.

        What the modules of a captured step have become is asked of `still_right` after the replay, while the device
        computes.
        """
        return (
            model is self._model
            and geometry == self.geometry
            and rope[0] is self.rope[0]
            and cache.layers[0].levels[0].capacity > max(cache.lengths)
            # tensors of inference mode cannot be written outside of it
            and (torch.is_inference_mode_enabled() or not self.lengths.is_inference())
            and self._candidates_of(cache, geometry) == self.candidates
            and self._versions == self._versions_of(cache)
            and cache.writes_in_place()  # else a fork would see the token: room is made anew
            and (self._modules.in_place() if self.graph is not None else self._modules.unchanged())
        )

    def still_right(self) -> bool:
        """Whether the model's forward is what was captured; else the result of the replay must be thrown away.

        What it stored is then stored again: the host's lengths, which do not count it yet, decide.
        """
        return self._modules.unchanged()

    @staticmethod
    def _versions_of(cache: RecSACache) -> list[tuple[int, int]]:
        # the step holds the levels, so that no other gets an identity of theirs
        return [(id(level), level.version) for layer in cache.layers for level in layer.levels]

    def begin(self, lengths: list[int]) -> None:
        """Tells the device how many tokens each row holds, where it does not know."""
        if lengths != self._known:
            self.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
            self._known = list(lengths)

    def run_layer(self, layer: Any, states: torch.Tensor) -> torch.Tensor:
        """A decoder layer of plain modules over one token, `[1, 1, hidden]`; where `runs_layers`."""
        attention, mlp = layer.self_attn, layer.mlp
        norm = layer.input_layernorm
        projected = project(
            rms_norm(states, norm.weight, norm.variance_epsilon),
            attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight,
        )  # fmt: skip
        query, key, value = (part.view(1, -1, 1, attention.head_dim) for part in projected)
        query = rms_norm(query, attention.q_norm.weight, attention.q_norm.variance_epsilon)
        key = rms_norm(key, attention.k_norm.weight, attention.k_norm.variance_epsilon)
        attended = self.attend(attention.layer_idx, query, key, value, attention.pooler, attention.scaling)
        attention.last_backend = "triton"
        states = add_product(attended.view(1, 1, -1), attention.o_proj.weight, states)
        norm = layer.post_attention_layernorm
        inner = gated(rms_norm(states, norm.weight, norm.variance_epsilon), mlp.gate_proj.weight, mlp.up_proj.weight)
        return add_product(inner, mlp.down_proj.weight, states)

    def attend(
        self,
        layer_idx: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pooler: RecSAPooler,
        scaling: float,
    ) -> torch.Tensor:
        """Appends a token to each row of a layer and attends from it.

        Args:
            layer_idx: the layer.
            query: before RoPE, `[B, H, 1, D]`.
            key, value: `[B, H_kv, 1, D]`, the key before RoPE.
            pooler: the layer's pooler.
            scaling: on the logits.

        Returns:
            `[B, H, 1, D]` in the dtype of the query.
        """
        levels = operator_levels(self.levels[layer_idx])
        held = [level.tensors for level in self.levels[layer_idx]]
        pooled = tuple(tensors.get("pooled", tensors["keys"]) for tensors in held)
        append_tokens(key, value, levels.keys, levels.values, pooled, self.lengths, pooler, levels.exponents)
        output = decode_block(
            query,
            levels,
            self.rows,
            self.lengths,
            0,
            1,
            self.candidates,
            self.geometry,
            self.rope,
            scaling,
        )
        return output.flatten(1, 3)[:, :, None]

    def capture(self, run, *arguments: torch.Tensor) -> None:
        """Captures `run(*arguments)` and the advance of the lengths; `replay` copies new arguments in.

        The kernels must have run before, since compiling is not possible during a capture.
        """
        self._arguments = arguments
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._result = run(*arguments)
            self.lengths += 1
        self.graph = graph  # a capture that failed is not replayed

    def replay(self, *arguments: torch.Tensor) -> torch.Tensor:
        """The result for new arguments, a copy."""
        assert self.graph is not None
        for held, new in zip(self._arguments, arguments, strict=True):
            held.copy_(new)
        self.graph.replay()
        self._known = [length + 1 for length in self._known]
        return self._result.clone()
