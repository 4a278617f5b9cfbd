"""A cache as files: one JSON index and safetensors shards in a directory, and the fingerprint of the model behind it.

`recsa_cache.json` says what the directory holds and is written last, so that a save that was cut short is never taken
for a whole one. Only entries in use are stored, as they are (float8 codes stay codes), and pass through memory one row
and head at a time. Nothing here builds a node or decides what is read. [our decision]
"""

import hashlib
import json
import os
import re
import uuid
import weakref
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from .configuration_recsa_qwen3 import RecSAQwen3Config
from .rows_recsa_qwen3 import RowHistory
from .tree_recsa_qwen3 import TreeGeometry

INDEX = "recsa_cache.json"
FORMAT = 1  # raised where an older version could not read what is written
# What decides the states that a cache holds. Selection counts: deeper layers store what attention made of it. Left
# out: the backend, chunks, CUDA graphs, the GPU budget and the attention implementation, which change rounding at
# most, and recsa_cache_dtype, since a cache says itself how it stores.
FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "rope_parameters",
    "recsa_branching",
    "recsa_top_k",
    "recsa_recent",
    "recsa_top_capacity",
    "recsa_count_bias",
)
SPARE = 4096  # tokens a row that a loaded cache has room for beyond those stored
SAMPLES = 64  # values of a parameter that the fingerprint reads
# What PEFT's layers compute beyond their parameters.
_ADAPTER_STATE = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
_SHARD = re.compile(r"cache-\d+-of-\d+\.safetensors")
_PART = ".part"
_MASK = "history.mask"
# safetensors' names
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.bool: "BOOL",
}


# ---- the model behind a cache ---------------------------------------------------------------------------------------


def decoder_of(model: nn.Module) -> nn.Module:
    """The `RecSAQwen3Model` in a model, whatever it is wrapped in.

    Raises:
        TypeError: there is none.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if type(module).__name__ == "RecSAQwen3Model":  # by name: remote code has a class of its own
            return module
    raise TypeError(f"model: got {type(model).__name__}, which holds no RecSAQwen3Model.")


@torch.no_grad()
def fingerprint(model: nn.Module) -> str:
    """Tells the model that filled a cache from others, without reading all its weights. [our decision]

    Covers the decoder (poolers and embedding included, heads not): name, shape, dtype and up to 64 values of each
    parameter and buffer, evenly spread from the first to the last and exact to the bit, and which adapters are active.
    So another checkpoint, a cast, quantisation, an adapter or a training step shows; an edit that spares all values
    read does not, nor does code that was patched.

    Args:
        model: a RecSA-Qwen3 model, on any devices.

    Returns:
        SHA-256 in hexadecimal; the same on every device.

    Raises:
        TypeError: no RecSA-Qwen3 model.
        ValueError: weights are offloaded.
    """
    decoder = decoder_of(model)
    digest = hashlib.sha256()
    for name, module in decoder.named_modules():
        state = {field: str(getattr(module, field)) for field in _ADAPTER_STATE if hasattr(module, field)}
        if state or module._parameters:
            digest.update(json.dumps([name, type(module).__name__, state]).encode())
    samples: dict[torch.device, list[torch.Tensor]] = {}
    order: list[torch.device] = []
    for held in (decoder.named_parameters(), decoder.named_buffers()):
        for name, tensor in held:
            if tensor.device.type == "meta":
                raise ValueError(
                    f"model: {name} is offloaded (meta device), so its values cannot be compared; load the model "
                    "onto real devices to save or load a cache with it."
                )
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # of a tensor-parallel process
            digest.update(json.dumps([name, list(local.shape), str(local.dtype)]).encode())
            samples.setdefault(local.device, []).append(_sampled_bytes(local))
            order.append(local.device)
    # one transfer a device
    parts = {device: iter(torch.cat(found).cpu().split([len(s) for s in found])) for device, found in samples.items()}
    for device in order:
        digest.update(next(parts[device]).numpy())
    return digest.hexdigest()


def _sampled_bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    count = min(SAMPLES, len(flat))
    if not count:
        return torch.empty(0, dtype=torch.uint8, device=flat.device)
    at = torch.arange(count, device=flat.device) * (len(flat) - 1) // max(count - 1, 1)
    return flat.view(torch.uint8).view(len(flat), -1)[at].flatten()


def deciding_fields(config) -> dict[str, Any]:
    """`FIELDS` of a configuration as JSON has them, M in numbers."""
    fields = {name: getattr(config, name) for name in FIELDS}
    fields["recsa_top_capacity"] = TreeGeometry.from_config(config).top_capacity or None  # None: dense, no limit
    return json.loads(json.dumps(fields))


def note_model(cache, decoder: Any) -> None:
    """Has a cache know the decoder that is about to use it: whose states it holds is asked when it is saved.

    Raises:
        ValueError: a loaded cache that another model filled; names the field and both values, or that weights differ.
    """
    if not cache.get_seq_length():
        cache.fingerprint, cache.mixed = None, False
        cache.fields, cache.versions = deciding_fields(decoder.config), _versions(decoder)
    elif cache.fingerprint is not None:
        # once for a model, since it reads weights
        _compare(cache.fields, cache.fingerprint, cache.layers[0].dtype, decoder)
    else:
        filled = cache.model() if cache.model is not None else None
        if filled is not decoder:
            # a copy does not know who filled it; saving will ask
            cache.mixed = cache.mixed or filled is not None
            return
    cache.model = weakref.ref(decoder)


def _versions(decoder: nn.Module) -> int:
    """Rises with every change of a weight in place: steps of an optimizer, loading another checkpoint."""
    held = (*decoder.parameters(), *decoder.buffers())
    return sum(tensor._version for tensor in held if not tensor.is_inference())


def _compare(fields: dict[str, Any], origin: str, dtype: torch.dtype, model: nn.Module) -> None:
    decoder: Any = decoder_of(model)
    _compare_fields(fields, decoder)
    found = fingerprint(decoder)
    if found != origin:
        kinds = "" if decoder.dtype == dtype else f" The cache holds {dtype}, the model is in {decoder.dtype}."
        raise ValueError(
            f"cache: was filled by other weights: their fingerprint is {origin[:12]}, the model's is {found[:12]} "
            f"(another checkpoint, dtype or adapter).{kinds} Use the model that it was filled with, or read the text "
            "again."
        )


def _compare_fields(fields: dict[str, Any], decoder: Any) -> None:
    for name, ours in deciding_fields(decoder.config).items():
        if fields.get(name) != ours:
            raise ValueError(
                f"cache: was filled under {name}={fields.get(name)!r}, the model has {name}={ours!r}; use the model "
                "and settings that it was filled with, or read the text again."
            )


# ---- saving ---------------------------------------------------------------------------------------------------------


def check_target(path: str | os.PathLike, overwrite: bool = False) -> None:
    """Makes the directory, and refuses a place where a cache must or can not be written: before a text is read.

    Raises:
        OSError: no files can be made there.
        FileExistsError: a file, a directory with something else in it, or a cache without `overwrite`.
    """
    if not os.fspath(path):
        raise ValueError("path='': name a directory for the cache.")
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path}: is a file; a cache is saved to a directory.")
    path.mkdir(parents=True, exist_ok=True)
    probe = path / f"{INDEX}{_PART}"
    probe.touch()  # whether files can be made there
    probe.unlink()
    if (path / INDEX).exists():
        _read_index(path)  # not ours: not to be replaced
        if not overwrite:
            raise FileExistsError(
                f"{path}: holds a cache already; overwrite it (overwrite=True), or choose another directory."
            )
        return
    for entry in path.iterdir():
        # what a save that was cut short left behind may go
        ours = _SHARD.fullmatch(entry.name.removesuffix(_PART)) or entry.name == INDEX + _PART
        if not ours or not entry.is_file():
            raise FileExistsError(f"{path}: is no cache, but holds {entry.name}; choose another directory.")


def save_cache(cache, path: str | os.PathLike, model: nn.Module | None, overwrite: bool, shard_bytes: int) -> None:
    """`RecSACache.save`."""
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes!r}: must be an int >= 1.")
    histories = [layer.history for layer in cache.layers]
    if not any(cache.history.lengths):
        raise ValueError("cache: holds no tokens, there is nothing to save.")
    if any((h.lengths, h.columns) != (cache.history.lengths, cache.history.columns) for h in histories):
        raise ValueError("cache: an interrupted forward left its layers at different lengths; read the text again.")
    config, origin = _origin(cache, model)
    check_target(path, overwrite)
    path = Path(path)

    tensors = {
        f"layers.{number}.levels.{level}.{name}": tensor
        for number, layer in enumerate(cache.layers)
        for (level, name), tensor in layer.entries().items()
    }
    mask = cache.history.column_mask()
    if mask is not None:
        tensors[_MASK] = mask
    save_id = uuid.uuid4().hex
    shards = list(_shards(tensors, shard_bytes))
    names = [f"cache-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    keys = cache.layers[0].levels[0].tensors["keys"]
    index = {
        "format": "recsa_cache",
        "format_version": FORMAT,
        "package_version": _package_version(),
        "save_id": save_id,
        "config": config,
        "fingerprint": origin,
        "cache_dtype": cache.cache_dtype,
        "dtype": str(cache.layers[0].dtype).removeprefix("torch."),
        "kv_heads": keys.shape[1],
        "head_dim": keys.shape[3],
        "lengths": cache.history.lengths,
        "columns": cache.history.columns,
        "offsets": cache.history.offsets,
        "files": {},
        "tensors": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    try:
        for name, shard in zip(names, shards, strict=True):
            index["files"][name] = _write_shard(path / f"{name}{_PART}", shard, save_id)
        (path / f"{INDEX}{_PART}").write_text(json.dumps(index, indent=1), encoding="utf-8")
        # from here to the last line the directory is no cache, neither the old nor the new one
        (path / INDEX).unlink(missing_ok=True)
        for name in names:
            os.replace(path / f"{name}{_PART}", path / name)
        for entry in path.iterdir():
            if _SHARD.fullmatch(entry.name) and entry.name not in names:
                entry.unlink()
        os.replace(path / f"{INDEX}{_PART}", path / INDEX)
    finally:
        for entry in path.glob(f"*{_PART}"):
            if _SHARD.fullmatch(entry.name.removesuffix(_PART)) or entry.name == INDEX + _PART:
                entry.unlink()


def _origin(cache, model: nn.Module | None) -> tuple[dict[str, Any], str]:
    """The deciding fields and the fingerprint of the model that filled a cache, or why they cannot be told."""
    if cache.mixed:
        raise ValueError("cache: several models filled it, so no model could go on from it; it cannot be saved.")
    if cache.fingerprint is not None:
        if model is not None:
            _compare(cache.fields, cache.fingerprint, cache.layers[0].dtype, model)
        return cache.fields, cache.fingerprint
    filled = cache.model() if cache.model is not None else None
    source = model if filled is None else filled
    if source is None:
        raise ValueError("cache: the model that filled it is gone (or it is a copy); call save(path, model=model).")
    decoder: Any = decoder_of(source)
    fields, origin = deciding_fields(decoder.config), fingerprint(decoder)
    if cache.fields is not None:
        _compare_fields(cache.fields, decoder)
    if filled is not None and cache.versions is not None and cache.versions != _versions(decoder):
        raise ValueError("cache: the model's weights were changed after it was filled; read the text again.")
    if model is not None and decoder_of(model) is not decoder:
        _compare(fields, origin, cache.layers[0].dtype, model)
    return fields, origin


def saved_id(path: str | os.PathLike) -> str:
    """Tells one save of a cache from all others: for what is kept beside it."""
    return _read_index(Path(path))["save_id"]


def _package_version() -> str | None:
    try:
        return version("recsa-qwen3")
    except PackageNotFoundError:  # remote code
        return None


def _shards(tensors: dict[str, torch.Tensor], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Tensors in their order, as many together as fit."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > shard_bytes:
            yield shard
            shard = {}
        shard[name] = tensor
    yield shard


def _parts(tensor: torch.Tensor) -> Iterable[tuple[int, ...]]:
    """Indices of the pieces that are moved at a time: a head of a row."""
    return product(*map(range, tensor.shape[: min(2, tensor.dim() - 1)]))


def _write_shard(path: Path, tensors: dict[str, torch.Tensor], save_id: str) -> int:
    """Writes a safetensors file piece by piece, where `safetensors.torch.save_file` wants all tensors in host memory.

    Returns:
        Its bytes.
    """
    # wide entries first, so that each tensor begins at a multiple of its entry's size, as readers need
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "save_id": save_id}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            for part in _parts(tensor):
                file.write(tensor[part].detach().contiguous().cpu().view(torch.uint8).numpy().data)
        return file.tell()


# ---- loading --------------------------------------------------------------------------------------------------------


def _read_index(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise FileNotFoundError(f"{path}: is no directory; pass the one that RecSACache.save wrote.")
    if not (path / INDEX).is_file():
        raise FileNotFoundError(
            f"{path}: holds no {INDEX}, so it is no cache (a save that was cut short leaves none); save it again."
        )
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        ours = index["format"] == "recsa_cache"
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path / INDEX}: is no index of a cache, or damaged ({error}).") from error
    if not ours:
        raise ValueError(f"{path / INDEX}: is no index of a cache: format={index['format']!r}.")
    if index.get("format_version") != FORMAT:
        raise ValueError(
            f"{path / INDEX}: format_version={index.get('format_version')!r}, this package reads {FORMAT}; load "
            f"it with the package that wrote it (recsa-qwen3 {index.get('package_version')}), or read the text again."
        )
    return index


_KINDS = {
    "save_id": str,
    "config": dict,
    "fingerprint": str,
    "cache_dtype": str,
    "dtype": str,
    "kv_heads": int,
    "head_dim": int,
    "lengths": list,
    "columns": int,
    "offsets": list,
    "files": dict,
    "tensors": dict,
}


def _check_index(path: Path, index: dict[str, Any]) -> None:
    """Refuses an index that lacks something, and shards that are missing or cut short."""
    for name, kind in _KINDS.items():
        if type(index.get(name)) is not kind:
            raise ValueError(f"{path / INDEX}: {name} is missing or no {kind.__name__}; the file is damaged.")
    if getattr(torch, index["dtype"], None) not in _DTYPES:
        raise ValueError(f"{path / INDEX}: dtype={index['dtype']!r} is unknown; the file is damaged.")
    tensors, files = index["tensors"], index["files"]
    whole = all(type(n) is int and n > 0 for n in (index["kv_heads"], index["head_dim"], *files.values()))
    offsets = index["offsets"]
    whole = whole and len(offsets) in (0, len(index["lengths"]))
    whole = whole and all(offset is None or type(offset) is int for offset in offsets)
    if not whole or not all(type(name) is str for name in tensors.values()):
        raise ValueError(f"{path / INDEX}: kv_heads, head_dim, offsets, files or tensors are none; it is damaged.")
    if not index["lengths"] or not all(type(n) is int and 0 <= n <= index["columns"] for n in index["lengths"]):
        raise ValueError(f"{path / INDEX}: lengths do not fit {index['columns']} columns; the file is damaged.")
    for name, size in (dict.fromkeys(index["tensors"].values(), 0) | index["files"]).items():
        file = path / name
        if not _SHARD.fullmatch(name) or not file.is_file():
            raise FileNotFoundError(f"{file}: is missing; the cache is not whole, save it again.")
        if file.stat().st_size != size:
            raise ValueError(
                f"{file}: has {file.stat().st_size:,} bytes where {size:,} were written; copy or save it again."
            )


def load_cache(kind, path, model: nn.Module | None, device, reserve: int | None, gpu_budget: float | None):
    """`RecSACache.load`; `kind` is the class."""
    path = Path(path)
    index = _read_index(path)
    _check_index(path, index)
    dtype: torch.dtype = getattr(torch, index["dtype"])
    if model is not None and device is not None:
        raise ValueError("device: each layer goes to its model's device; pass model or device, not both.")
    if device is not None and torch.device(device).type == "meta":
        raise ValueError("device='meta': holds no numbers; pass a real device.")
    if model is None:
        config = RecSAQwen3Config(**index["config"])
        devices = [torch.device(device or "cpu")] * config.num_hidden_layers
    else:
        _compare(index["config"], index["fingerprint"], dtype, model)
        decoder: Any = decoder_of(model)
        config = decoder.config
        devices = [next(layer.parameters()).device for layer in decoder.layers[: config.num_hidden_layers]]

    batch, longest = len(index["lengths"]), max(index["lengths"])
    reserve = longest + SPARE if reserve is None else reserve
    cache = kind(config, reserve, index["cache_dtype"], gpu_budget)
    cache.check_room(longest, batch, dtype, devices)
    targets: dict[str, torch.Tensor] = {}
    mask = None
    # storage that can be written inside and outside of inference mode
    with torch.inference_mode(False), torch.no_grad():
        if _MASK in index["tensors"]:
            mask = targets[_MASK] = torch.zeros(batch, index["columns"], dtype=torch.bool)
        for number, (layer, place) in enumerate(zip(cache.layers, devices, strict=True)):
            like = torch.empty(batch, index["kv_heads"], 0, index["head_dim"], dtype=dtype, device=place)
            layer.allocate(like, longest, reserve)
            layer.history = RowHistory.of(index["lengths"], index["columns"], index["offsets"], mask)
            for (level, name), tensor in layer.entries().items():
                targets[f"layers.{number}.levels.{level}.{name}"] = tensor
        for name in targets:
            if name not in index["tensors"]:
                raise ValueError(f"{path / INDEX}: lists no tensor {name}; the file is damaged.")
        for file in dict.fromkeys(index["tensors"].values()):
            held = {
                name: targets[name] for name, place in index["tensors"].items() if place == file and name in targets
            }
            _read_shard(path / file, held, index["save_id"])
    if index["lengths"] != ([index["columns"]] * batch if mask is None else mask.sum(1).tolist()):
        raise ValueError(f"{path}: lengths are not what {_MASK} or columns says; the files are damaged.")
    cache.fields, cache.fingerprint = index["config"], index["fingerprint"]
    if model is not None:
        cache.model = weakref.ref(decoder)
    return cache


def _read_shard(path: Path, targets: dict[str, torch.Tensor], save_id: str) -> None:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            if (file.metadata() or {}).get("save_id") != save_id:
                raise ValueError(f"{path}: belongs to another save than its index; copy or save the cache again.")
            for name, target in targets.items():
                stored = file.get_slice(name)
                found, expected = (stored.get_dtype(), stored.get_shape()), (_DTYPES[target.dtype], list(target.shape))
                if found != expected:
                    raise ValueError(
                        f"{path}: {name} is {found[0]} {found[1]} where the index asks for {expected[0]} "
                        f"{expected[1]}; the files belong to different caches, or are damaged."
                    )
                for part in _parts(target):
                    target[part].copy_(stored[part])
    except SafetensorError as error:
        raise ValueError(f"{path}: is damaged ({error}); copy or save it again.") from error
