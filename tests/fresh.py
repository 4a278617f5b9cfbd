"""Fresh Python processes for tests of loading, saving and publishing, and the tokenizer that they use.

A fresh process starts with empty caches of modules and may reach 127.0.0.1 at most: every other connection or look-up
of a name raises and is recorded. This file never touches the hub server or the model's code.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Names of the files that a saved model needs beside it.
SOURCES = sorted(path.name for path in ROOT.glob("*_recsa_qwen3.py"))

# Runs before anything else is imported in the child; `calls` holds what was refused.
GUARD = """
import socket as _socket

calls = []
_connect, _lookup = _socket.socket.connect, _socket.getaddrinfo


def _allowed(host):
    return host in LOOPBACK


def _guarded_connect(self, address):
    if self.family != _socket.AF_UNIX and not _allowed(address[0]):
        calls.append(str(address))
        raise OSError(f"blocked connection to {address}")
    return _connect(self, address)


def _guarded_lookup(host, *args, **kwargs):
    if not _allowed(host):
        calls.append(str(host))
        raise OSError(f"blocked look-up of {host}")
    return _lookup(host, *args, **kwargs)


_socket.socket.connect, _socket.getaddrinfo = _guarded_connect, _guarded_lookup
"""

HELPERS = '''
import hashlib, json, os, sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

torch.set_num_threads(1)


def prompt(length=150):
    return (torch.arange(length) * 37 % 311 + 5)[None]


def logits(model):
    """Digest of the logits [T, V] of `prompt()`, without a cache."""
    with torch.no_grad():
        values = model.eval()(prompt(), use_cache=False).logits[0]
    assert values.isfinite().all()
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def tokens(model, count=8):
    return model.eval().generate(prompt(), max_new_tokens=count, do_sample=False, pad_token_id=0).tolist()


def report(**values):
    print("REPORT " + json.dumps({"calls": calls, "own_package": "recsa_qwen3" in sys.modules, **values}))
'''


def run_fresh(code: str, *args: Any, home: Path, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Runs `code` in a new process and returns the values that it passed to `report(...)`.

    Args:
        code: sees `args` as strings, the helpers above, and `calls`.
        home: Hugging Face's home of the process, with its caches of files and of modules; empty if it is new.
        env: added to the environment, from which the Hugging Face and Python variables of the test run are taken out.
            With an `HF_ENDPOINT`, connections to 127.0.0.1 are allowed.

    Returns:
        The reported values; `calls`, the connections refused; `own_package`, whether the installed package was
        imported; `stderr`.
    """
    env = env or {}
    hosts = ("127.0.0.1", "localhost") if "HF_ENDPOINT" in env else ()
    program = f"LOOPBACK = {hosts!r}\n{GUARD}\nimport sys\nargs = sys.argv[1:]\n{HELPERS}\n{textwrap.dedent(code)}"
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "PYTHON", "TRITON_", "COV_"))}
    environment = {**inherited, "HF_HOME": str(home), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **env}
    command = [sys.executable, "-c", program, *map(str, args)]
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 600}
    result = subprocess.run(command, env=environment, cwd=home.parent, **options)
    assert result.returncode == 0, f"{result.stdout[-2000:]}\n{result.stderr[-6000:]}"
    line = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")][-1]
    return {**json.loads(line.removeprefix("REPORT ")), "stderr": result.stderr}


def tiny_tokenizer():
    """A word-level tokenizer with 320 entries, `<pad>` = 0 and `<eos>` = 1."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, 320)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    specials = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials)
