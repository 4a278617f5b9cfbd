"""Converts a dense Qwen3 checkpoint into a RecSA-Qwen3 folder that loads with `trust_remote_code=True`.

    python scripts/convert_qwen3.py --source Qwen/Qwen3-0.6B --output converted/RecSA-Qwen3-0.6B

Every tensor of the source is copied (or cast, with `--dtype`), the poolers are initialised by the model's own code,
and the tokenizer, chat template and generation config are carried over byte for byte. Two limits are raised to what
RecSA supports: `max_position_embeddings`, without a change of the RoPE frequencies, and the tokenizer's
`model_max_length`. Tensors pass through one buffer of `CHUNK_BYTES`, so memory is the same for any size of model.
Everything is checked before anything is written; the folder is built beside the output under a `.partial-` name and
renamed at the end: the output is complete or absent.

This file never runs the model, never runs code from the source, and never changes the source.
"""

import argparse
import contextlib
import copy
import dataclasses
import inspect
import json
import math
import os
import re
import secrets
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub
import torch
import transformers
import yaml
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import get_relative_import_files

import recsa_qwen3
from recsa_qwen3 import RecSAQwen3Config, TreeGeometry
from recsa_qwen3.configuration_recsa_qwen3 import SUPPORTED_TOKENS, TRAINED_TOKENS

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
REPORT = "conversion_report.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
CHUNK_BYTES = 8 * 2**20

# safetensors' names of the dtypes that a Qwen3 checkpoint may be stored in
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
DTYPE_CHOICES = ("auto", "bfloat16", "float16", "float32")

CARRIED = (
    "tokenizer.json",
    TOKENIZER_SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
# README.md is read for the licence only
DOWNLOADED = (*CARRIED, "config.json", "README.md", INDEX, "*.safetensors")

# recsa_* field -> default, read from the config so that no option and no default is written a second time
RECSA_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(RecSAQwen3Config.__init__).parameters.items()
    if name.startswith("recsa_")
}


class ConversionError(Exception):
    """The source cannot be converted, or the output cannot be written; the message says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the checkpoint comes from: `name` is the Hub id or the folder's own name, never a path of this machine."""

    name: str
    revision: str | None
    folder: Path
    from_hub: bool


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies in a safetensors file of the source, from byte `start` of `file` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int

    def chunks(self, dtype: torch.dtype) -> Iterator[memoryview]:
        """Yields the values as little-endian bytes of `dtype`; each view is valid until the next one is asked for.

        Raises:
            ConversionError: if the file ends early, or a finite value leaves the range of `dtype`.
        """
        left = byte_size(self.shape, self.dtype)
        buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
        with open(self.file, "rb") as file:
            file.seek(self.start)
            while left:
                block = buffer[: min(len(buffer), left)]
                if file.readinto(block) != len(block):
                    raise ConversionError(f"{self.file.name} ended while {self.name} was read.")
                left -= len(block)
                yield block if dtype == self.dtype else self._cast(block, dtype)

    def _cast(self, block: memoryview, dtype: torch.dtype) -> memoryview:
        values = torch.frombuffer(block, dtype=self.dtype)
        cast = values.to(dtype)
        bounds = torch.stack(torch.aminmax(cast))  # cheap, and NaN or infinite whenever any value is
        if not bounds.isfinite().all() and (cast.isinf() & ~values.isinf()).any():
            raise ConversionError(
                f"{self.name} holds values beyond the range of {name_of(dtype)}; choose --dtype bfloat16 or float32."
            )
        return cast.view(torch.uint8).numpy().data


@dataclasses.dataclass(frozen=True)
class PoolerTensor:
    """A pooler tensor that the source does not have; its values come from the model's own initialisation."""

    name: str
    shape: tuple[int, ...]
    model: PreTrainedModel

    def chunks(self, dtype: torch.dtype) -> Iterator[memoryview]:
        """Yields the initial values as little-endian bytes of `dtype`, in one piece."""
        module_name, _, parameter_name = self.name.rpartition(".")
        pooler = copy.deepcopy(self.model.get_submodule(module_name)).to_empty(device="cpu")
        self.model._init_weights(pooler)
        values = pooler.get_parameter(parameter_name).detach().to(dtype).contiguous()
        yield values.view(-1).view(torch.uint8).numpy().data


Tensor = StoredTensor | PoolerTensor
Entries = list[tuple[Tensor, torch.dtype]]  # tensors with the dtype that each is written in


@dataclasses.dataclass(frozen=True)
class Plan:
    """The weight files to be written, and the tensors of the source that go into none of them."""

    files: dict[str, Entries]
    left_out: list[str]

    def tensors(self) -> Iterator[tuple[Tensor, torch.dtype]]:
        for entries in self.files.values():
            yield from entries

    def total_bytes(self) -> int:
        return sum(byte_size(tensor.shape, dtype) for tensor, dtype in self.tensors())


def byte_size(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def readable(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def listed(names: list[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---------------------------------------------------------------------------------------------------------------------
# Reading and checking the source
# ---------------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConversionError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path.name} does not hold a JSON object.")
    return content


def find_source(source: str, revision: str | None) -> Source:
    """Finds the source and makes its `config.json` present: a folder first, otherwise a repository on the Hub.

    Only `config.json` is downloaded, so that a refusal does not cost a download of the weights.

    Raises:
        ConversionError: if there is no such folder or repository, or it has no `config.json`.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ConversionError("--revision selects a revision of a Hub repository; the source is a local folder.")
        if not (folder / "config.json").is_file():
            hint = " It holds a PEFT adapter: merge it into its base model first."
            adapter = (folder / "adapter_config.json").is_file()
            raise ConversionError(f"{folder} has no config.json.{hint if adapter else ''}")
        return Source(folder.resolve().name, None, folder, from_hub=False)
    if folder.exists():
        raise ConversionError(f"{folder} is a file; the source must be a folder in safetensors format or a Hub id.")
    try:
        config = Path(huggingface_hub.hf_hub_download(source, "config.json", revision=revision))
    except HFValidationError as error:
        raise ConversionError(f"{source!r} is neither an existing folder nor a Hub id.") from error
    except OSError as error:
        raise ConversionError(f"{source!r} is no local folder, and the Hub gives no config.json: {error}") from error
    # the cache keeps a repository's files under the commit they belong to
    return Source(source, config.parent.name, config.parent, from_hub=True)


def download(source: Source) -> None:
    """Brings the weights and the tokenizer of a Hub source into the local cache, at the commit of its config."""
    if not source.from_hub:
        return
    try:
        huggingface_hub.snapshot_download(
            source.name,
            revision=source.revision,
            allow_patterns=list(DOWNLOADED),
            ignore_patterns=["*/*.safetensors"],  # patterns cross folders; Qwen3's weights lie at the top
        )
    except OSError as error:
        raise ConversionError(f"{source.name!r} could not be downloaded: {error}") from error


def check_convertible(name: str, fields: dict[str, Any]) -> None:
    """Refuses what is not a plain dense Qwen3, from its config alone.

    Raises:
        ConversionError: names what the source is.
    """
    kind = fields.get("model_type")
    if kind == RecSAQwen3Config.model_type:
        raise ConversionError(f"{name} is a RecSA-Qwen3 model already; there is nothing to convert.")
    if kind != "qwen3":
        raise ConversionError(
            f"{name} has model_type {kind!r}; only dense Qwen3 checkpoints (model_type 'qwen3') can be converted."
        )
    if fields.get("quantization_config"):
        method = fields["quantization_config"].get("quant_method", "unknown")
        raise ConversionError(
            f"{name} is quantised (quant_method {method!r}); convert the unquantised checkpoint, then quantise."
        )
    if fields.get("auto_map"):
        raise ConversionError(
            f"{name} brings code of its own (auto_map), which may not compute what Qwen3 computes; if its weights are "
            "those of a plain Qwen3, remove auto_map from its config.json."
        )
    architecture = architecture_of(fields)
    if not hasattr(recsa_qwen3, f"RecSA{architecture}"):
        raise ConversionError(f"{name} has architecture {architecture!r}, which has no RecSA counterpart.")


def architecture_of(fields: dict[str, Any]) -> str:
    return (fields.get("architectures") or ["Qwen3ForCausalLM"])[0]


def make_config(fields: dict[str, Any], recsa: dict[str, Any]) -> RecSAQwen3Config:
    """Builds our config from the source's `config.json`, in whatever spelling its RoPE settings are.

    Raises:
        ConversionError: for a value that Qwen3 or RecSA refuses; the message names the field.
    """
    fields = {key: value for key, value in fields.items() if key not in ("model_type", "transformers_version")}
    try:
        config = RecSAQwen3Config.from_dict({**fields, **recsa})
        if config.recsa_trained_length is None:  # what the source supports is raised below
            config.recsa_trained_length = min(TRAINED_TOKENS, config.max_position_embeddings)
        raise_limit(config)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ConversionError(f"the configuration is refused: {error}") from error
    return config


def raise_limit(config: RecSAQwen3Config) -> None:
    """Raises `max_position_embeddings` to `SUPPORTED_TOKENS`, so that `generate` neither warns nor stops before.

    Some RoPE types take from that field what their parameters leave out: those are written first, so that the
    frequencies stay the source's.
    """
    rope, length = config.rope_parameters, config.max_position_embeddings
    if length >= SUPPORTED_TOKENS:
        return
    if rope["rope_type"] in ("yarn", "llama3"):
        rope.setdefault("original_max_position_embeddings", length)
        if rope["factor"] is None:  # YaRN: the ratio of the two lengths
            rope["factor"] = length / rope["original_max_position_embeddings"]
    config.max_position_embeddings = SUPPORTED_TOKENS


def read_header(path: Path) -> list[StoredTensor]:
    """Lists the tensors of a safetensors file without reading their values.

    The format: 8 bytes, the header's length as a little-endian integer; the header, a JSON object from each tensor's
    name to its dtype, shape and byte range; then the values, little-endian, back to back.

    Raises:
        ConversionError: if the file is not in that format, is cut off, or holds a dtype that Qwen3 is not stored in.
    """
    try:
        with safe_open(path, framework="pt"):
            pass  # the library checks the whole header against the file's size
    except SafetensorError as error:
        raise ConversionError(
            f"{path.name} is not a complete safetensors file ({error}); fetch it again. (A file of some hundred bytes "
            "is a git-lfs pointer: `git lfs pull`.)"
        ) from error
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        if entry["dtype"] not in STORED_DTYPES:
            raise ConversionError(f"{name} is stored as {entry['dtype']}; quantised weights cannot be converted.")
        dtype, start = STORED_DTYPES[entry["dtype"]], 8 + length + entry["data_offsets"][0]
        tensors.append(StoredTensor(name, dtype, tuple(entry["shape"]), path, start))
    return tensors


def read_checkpoint(folder: Path) -> list[StoredTensor]:
    """Lists all tensors of the checkpoint in `folder`, sharded or not, in the order of the files.

    Raises:
        ConversionError: if there are no safetensors weights, or the index and the shards disagree.
    """
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        hint = ""
        if any(folder.glob("*.safetensors")):
            hint = f" There are safetensors files but no {INDEX}."
        elif any(folder.glob("*.bin*")):
            hint = " There are only pickled weights (.bin): load them with transformers and save them again."
        raise ConversionError(f"no {WEIGHTS} and no {INDEX} found.{hint}")
    weight_map = read_json(folder / INDEX).get("weight_map") or {}
    tensors = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise ConversionError(f"{INDEX} names the shard {name!r}, which is not in the folder.")
        tensors += read_header(folder / name)
    if {tensor.name: tensor.file.name for tensor in tensors} != weight_map or len(tensors) != len(weight_map):
        raise ConversionError(f"{INDEX} and the shards do not list the same tensors.")
    return tensors


def uniform_names(stored: list[StoredTensor]) -> list[StoredTensor]:
    """Qwen3's question answering head calls the decoder `transformer`; here every head calls it `model`."""
    old, new = "transformer.", "model."
    return [
        dataclasses.replace(tensor, name=new + tensor.name.removeprefix(old))
        if tensor.name.startswith(old)
        else tensor
        for tensor in stored
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Planning
# ---------------------------------------------------------------------------------------------------------------------


def empty_model(config: RecSAQwen3Config, architecture: str, stored: list[StoredTensor]) -> PreTrainedModel:
    """Builds the model without storage: the one source for the names and shapes that a checkpoint must have.

    A checkpoint whose names have no prefix was saved from the bare model, whatever its config says.
    """
    if any(tensor.name.startswith("layers.") for tensor in stored):
        architecture = "Qwen3Model"
    with torch.device("meta"):
        return getattr(recsa_qwen3, f"RecSA{architecture}")(config)


def make_plan(
    model: PreTrainedModel, stored: list[StoredTensor], dtype: torch.dtype | None, shard_size: int | None
) -> Plan:
    """Decides which tensor goes into which file and in which dtype, and checks names and shapes on the way.

    Args:
        dtype: dtype of all tensors, or `None` to keep each as it is stored.
        shard_size: most bytes per file, or `None` to keep the source's files, the poolers going into the last.

    Raises:
        ConversionError: names the tensors that are missing, unexpected or of another shape.
    """
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    poolers = [name for name in expected if ".pooler." in name]
    by_name = {tensor.name: tensor for tensor in stored}
    tied = model.all_tied_weights_keys if model.config.tie_word_embeddings else {}

    problems = []
    missing = [name for name in expected if name not in by_name and name not in poolers and name not in tied]
    if missing:
        problems.append(f"missing: {listed(missing)}")
    unexpected = [name for name in by_name if name not in expected or name in poolers]
    if unexpected:
        problems.append(f"unexpected: {listed(unexpected)}")
    wrong = [
        f"{name} {by_name[name].shape} instead of {shape}"
        for name, shape in expected.items()
        if name in by_name and by_name[name].shape != shape
    ]
    if wrong:
        problems.append(f"wrong shape: {listed(wrong)}")
    if problems:
        raise ConversionError(f"the tensors are not those of {type(model).__name__}: {'; '.join(problems)}.")

    left_out = [name for name in tied if name in by_name]
    for name in left_out:
        check_equal(by_name[name], by_name[tied[name]])
    pooler_dtype = dtype or main_dtype(stored)
    entries: Entries = [(tensor, dtype or tensor.dtype) for tensor in stored if tensor.name not in left_out]
    added: Entries = [(PoolerTensor(name, expected[name], model), pooler_dtype) for name in poolers]
    files = split(entries + added, shard_size) if shard_size else keep_files(entries, added)
    return Plan(files, left_out)


def main_dtype(stored: list[StoredTensor]) -> torch.dtype:
    """The dtype that most values are stored in."""
    counts: Counter[torch.dtype] = Counter()
    for tensor in stored:
        counts[tensor.dtype] += math.prod(tensor.shape)
    return counts.most_common(1)[0][0]


def check_equal(tensor: StoredTensor, other: StoredTensor) -> None:
    """Some tied checkpoints store the head as well; it may be left out only if it is what tying would give."""
    same = tensor.dtype == other.dtype and all(
        a == b for a, b in zip(tensor.chunks(tensor.dtype), other.chunks(other.dtype), strict=True)
    )
    if not same:
        raise ConversionError(
            f"tie_word_embeddings is true, but {tensor.name} differs from {other.name}; if the model has a head of "
            "its own, set tie_word_embeddings to false in the source's config.json."
        )


def keep_files(entries: Entries, added: Entries) -> dict[str, Entries]:
    """Groups the tensors by the file they come from; what is added goes into the last one."""
    files: dict[str, Entries] = {}
    for tensor, dtype in entries:
        assert isinstance(tensor, StoredTensor)
        files.setdefault(tensor.file.name, []).append((tensor, dtype))
    files[max(files)] += added
    return files


def split(entries: Entries, shard_size: int) -> dict[str, Entries]:
    """Fills files of at most `shard_size` bytes in order; a larger tensor gets a file of its own."""
    shards: list[Entries] = []
    room = 0
    for tensor, dtype in entries:
        size = byte_size(tensor.shape, dtype)
        if size > room:
            shards.append([])
            room = shard_size
        shards[-1].append((tensor, dtype))
        room -= size
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def check_output(output: str | os.PathLike[str]) -> Path:
    """Resolves the output folder, which must not exist or must be empty.

    Raises:
        ConversionError: if something is there already.
    """
    path = Path(output).expanduser().resolve()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConversionError(f"{output} exists and is not an empty folder; choose another --output.")
    return path


def check_disk(folder: Path, needed: int) -> None:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConversionError(f"the weights need {readable(needed)}, but only {readable(free)} are free on the disk.")


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def partial_folder(output: Path) -> Iterator[Path]:
    """Gives a new folder beside `output` that becomes `output` at the end, or vanishes with whatever goes wrong.

    Only a process that is killed outright leaves it, under a name that shows what it is.
    """
    new_parents = [parent for parent in output.parents if not parent.exists()]
    output.parent.mkdir(parents=True, exist_ok=True)
    work = output.with_name(f"{output.name}.partial-{secrets.token_hex(4)}")
    work.mkdir()
    try:
        yield work
        work.rename(output)  # also takes the place of an empty folder
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        for parent in new_parents:
            with contextlib.suppress(OSError):
                parent.rmdir()
        raise


def write_weights(path: Path, entries: Entries) -> None:
    """Writes a safetensors file (format: see `read_header`), holding one chunk of one tensor at a time."""
    # wide dtypes first and a header of a multiple of 8 bytes: every tensor then starts at a multiple of its item size
    entries = sorted(entries, key=lambda entry: -entry[1].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, dtype in entries:
        end = offset + byte_size(tensor.shape, dtype)
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor, dtype in entries:
            for chunk in tensor.chunks(dtype):
                file.write(chunk)


def write_index(folder: Path, plan: Plan) -> None:
    """Writes the index that loaders need as soon as there is more than the one default file."""
    if list(plan.files) == [WEIGHTS]:
        return
    content = {
        "metadata": {
            "total_parameters": sum(math.prod(tensor.shape) for tensor, _ in plan.tensors()),
            "total_size": plan.total_bytes(),
        },
        "weight_map": {
            name: file
            for name, file in sorted((t.name, file) for file, entries in plan.files.items() for t, _ in entries)
        },
    }
    write_json(folder / INDEX, content)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def carry_over(source: Path, folder: Path) -> list[str]:
    """Copies tokenizer, chat template, generation config and licence; returns their names.

    One value is not the source's: a `model_max_length` below `SUPPORTED_TOKENS` in the tokenizer's settings.
    """
    names = sorted({path.relative_to(source).as_posix() for pattern in CARRIED for path in source.glob(pattern)})
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    settings = read_json(source / TOKENIZER_SETTINGS) if TOKENIZER_SETTINGS in names else {}
    length = settings.get("model_max_length")  # without one a tokenizer has no limit
    if isinstance(length, (int, float)) and length < SUPPORTED_TOKENS:
        write_json(folder / TOKENIZER_SETTINGS, {**settings, "model_max_length": SUPPORTED_TOKENS})
    return names


def write_code(folder: Path) -> list[str]:
    """Copies the modules that remote loading looks for: the entry file and all it imports from its own folder."""
    entry = Path(inspect.getfile(recsa_qwen3)).parent / "modeling_recsa_qwen3.py"
    files = {entry, *map(Path, get_relative_import_files(entry))}
    for file in files:
        shutil.copyfile(file, folder / file.name)
    return sorted(file.name for file in files)


def source_card(folder: Path) -> dict[str, Any]:
    """The metadata of the source's model card, or nothing if it has none that can be read."""
    if not (folder / "README.md").is_file():
        return {}
    try:
        return huggingface_hub.metadata_load(folder / "README.md") or {}
    except (ValueError, yaml.YAMLError):
        return {}


def write_card(folder: Path, source: Source, config: RecSAQwen3Config, report: dict[str, Any]) -> None:
    """Writes the model card. The licence is the source's own: converting does not change it."""
    inherited = {
        key: value
        for key, value in source_card(source.folder).items()
        if key in ("license", "license_name", "license_link", "language", "pipeline_tag")
    }
    data = huggingface_hub.ModelCardData(
        **inherited,
        library_name="transformers",
        base_model=source.name if source.from_hub else None,
        tags=["recsa", "sparse-attention", "long-context", "custom_code"],
    )
    revision = f", revision `{source.revision}`" if source.revision else ""
    auto_class = next(
        auto for auto, target in config.auto_map.items() if target.endswith(f".{report['architecture']}")
    )
    fields = "\n".join(f"| `{name}` | `{value}` |" for name, value in report["recsa"].items())
    capacity = TreeGeometry.from_config(config).top_capacity
    text = f"""---
{data.to_yaml()}
---

# {source.name.rpartition("/")[2]} with Recursive Sparse Attention

Converted from `{source.name}`{revision}. The weights are the source's own, in {report["dtype"]}; each attention layer
has a new pooler for Recursive Sparse Attention (arXiv 2611.07232).

**The poolers are untrained.** Up to `recsa_top_capacity` ({capacity}) tokens attention is exactly dense and the
outputs are those of the base model. Beyond that the model needs distillation: an untrained pooler is a plain mean,
which does not lead a query to what it looks for. (With `recsa_top_k` = `None` attention is dense at every length.)

| field | value |
| --- | --- |
{fields}

```python
from transformers import {auto_class}, AutoTokenizer

model = {auto_class}.from_pretrained("<this repository>", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("<this repository>", trust_remote_code=True)
```

The code in this repository is under Apache-2.0; the weights keep the licence of the base model.
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def verify(folder: Path, plan: Plan, config: RecSAQwen3Config) -> None:
    """Reads the written folder back with the public readers: the config, and the header of every weight file.

    Raises:
        RuntimeError: if anything differs from the plan, which is a bug of this script or a failing disk.
    """
    loaded = RecSAQwen3Config.from_pretrained(folder)
    if loaded.to_diff_dict() != config.to_diff_dict():
        raise RuntimeError("the configuration does not read back as it was written.")
    for file, entries in plan.files.items():
        with safe_open(folder / file, framework="pt") as weights:
            found = {
                name: (part.get_dtype(), tuple(part.get_shape()))
                for name in weights.keys()
                for part in [weights.get_slice(name)]
            }
        if found != {tensor.name: (DTYPE_NAMES[dtype], tensor.shape) for tensor, dtype in entries}:
            raise RuntimeError(f"{file} does not read back as it was written.")


def make_report(
    source: Source, config: RecSAQwen3Config, model: PreTrainedModel, plan: Plan, stored: list[StoredTensor]
) -> dict[str, Any]:
    copied = [(tensor, dtype) for tensor, dtype in plan.tensors() if isinstance(tensor, StoredTensor)]
    added = [(tensor, dtype) for tensor, dtype in plan.tensors() if isinstance(tensor, PoolerTensor)]

    def summary(entries: list[tuple[Any, torch.dtype]]) -> dict[str, int]:
        return {
            "tensors": len(entries),
            "parameters": sum(math.prod(tensor.shape) for tensor, _ in entries),
            "bytes": sum(byte_size(tensor.shape, dtype) for tensor, dtype in entries),
        }

    return {
        "source": {"name": source.name, "revision": source.revision},
        "architecture": type(model).__name__,
        "dtype": name_of(added[0][1]),
        "source_dtypes": sorted({name_of(tensor.dtype) for tensor in stored}),
        "copied": {**summary(copied), "cast": sum(tensor.dtype != dtype for tensor, dtype in copied)},
        "initialised": {**summary(added), "names": [tensor.name for tensor, _ in added]},
        "left_out": {"tied": plan.left_out},
        "weight_files": sorted(plan.files),
        "recsa": {name: getattr(config, name) for name in RECSA_DEFAULTS},
        "transformers_version": transformers.__version__,
    }


def convert(
    source: str,
    output: str | os.PathLike[str],
    dtype: str = "auto",
    recsa: dict[str, Any] | None = None,
    revision: str | None = None,
    max_shard_size: int | None = None,
) -> dict[str, Any]:
    """Converts the checkpoint `source` into the new folder `output`.

    Args:
        source: a folder with a Qwen3 checkpoint in safetensors format, or a Hub id.
        output: must not exist, or be an empty folder.
        dtype: `"auto"` keeps every tensor as it is stored; otherwise one of `DTYPE_CHOICES`.
        recsa: values for the config's `recsa_*` fields; the config's own defaults hold for the others.
        revision: branch, tag or commit of a Hub source.
        max_shard_size: most bytes per weight file; `None` keeps the source's files.

    Returns:
        The report, which is also written into the folder as `conversion_report.json`.

    Raises:
        ConversionError: if the source is refused or the output cannot be written; nothing is left behind then.
    """
    target = check_output(output)
    found = find_source(source, revision)
    fields = read_json(found.folder / "config.json")
    check_convertible(found.name, fields)
    config = make_config(fields, recsa or {})
    download(found)
    stored = uniform_names(read_checkpoint(found.folder))
    if not stored:
        raise ConversionError("the weight files hold no tensors.")
    wanted = None if dtype == "auto" else getattr(torch, dtype)
    config.dtype = wanted or config.dtype or main_dtype(stored)
    model = empty_model(config, architecture_of(fields), stored)
    config.architectures = [type(model).__name__]
    plan = make_plan(model, stored, wanted, max_shard_size)
    check_disk(target.parent, plan.total_bytes())
    report = make_report(found, config, model, plan, stored)

    with partial_folder(target) as work:
        config.save_pretrained(work)
        report["carried_over"] = carry_over(found.folder, work)
        report["code"] = write_code(work)
        write_card(work, found, config, report)
        for file, entries in plan.files.items():
            write_weights(work / file, entries)
            print(f"wrote {file} ({readable((work / file).stat().st_size)})", flush=True)
        write_index(work, plan)
        write_json(work / REPORT, report)
        verify(work, plan, config)
    return report


# ---------------------------------------------------------------------------------------------------------------------
# The command
# ---------------------------------------------------------------------------------------------------------------------


def push(folder: Path, repo_id: str, private: bool) -> str:
    """Uploads the finished folder and returns the address; the token comes from the environment or `hf auth login`."""
    api = huggingface_hub.HfApi()
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    api.upload_folder(
        folder_path=folder,
        repo_id=url.repo_id,
        commit_message="Convert Qwen3 to RecSA-Qwen3",
        # an earlier conversion in the same repository must leave no weights or code behind
        delete_patterns=["*.safetensors", "*.safetensors.index.json", "*_recsa_qwen3.py"],
    )
    return str(url)


def print_report(report: dict[str, Any]) -> None:
    copied, added = report["copied"], report["initialised"]
    kinds = sorted({"pooler." + name.rpartition(".")[2] for name in added["names"]})
    how = f"{copied['cast']} of them cast to {report['dtype']}" if copied["cast"] else "bit for bit"
    print(f"source       {report['source']['name']} ({report['source']['revision'] or 'local folder'})")
    print(f"model        {report['architecture']}, {report['dtype']}")
    print(f"copied       {copied['tensors']} tensors, {readable(copied['bytes'])}, {how}")
    print(f"initialised  {added['tensors']} tensors ({', '.join(kinds)}), {readable(added['bytes'])}: untrained")
    if report["left_out"]["tied"]:
        print(f"left out     {', '.join(report['left_out']['tied'])}: equal to the tied embedding")
    print(f"carried over {', '.join(report['carried_over']) or 'nothing: the source has no tokenizer files'}")
    print(f"code         {', '.join(report['code'])}")
    print(f"recsa        {', '.join(f'{k}={v}' for k, v in report['recsa'].items())}")


def field_value(text: str) -> int | float | bool | str | None:
    """Reads an option of a `recsa_*` field: `none`, `true`, `false`, a number or a word; the config judges it."""
    words: dict[str, bool | None] = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"[+-]?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"[+-]?\d*\.\d+", text) else text


def size_value(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)B?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}[match[2].upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write for example 5GB or 500MB")
    return size


def repo_value(text: str) -> str:
    try:
        validate_repo_id(text)
    except HFValidationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Convert a dense Qwen3 checkpoint into RecSA-Qwen3.",
        epilog="Private or gated repositories: set HF_TOKEN or run `hf auth login`. Exit status: 0 done, "
        "1 refused or failed, 130 interrupted.",
    )
    parser.add_argument("--source", required=True, help="folder or Hub id of a Qwen3 checkpoint (safetensors)")
    parser.add_argument("--revision", help="branch, tag or commit of a Hub source")
    parser.add_argument("--output", required=True, help="folder to make; must not exist or be empty")
    parser.add_argument("--dtype", choices=DTYPE_CHOICES, default="auto", help="default: keep as stored")
    parser.add_argument(
        "--max-shard-size", type=size_value, metavar="SIZE", help="for example 5GB; default: keep the source's files"
    )
    parser.add_argument("--push-to-hub", type=repo_value, metavar="ID", help="upload the result to this repository")
    parser.add_argument("--private", action="store_true", help="make the repository private if it is new")
    group = parser.add_argument_group("recsa fields of config.json (`none` where a field allows it)")
    for name, default in RECSA_DEFAULTS.items():
        group.add_argument(
            f"--{name.removeprefix('recsa_').replace('_', '-')}",
            dest=name,
            type=field_value,
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=f"default {str(default).lower()}",
        )
    options = parser.parse_args(arguments)
    if options.private and not options.push_to_hub:
        parser.error("--private needs --push-to-hub")
    return options


@contextlib.contextmanager
def orderly_interrupts() -> Iterator[None]:
    """Lets SIGINT and SIGTERM raise `KeyboardInterrupt` once: a second one must not stop the clean-up of the first."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: object) -> NoReturn:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = [signal.signal(number, stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        with orderly_interrupts():
            report = convert(
                options.source,
                options.output,
                dtype=options.dtype,
                recsa={name: getattr(options, name) for name in RECSA_DEFAULTS if hasattr(options, name)},
                revision=options.revision,
                max_shard_size=options.max_shard_size,
            )
    except (ConversionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; no unfinished folder is left", file=sys.stderr)
        return 130
    print_report(report)
    print(f"written to   {options.output}", flush=True)
    if options.push_to_hub:
        try:
            print(f"pushed to    {push(Path(options.output).expanduser(), options.push_to_hub, options.private)}")
        except (Exception, KeyboardInterrupt) as error:  # whatever happens here, the finished folder stays
            print(f"error: the push failed: {error or 'interrupted'}", file=sys.stderr)
            print(
                f"The converted model is complete in {options.output}; to push it again: "
                f"hf upload {options.push_to_hub} {options.output}",
                file=sys.stderr,
            )
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
