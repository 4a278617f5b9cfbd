"""What a cache and a prefill take: bytes foreseen from shapes, what a device has left, and where level 0 lies.

Above level 0 everything stays on the layer's device. Level 0 may lie in page-locked host memory that the device
addresses: the same operations and kernels read it there, entry by entry, so results do not depend on the place.
Nothing here reads a key.
"""

import weakref
from dataclasses import dataclass

import torch

from .configuration_recsa_qwen3 import check_budget, check_cache_dtype
from .tree_recsa_qwen3 import TreeGeometry

GIB = 1 << 30
# Share of a GPU's memory that the temporaries of one block of queries may take; chunks of 4,096 tokens need less on a
# GPU of 40 GiB or more, and longer ones gain where a level has so many parents that few queries chose each.
BLOCK_SHARE = 1 / 6
# Share of a budget that is left to the allocator's gaps.
GAPS = 1 / 16


# ---- foreseen -------------------------------------------------------------------------------------------------------


def level_capacities(tokens: int, geometry: TreeGeometry) -> list[int]:
    """Entries allocated per level, level 0 first, for `tokens` tokens a row: whole groups of siblings."""
    counts = geometry.node_counts(tokens + -tokens % geometry.branching)
    return [count + -count % geometry.branching for count in counts]


def bytes_of_block_query(geometry: TreeGeometry, kv_heads: int, group: int, head_dim: int, itemsize: int) -> int:
    """What the kernels keep per query of a block: partial outputs with their logits, or the top's importance."""
    part = head_dim * itemsize + 4 + 4 * geometry.branching
    return kv_heads * max((geometry.top_k or 0) * group * part, 4 * geometry.top_capacity)


@dataclass(frozen=True)
class RecSAMemory:
    """Bytes that a prompt will take beside the weights.

    Attributes:
        tokens: per row.
        batch: rows.
        token_bytes: level 0 on the GPUs (or the CPU, where the model runs there).
        node_bytes: the levels above.
        host_bytes: level 0 in the host's page-locked memory.
        host_layers: the last so many layers keep level 0 there.
        working_bytes: temporaries of a prefill chunk on the Triton kernels, the most at one time; an estimate.
    """

    tokens: int
    batch: int
    token_bytes: int
    node_bytes: int
    host_bytes: int
    host_layers: int
    working_bytes: int

    @property
    def device_bytes(self) -> int:
        """Cache and temporaries on the model's devices, weights left out."""
        return self.token_bytes + self.node_bytes + self.working_bytes

    def __str__(self) -> str:
        host = f", {self.host_bytes / GIB:.2f} GiB of them in host memory" if self.host_bytes else ""
        return (
            f"{self.batch} x {self.tokens:,} tokens: {(self.token_bytes + self.host_bytes) / GIB:.2f} GiB of keys and "
            f"values{host}, {self.node_bytes / GIB:.2f} GiB of nodes above them, about "
            f"{self.working_bytes / GIB:.2f} GiB while a chunk is read"
        )


def estimate(
    config,
    tokens: int,
    batch: int = 1,
    dtype: torch.dtype | None = None,
    cache_dtype: str | None = None,
    gpu_budget: float | None = None,
    weight_bytes: int = 0,
    device_memory: int | None = None,
) -> RecSAMemory:
    """What a prompt will take, from shapes alone; nothing is allocated. [our decision]

    Args:
        config: a `RecSAQwen3Config`.
        tokens: per row, answer included.
        batch: rows.
        dtype: of the model; the configuration's where `None`.
        cache_dtype: "auto" (the model's dtype) or "fp8_e4m3"; the configuration's where `None`.
        gpu_budget: GiB, as for `RecSACache`; the configuration's where `None`.
        weight_bytes: what the model takes on the GPU (`model.get_memory_footprint()`), counted against the budget.
        device_memory: bytes of the GPU, which bound the temporaries; 80 GiB where `None`, 0 where no kernels run.

    Raises:
        ValueError: a cache dtype that does not exist, a length below 1, or a negative budget.
        TypeError: another kind of configuration, or a dtype that is none.
    """
    if type(tokens) is not int or type(batch) is not int or tokens < 1 or batch < 1:
        raise ValueError(f"tokens={tokens!r}, batch={batch!r}: both must be ints of at least 1.")
    if not hasattr(config, "recsa_branching"):
        raise TypeError(f"config: got {type(config).__name__}, must be a RecSAQwen3Config.")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype={dtype!r}: must be a torch.dtype, such as torch.bfloat16.")
    check_budget(gpu_budget)
    geometry = TreeGeometry.from_config(config)
    dtype = dtype or config.dtype or torch.float32
    cache_dtype = check_cache_dtype(cache_dtype or config.recsa_cache_dtype)
    gpu_budget = config.recsa_gpu_budget if gpu_budget is None else gpu_budget
    heads, width, layers = config.num_key_value_heads, config.head_dim, config.num_hidden_layers
    capacities = level_capacities(tokens, geometry)
    entry = width if cache_dtype == "fp8_e4m3" else width * dtype.itemsize
    vectors = 2 * batch * heads * capacities[0] * entry
    exponents = 2 * batch * heads * capacities[0] if cache_dtype == "fp8_e4m3" else 0
    nodes = 3 * batch * heads * sum(capacities[1:]) * width * dtype.itemsize
    group = config.num_attention_heads // heads
    chunk = min(tokens, config.recsa_prefill_chunk)
    block = 0
    if tokens > geometry.top_capacity:
        block = batch * chunk * bytes_of_block_query(geometry, heads, group, width, dtype.itemsize)
        block = min(block, int((80 * GIB if device_memory is None else device_memory) * BLOCK_SHARE))
    states = 8 * config.hidden_size + 3 * config.intermediate_size + 4 * config.num_attention_heads * width
    working = block + batch * chunk * states * dtype.itemsize
    on_device = layers
    if gpu_budget is not None:
        rest = int(gpu_budget * GIB * (1 - GAPS)) - weight_bytes - working - layers * (nodes + exponents)
        on_device = max(min(rest // vectors, layers), 0)
    return RecSAMemory(
        tokens,
        batch,
        token_bytes=on_device * vectors + layers * exponents,
        node_bytes=layers * nodes,
        host_bytes=(layers - on_device) * vectors,
        host_layers=layers - on_device,
        working_bytes=working,
    )


# ---- what is left ---------------------------------------------------------------------------------------------------


def free_bytes(device: torch.device | None) -> int | None:
    """Bytes that can still be allocated on a device, on the host for `None`; `None` where that is not known."""
    if device is not None and device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
        return min(free + held - used, int(total * fraction) - used)
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


# ---- level 0 on the host --------------------------------------------------------------------------------------------


class _HostBlock:
    """Page-locked host memory under the address by which a device reads and writes it."""

    def __init__(self, size: int, device: torch.device):
        self.memory = torch.zeros(size, dtype=torch.uint8)
        address = self.memory.data_ptr()
        with torch.cuda.device(device):
            # not `pin_memory()`, which rounds up to a power of two
            status = torch.cuda.cudart().cudaHostRegister(address, size, 2)  # 2: mapped
        if int(status):
            raise MemoryError(
                f"recsa_gpu_budget: {size / GIB:.2f} GiB of host memory cannot be page-locked (CUDA error "
                f"{int(status)}); see `ulimit -l`, or take a larger budget, a shorter prompt, or "
                "recsa_cache_dtype='fp8_e4m3'."
            )
        weakref.finalize(self, _unregister, self.memory, device).atexit = False
        self.__cuda_array_interface__ = dict(
            shape=(size,), typestr="|u1", data=(address, False), version=3, strides=None, stream=None
        )


def _unregister(memory: torch.Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # nothing that reads it may still run
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros in page-locked host memory, as a tensor of the CUDA device that addresses it. [our decision]

    Raises:
        ValueError: the device is none.
        MemoryError: the memory cannot be page-locked.
    """
    if device.type != "cuda":
        raise ValueError(f"recsa_gpu_budget: is for CUDA devices, the model runs on {device.type!r}; leave it out.")
    size = torch.Size(shape).numel() * dtype.itemsize
    flat = torch.as_tensor(_HostBlock(size, device), device=device)
    return flat.view(dtype).view(shape)


class TokenPlace:
    """Decides for each layer whether its tokens lie on the device or on the host.

    Args:
        config: the model's.
        dtype: the cache's.
        gpu_budget: GiB of the GPU that weights, cache and temporaries may take together; `None` = no limit.

    Attributes:
        weight_bytes: weights, and what else lies on the GPU before the first key is stored; `None` until then.
    """

    def __init__(self, config, dtype: str, gpu_budget: float | None):
        self._config, self._dtype, self.gpu_budget = config, dtype, gpu_budget
        self.weight_bytes: int | None = None

    def on_host(self, layer_idx: int, like: torch.Tensor, tokens: int) -> bool:
        """Whether the layer's level 0 goes to the host, for `tokens` tokens a row of keys like these."""
        if self.gpu_budget is None:
            return False
        if like.device.type != "cuda":
            raise ValueError(
                f"recsa_gpu_budget: is for CUDA devices, the model runs on {like.device.type!r}; leave it out."
            )
        if self.weight_bytes is None:
            self.weight_bytes = torch.cuda.memory_allocated(like.device)
        memory = estimate(
            self._config, tokens, like.shape[0], like.dtype, self._dtype, self.gpu_budget, self.weight_bytes,
            torch.cuda.get_device_properties(like.device).total_memory,
        )  # fmt: skip
        return layer_idx >= self._config.num_hidden_layers - memory.host_layers
