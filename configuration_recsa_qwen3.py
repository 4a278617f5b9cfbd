"""Configuration of RecSA-Qwen3: every field of Qwen3 with its meaning unchanged, plus the `recsa_*` fields.

This file is the only place where defaults and limits of the `recsa_*` fields are written. It never touches tensors.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from packaging.version import Version
from transformers import Qwen3Config

OLDEST, BEYOND_NEWEST = Version("5.17"), Version("5.25.dev0")
if not OLDEST <= Version(transformers.__version__) < BEYOND_NEWEST and not os.environ.get(
    "RECSA_UNTESTED_TRANSFORMERS"
):
    # a renamed argument once made newer versions generate wrong tokens without an exception
    raise ImportError(
        f"RecSA-Qwen3 works with transformers >= {OLDEST} and < 5.25, found {transformers.__version__}; "
        "install one of those, or set RECSA_UNTESTED_TRANSFORMERS=1 to try this one at your own risk."
    )

AUTO_MAP = {
    "AutoConfig": "configuration_recsa_qwen3.RecSAQwen3Config",
    "AutoModel": "modeling_recsa_qwen3.RecSAQwen3Model",
    "AutoModelForCausalLM": "modeling_recsa_qwen3.RecSAQwen3ForCausalLM",
    "AutoModelForSequenceClassification": "modeling_recsa_qwen3.RecSAQwen3ForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_recsa_qwen3.RecSAQwen3ForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_recsa_qwen3.RecSAQwen3ForQuestionAnswering",
}
BACKENDS = ("auto", "triton", "reference")
CACHE_DTYPES = ("auto", "fp8_e4m3")
# How the queries are chosen at which poolers are distilled; the scored ones by the attention of each layer.
SCORED_QUERIES = ("far_mass", "peak")
DISTILL_QUERIES = ("uniform", "answers", *SCORED_QUERIES)
# Tokens of the sequences that a dense backbone was trained on, where `recsa_trained_length` does not say. [paper]
TRAINED_TOKENS = 32768
# RoPE types whose frequencies do not depend on the length of the prompt; the others ("dynamic", "longrope") would let
# a later token change what an earlier query selected.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")
# Tokens of a prompt that a converted checkpoint claims to support, for `max_position_embeddings` and the tokenizer's
# `model_max_length`. No RoPE position exceeds M, so the length has no limit of its own; this one is what we stand for.
# [our decision]
SUPPORTED_TOKENS = 2**21


def check_budget(budget: float | None) -> None:
    """Refuses a GPU budget that is none."""
    is_number = isinstance(budget, (int, float)) and not isinstance(budget, bool)
    if budget is not None and not (is_number and budget >= 0):
        raise ValueError(f"recsa_gpu_budget={budget!r}: must be GiB >= 0, or None for no limit.")


def check_cache_dtype(name: str) -> str:
    """Refuses a cache dtype that does not exist."""
    if name not in CACHE_DTYPES:
        raise ValueError(f"recsa_cache_dtype={name!r}: must be one of {', '.join(CACHE_DTYPES)}.")
    return name


class RecSAQwen3Config(Qwen3Config):
    """Qwen3's configuration with the fields of Recursive Sparse Attention (arXiv 2611.07232).

    Args:
        recsa_branching (`int`, defaults to 16): r, children per node; a power of two >= 2. [default: our decision]
        recsa_top_k (`int` or `None`, defaults to 128): k, most nodes selected per level, the path node included;
            `None` selects everything: dense attention at every length. [default: our decision]
        recsa_recent (`int`, defaults to 1): s, candidates just before the path node that are always selected;
            0 <= s <= k - 2. [our decision]
        recsa_top_capacity (`int` or `None`, defaults to 8192): M, most candidates at the top level, M >= k * r; up to
            M tokens attention is exactly dense. `None` means k * r. [our decision]
        recsa_count_bias (`bool`, defaults to `False`): adds l * ln(r) to the logits of level l. [our decision: off]
        recsa_backend (`str`, defaults to `"auto"`): `"auto"`, `"triton"` or `"reference"`; which implementation runs.
            "auto" takes the Triton kernels on a CUDA GPU where they can do what is asked.
        recsa_prefill_chunk (`int`, defaults to 4096): tokens per chunk when a long prompt fills a cache without
            gradients; bounds activations and never changes results beyond rounding. [our decision]
        recsa_cuda_graph (`bool`, defaults to `True`): with the Triton kernels on a GPU, a decoding step of one token a
            row is captured once and replayed. [our decision]
        recsa_cache_dtype (`str`, defaults to `"auto"`): how a cache stores keys and values of tokens: `"auto"`, in the
            model's dtype, or `"fp8_e4m3"`. [our decision]
        recsa_gpu_budget (`float` or `None`, defaults to `None`): GiB of a GPU that weights, cache and temporaries may
            take together; tokens beyond it lie in host memory. `None` = no limit. [our decision]
        recsa_distill_weight (`float`, defaults to 0.0): in training, `RecSAQwen3ForCausalLM` adds this much of the
            distillation loss, which poolers then learn from alone; 0 = none is computed. [our decision]
        recsa_distill_queries (`str`, defaults to `"answers+uniform"`): the queries that it is taken at: `"uniform"`,
            `"answers"`, `"far_mass"`, `"peak"`, or several joined with "+", which weigh the same. [our decision]
        recsa_distill_samples (`int`, defaults to 256): queries a row that it is taken at. [our decision]
        recsa_trained_length (`int` or `None`, defaults to `None`): tokens of the sequences that the dense backbone was
            trained on, 32,768 where `None`; in longer ones the teacher's RoPE is YaRN. [our decision]
        **kwargs: every field of `Qwen3Config`.

    Raises:
        ValueError: for a field with an impossible value, a sliding window, or a RoPE type whose frequencies depend on
            the prompt's length; the message names the field and the fix.
    """

    model_type = "recsa_qwen3"
    # each process holds some KV heads with their queries and trees; a selection never looks beyond its own KV head
    base_model_tp_plan = {**Qwen3Config.base_model_tp_plan, "layers.*.self_attn.pooler": "recsa_pooler"}
    base_model_pp_plan = None  # a pipeline stage would not know which tokens the cache holds

    def __init__(
        self,
        recsa_branching: int = 16,
        recsa_top_k: int | None = 128,
        recsa_recent: int = 1,
        recsa_top_capacity: int | None = 8192,
        recsa_count_bias: bool = False,
        recsa_backend: str = "auto",
        recsa_prefill_chunk: int = 4096,
        recsa_cuda_graph: bool = True,
        recsa_cache_dtype: str = "auto",
        recsa_gpu_budget: float | None = None,
        recsa_distill_weight: float = 0.0,
        recsa_distill_queries: str = "answers+uniform",
        recsa_distill_samples: int = 256,
        recsa_trained_length: int | None = None,
        **kwargs,
    ):
        self.recsa_branching = recsa_branching
        self.recsa_top_k = recsa_top_k
        self.recsa_recent = recsa_recent
        self.recsa_top_capacity = recsa_top_capacity
        self.recsa_count_bias = recsa_count_bias
        self.recsa_backend = recsa_backend
        self.recsa_prefill_chunk = recsa_prefill_chunk
        self.recsa_cuda_graph = recsa_cuda_graph
        self.recsa_cache_dtype = recsa_cache_dtype
        self.recsa_gpu_budget = recsa_gpu_budget
        self.recsa_distill_weight = recsa_distill_weight
        self.recsa_distill_queries = recsa_distill_queries
        self.recsa_distill_samples = recsa_distill_samples
        self.recsa_trained_length = recsa_trained_length
        self._check_window(kwargs)
        super().__init__(**kwargs)
        # saving one head writes only its own entry, and a Hub load adds the origin's name to each: neither may survive
        self.auto_map = {**(getattr(self, "auto_map", None) or {}), **AUTO_MAP}
        self.check_recsa()

    def save_pretrained(self, *args, **kwargs):
        """As inherited, but refuses an edited configuration that could not be loaded again."""
        self.check_recsa()
        return super().save_pretrained(*args, **kwargs)

    @staticmethod
    def _check_window(fields: Mapping[str, Any]) -> None:
        """Refuses Qwen3's sliding window: a window and a selection would both decide what a query reads."""
        layer_types = fields.get("layer_types") or ()
        if fields.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
            raise ValueError(
                "use_sliding_window / layer_types: RecSA selects what a query reads and supports full attention only; "
                "set use_sliding_window=False and leave layer_types out."
            )

    def check_recsa(self) -> None:
        """Refuses impossible values by name.

        Called at construction and again before each forward, since a loaded configuration may be edited.

        Raises:
            ValueError: names the field, the value and the fix.
        """

        def require(condition: bool, field: str, fix: str) -> None:
            if not condition:
                raise ValueError(f"{field}={getattr(self, field)!r}: {fix}")

        def is_int(value) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        self._check_window(vars(self))
        r, k, s, m = self.recsa_branching, self.recsa_top_k, self.recsa_recent, self.recsa_top_capacity
        require(is_int(r) and r >= 2 and r & (r - 1) == 0, "recsa_branching", "must be a power of two >= 2.")
        require(
            k is None or (is_int(k) and k >= 2), "recsa_top_k", "must be an int >= 2, or None for dense attention."
        )
        require(is_int(s) and s >= 0, "recsa_recent", "must be an int >= 0.")
        require(k is None or s <= k - 2, "recsa_recent", f"must be at most recsa_top_k - 2 = {(k or 2) - 2}.")
        require(m is None or (is_int(m) and m >= 1), "recsa_top_capacity", "must be an int >= 1, or None for k * r.")
        require(
            m is None or k is None or m >= k * r,
            "recsa_top_capacity",
            f"must be at least recsa_top_k * recsa_branching = {(k or 1) * r}, or None for that value.",
        )
        require(isinstance(self.recsa_count_bias, bool), "recsa_count_bias", "must be True or False.")
        require(self.recsa_backend in BACKENDS, "recsa_backend", f"must be one of {', '.join(BACKENDS)}.")
        require(isinstance(self.recsa_cuda_graph, bool), "recsa_cuda_graph", "must be True or False.")
        check_cache_dtype(self.recsa_cache_dtype)
        check_budget(self.recsa_gpu_budget)
        chunk = self.recsa_prefill_chunk
        require(is_int(chunk) and chunk >= 1, "recsa_prefill_chunk", "must be an int >= 1.")
        self._check_distillation(require, is_int)
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"must divide num_attention_heads = {self.num_attention_heads}.",
        )
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        require(
            rope_type in ROPE_TYPES,
            "rope_parameters",
            f"rope_type {rope_type!r} is not supported; use one of {', '.join(ROPE_TYPES)} "
            "(RecSA never uses a position above recsa_top_capacity, so no long-context RoPE is needed).",
        )

    def _check_distillation(self, require: Callable[[bool, str, str], None], is_int: Callable[[Any], bool]) -> None:
        weight, queries = self.recsa_distill_weight, self.recsa_distill_queries
        is_number = is_int(weight) or isinstance(weight, float)
        require(is_number and 0 <= weight < float("inf"), "recsa_distill_weight", "must be a finite number >= 0.")
        names = queries.split("+") if isinstance(queries, str) else []
        require(
            bool(names) and set(names) <= set(DISTILL_QUERIES) and len(set(names)) == len(names),
            "recsa_distill_queries",
            f'must be some of {", ".join(DISTILL_QUERIES)}, each once, joined with "+".',
        )
        require(
            is_int(self.recsa_distill_samples) and self.recsa_distill_samples >= len(names),
            "recsa_distill_samples",
            f"must be an int >= {len(names)}, one query for each of recsa_distill_queries.",
        )
        trained = self.recsa_trained_length
        require(
            trained is None or (is_int(trained) and trained >= 1),
            "recsa_trained_length",
            f"must be an int >= 1, or None for {TRAINED_TOKENS}.",
        )


RecSAQwen3Config.register_for_auto_class()
