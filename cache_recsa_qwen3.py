"""`RecSACache`: keys before RoPE, values and the tree levels above them, for all layers of a model.

What a layer does stands in `cache_layer_recsa_qwen3`; here is what concerns all of them: what fits, forks, files.
"""

import copy
import weakref
from collections.abc import Sequence
from functools import partial
from os import PathLike

import torch
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from .cache_files_recsa_qwen3 import load_cache, save_cache
from .cache_layer_recsa_qwen3 import RecSALayer
from .configuration_recsa_qwen3 import check_budget, check_cache_dtype
from .memory_recsa_qwen3 import GIB, RecSAMemory, TokenPlace, estimate, free_bytes
from .rows_recsa_qwen3 import RowHistory
from .tree_recsa_qwen3 import TreeGeometry

logger = logging.get_logger(__name__)


class RecSACache(DynamicCache):
    """The cache of a RecSA model: a growing `transformers` cache whose layers hold a tree.

    The cache does not record token ids. A later turn must extend the prefix that it was filled with; a mask that
    disagrees is refused, other ids under the same mask cannot be noticed.

    Args:
        config: the model's `RecSAQwen3Config`.
        reserve: tokens to allocate for at first use, where the final length is known; 0 = grow as needed.
        dtype: "auto" (the model's) or "fp8_e4m3": level 0 in float8 with a power of two a vector as scale; the
            levels above keep the model's dtype. The configuration's `recsa_cache_dtype` where `None`. [our decision]
        gpu_budget: GiB of the GPU that weights, cache and temporaries may take together; the last layers keep level 0
            in page-locked host memory as far as that needs. The configuration's `recsa_gpu_budget` where `None`;
            counts as if all layers lay on one GPU. [our decision]

    Raises:
        ValueError: a dtype that does not exist, a negative budget or reserve.
    """

    estimate = staticmethod(estimate)

    def __init__(self, config, reserve: int = 0, dtype: str | None = None, gpu_budget: float | None = None):
        super().__init__()
        if type(reserve) is not int or reserve < 0:
            raise ValueError(f"reserve={reserve!r}: must be an int >= 0, in tokens a row.")
        self.config = config
        self.geometry = TreeGeometry.from_config(config)
        self.cache_dtype = check_cache_dtype(config.recsa_cache_dtype if dtype is None else dtype)
        budget = config.recsa_gpu_budget if gpu_budget is None else gpu_budget
        check_budget(budget)
        self.place = TokenPlace(config, self.cache_dtype, budget)
        self.layer_class_to_replicate = None
        self.layers = [
            RecSALayer(self.geometry, reserve, self.cache_dtype != "auto", partial(self.place.on_host, index))
            for index in range(config.num_hidden_layers)
        ]
        self.step = None  # the decoding step that a model keeps for this cache
        self.expected = 0  # tokens a row that `generate` may come to
        # whose states these are, kept by `cache_files_recsa_qwen3.note_model`
        self.model: weakref.ref | None = None  # the decoder that fills it
        self.fields: dict | None = None  # what its configuration said when the first token came
        self.versions: int | None = None  # of its weights then
        self.mixed = False  # several decoders filled it
        self.fingerprint: str | None = None  # where loaded: of the decoder that filled it

    def __getstate__(self):
        # copies have storage of their own
        return {**self.__dict__, "step": None, "model": None}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Refused by the layer: see `RecSALayer.update`."""
        return self.layers[layer_idx].update(key_states, value_states)

    def prefetch(self, layer_idx: int, *args, **kwargs) -> None:
        """Refused by the layer: see `RecSALayer.offload`."""
        self.layers[layer_idx].prefetch()

    def reset(self) -> None:
        """Forgets all tokens and frees the storage, which a step would hold."""
        self.step = self.fingerprint = self.fields = self.versions = None
        self.mixed = False
        super().reset()

    def fork(self) -> "RecSACache":
        """A second cache that goes on from the same prefix without a copy of it. [our decision]

        Both may go on, be cropped, rearranged or forked again. The one that has to write where another still reads
        gets storage of its own first, per level: questions asked one after another, each fork dropped before the
        next one goes on, copy nothing as long as the storage has room (`reserve`); those that live side by side do.
        """
        twin = copy.copy(self)
        twin.model = self.model
        twin.layers = [layer.fork() for layer in self.layers]
        return twin

    def save(self, path: str | PathLike, model=None, overwrite: bool = False, shard_bytes: int = 4 * GIB) -> None:
        """Writes what is held to a directory that `load` reads again; see `cache_files_recsa_qwen3`.

        Args:
            path: a new or empty directory, or one that holds a cache, with `overwrite`.
            model: the model that filled the cache; needed only where that model no longer exists, or for a copy.
            overwrite: replaces the cache that the directory holds; other files in it stay.
            shard_bytes: most bytes of a file; a tensor that is larger gets a file of its own.

        Raises:
            FileExistsError: the directory holds something else, or a cache without `overwrite`.
            ValueError: nothing is held, layers differ, or no model is at hand.
        """
        save_cache(self, path, model, overwrite, shard_bytes)

    @classmethod
    def load(
        cls,
        path: str | PathLike,
        model=None,
        device: torch.device | str | None = None,
        reserve: int | None = None,
        gpu_budget: float | None = None,
    ) -> "RecSACache":
        """Reads what `save` wrote.

        Args:
            path: the directory.
            model: compared with the model that filled the cache at once; each layer goes to its device. Where `None`,
                the first forward compares.
            device: of all layers, without `model`; the CPU where `None`.
            reserve: tokens a row to allocate for, those stored included; a few thousand more than stored where `None`,
                so that forks can go on without a copy.
            gpu_budget: as for the class; the configuration's where `None` and a model is given.

        Raises:
            FileNotFoundError: no such directory, no cache in it, or a file of it is missing.
            ValueError: damaged files, an unknown format, or a model that differs; the message names what.
            MemoryError: the devices cannot hold it.
        """
        return load_cache(cls, path, model, device, reserve, gpu_budget)

    def writes_in_place(self) -> bool:
        """Whether every layer's storage may be written behind what it holds: no fork reads there."""
        return all(layer.writes_in_place() for layer in self.layers)

    def make_room(self, tokens: int) -> None:
        """Grows every layer to hold `tokens` tokens a row, where it does not yet."""
        for layer in self.layers:
            layer.make_room(tokens)

    def reserve(self, tokens: int) -> None:
        """Grows to `tokens` per row at once when it next has to grow, instead of little by little."""
        for layer in self.layers:
            layer.reserve = max(layer.reserve, tokens)

    def roll_back(self, columns: int) -> None:
        """Forgets what any layer holds beyond so many columns: a forward that broke off leaves layers apart."""
        self.step = None
        for layer in self.layers:
            layer.history.crop(max(layer.history.columns - columns, 0))

    def check_room(self, tokens: int, batch: int, dtype: torch.dtype, devices: Sequence[torch.device]) -> None:
        """Refuses a length that will not fit, before anything is read.

        Args:
            tokens: a row, all that will be stored; what is reserved counts where that is more.
            batch: rows.
            dtype: of the model.
            devices: of each layer.

        Raises:
            MemoryError: with what is needed, what is free, and the remedies.
        """
        tokens = max(tokens, self.layers[0].reserve)
        in_place = self.writes_in_place()  # else a fork keeps what is held, and this cache gets storage of its own
        if self.is_initialized and self.layers[0].levels[0].capacity >= tokens and in_place:
            return
        need = self.foresee(tokens, batch, dtype, devices[0])
        self._warn_of_budget(need, devices[0])
        levels = [level for layer in self.layers for level in layer.levels]
        held = sum(level.nbytes for level in levels if not level.is_on_host(level.capacity)) if in_place else 0
        places: list[tuple[torch.device | None, int]] = [(None, need.host_bytes)] if need.host_bytes else []
        for device in dict.fromkeys(devices):
            share = devices.count(device) / len(devices)
            places.append((device, int((need.token_bytes + need.node_bytes - held) * share) + need.working_bytes))
        for place, wanted in places:
            free = free_bytes(place if place is not None and place.type == "cuda" else None)
            if (place is None or place.type in ("cpu", "cuda")) and free is not None and wanted > free:
                raise MemoryError(
                    f"{need}. {'The host' if place is None else place} has {free / GIB:.2f} GiB free, "
                    f"{wanted / GIB:.2f} GiB are needed there. {self._remedies(tokens, batch, dtype, devices[0])}"
                )

    def _warn_of_budget(self, need: RecSAMemory, device: torch.device) -> None:
        """Says so where even no token on the GPU would keep the budget; 0 asks for just that, and is no promise."""
        budget, weights = self.place.gpu_budget, self.place.weight_bytes
        if not budget or device.type != "cuda":
            return
        weights = torch.cuda.memory_allocated(device) if weights is None else weights
        total = (weights + need.device_bytes) / GIB
        if total > budget:
            logger.warning(
                f"recsa_gpu_budget={budget}: weights, nodes and temporaries alone take about {total:.1f} GiB with all "
                "tokens in host memory; shorter chunks (recsa_prefill_chunk) or a shorter prompt take less."
            )

    def foresee(self, tokens: int, batch: int, dtype: torch.dtype, device: torch.device, **options) -> RecSAMemory:
        """`estimate` with what this cache and a device say; `options` replace them."""
        cuda = device.type == "cuda"
        known = dict(
            cache_dtype=self.cache_dtype,
            gpu_budget=self.place.gpu_budget,
            weight_bytes=torch.cuda.memory_allocated(device) if cuda else 0,
            device_memory=torch.cuda.get_device_properties(device).total_memory if cuda else 0,
        )
        return estimate(self.config, tokens, batch, dtype, **{**known, **options})

    def _remedies(self, tokens, batch, dtype, device) -> str:
        found = []
        if self.cache_dtype == "auto":
            packed = self.foresee(tokens, batch, dtype, device, cache_dtype="fp8_e4m3")
            found.append(f"recsa_cache_dtype='fp8_e4m3' ({packed.device_bytes / GIB:.2f} GiB)")
        if device.type == "cuda":
            least = self.foresee(tokens, batch, dtype, device, gpu_budget=0.0)
            found.append(
                f"recsa_gpu_budget (from {least.device_bytes / GIB:.2f} GiB beside the weights, with "
                f"{least.host_bytes / GIB:.2f} GiB of host memory)"
            )
        found += ["a shorter prompt", *(["fewer rows"] if batch > 1 else [])]
        return f"Remedies: {', '.join(found)}."

    @property
    def history(self) -> RowHistory:
        """What has been seen, as the first layer recorded it."""
        return self.layers[0].history

    @property
    def lengths(self) -> list[int]:
        """Tokens stored per row, padding left out."""
        return list(self.history.lengths)

    def move_to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "RecSACache":
        """Moves all layers to one device and / or dtype; returns itself.

        Not called `to`: accelerate's hooks would move a cache spread over several devices onto one.
        """
        for layer in self.layers:
            layer.move_to(device, dtype)
        return self
