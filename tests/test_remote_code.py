"""Remote code from local folders: saving and loading in a chain, awkward folder names, missing or broken triton.

Cases RC-01, RC-03 and RC-06 (a) to (c): faults that users of neighbouring projects reported.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports

from conftest import tiny_model
from fresh import ROOT, SOURCES, run_fresh, tiny_tokenizer


@pytest.fixture(scope="module")
def origin(tmp_path_factory) -> Path:
    """A saved model with its tokenizer; tests copy it."""
    folder = tmp_path_factory.mktemp("origin") / "model"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def expected(origin, tmp_path_factory) -> dict:
    """Logits and greedy tokens of the installed package's own class, at a length where keys are left out."""
    code = """
    from recsa_qwen3 import RecSAQwen3ForCausalLM
    model = RecSAQwen3ForCausalLM.from_pretrained(args[0])
    assert logits(model) != logits(RecSAQwen3ForCausalLM.from_pretrained(args[0], recsa_top_k=None))
    report(logits=logits(model), tokens=tokens(model))
    """
    return run_fresh(code, origin, home=tmp_path_factory.mktemp("home") / "hf")


# Loads args[0] and saves it whole as args[1]; also each part alone, after loading the parts alone of the last link.
LINK = """
source, target = args
load = {"trust_remote_code": True}
model = AutoModelForCausalLM.from_pretrained(source, **load)
tokenizer = AutoTokenizer.from_pretrained(source, **load)
parts = {}
if os.path.exists(source + "-config"):
    config = AutoConfig.from_pretrained(source + "-config", **load)
    parts["config"] = config.to_dict() | {"_name_or_path": source} == model.config.to_dict()
    parts["tokenizer"] = AutoTokenizer.from_pretrained(source + "-tokenizer")("w5 w7").input_ids
    parts["model"] = logits(AutoModelForCausalLM.from_pretrained(source + "-model", **load))
model.save_pretrained(target)
tokenizer.save_pretrained(target)
model.save_pretrained(target + "-model")
model.config.save_pretrained(target + "-config")
tokenizer.save_pretrained(target + "-tokenizer")
report(logits=logits(model), tokens=tokens(model), ids=tokenizer("w5 w7").input_ids, parts=parts)
"""


def test_saved_copies_of_copies_are_complete(origin, expected, tmp_path):
    """RC-01: D -> E -> F -> G, each origin deleted before the next load, offline, with an empty cache of modules."""
    folder = tmp_path / "D"
    shutil.copytree(origin, folder)
    for number, name in enumerate("EFG"):
        home, target = tmp_path / f"home-{name}", tmp_path / name
        run = run_fresh(LINK, folder, target, home=home, env={"HF_HUB_OFFLINE": "1"})
        assert (run["logits"], run["tokens"]) == (expected["logits"], expected["tokens"])
        assert run["ids"] == [5, 7] and not run["own_package"] and run["calls"] == []
        if number:
            assert run["parts"] == {"config": True, "tokenizer": [5, 7], "model": expected["logits"]}
        for path in tmp_path.glob(f"{folder.name}*"):
            shutil.rmtree(path)

        for copy in (target, Path(f"{target}-model")):
            assert sorted(path.name for path in copy.glob("*.py")) == SOURCES
            assert all((copy / source).read_bytes() == (origin / source).read_bytes() for source in SOURCES)
            assert not [path for path in copy.iterdir() if path.is_dir()]
        for file in tmp_path.glob(f"{name}*/*.json"):
            assert str(tmp_path) not in file.read_text(), f"{file.name} holds an absolute path"
        auto_map = json.loads((target / "config.json").read_text())["auto_map"]
        assert {entry.split(".")[0] + ".py" for entry in auto_map.values()} <= set(SOURCES)
        folder = target


LOAD_ALL = """
results = {}
for name in args[1:]:
    path = os.path.join(args[0], name)
    if name.startswith("inside "):
        os.chdir(os.path.join(args[0], name.removeprefix("inside ")))
        path = "."
    load = {"local_files_only": True, "trust_remote_code": True}
    AutoConfig.from_pretrained(path, **load)
    AutoTokenizer.from_pretrained(path, **load)
    results[name] = logits(AutoModelForCausalLM.from_pretrained(path, **load))
report(results=results)
"""


def test_awkward_folder_names_load_without_a_connection(origin, expected, tmp_path):
    """RC-03: not offline by a variable; every connection and every look-up of a name is refused and counted."""
    names = ["RecSA-Qwen3-0.6B", "recsa.v1.0", "1m-model", "with space"]
    for name in names:
        shutil.copytree(origin, tmp_path / name)
    (tmp_path / "link").symlink_to(origin, target_is_directory=True)
    names += ["link", "inside recsa.v1.0"]
    run = run_fresh(LOAD_ALL, tmp_path, *names, home=tmp_path / "home")
    assert run["results"] == dict.fromkeys(names, expected["logits"])
    assert run["calls"] == [] and not run["own_package"]


FAKE_TRITON = {
    "missing": "raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')\n",
    "oserror": 'raise OSError("libcuda.so.1: cannot open shared object file")\n',
    "runtime": 'raise RuntimeError("0 active drivers")\n',
    "old": '__version__ = "1.1.0"\n\n\ndef jit(function):\n    return function\n',
}

# `args`: the folder of fake tritons, the model, and the fakes to use in turn. The first one is on PYTHONPATH from the
# start; with the others torch itself would not start, so they come when torch and Qwen3 have been imported.
USE_FAKES = """
import shutil
from transformers import Qwen3ForCausalLM
results = {}
for fake in args[2:]:
    sys.path.insert(0, os.path.join(args[0], fake))
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        del sys.modules[name]
    copy = os.path.join(args[0], "model_" + fake)  # a name of its own: the code is imported afresh
    shutil.copytree(args[1], copy)
    load = {"trust_remote_code": True, "local_files_only": True}
    results[fake] = {"tokens": tokens(AutoModelForCausalLM.from_pretrained(copy, **load))}
    try:
        tokens(AutoModelForCausalLM.from_pretrained(copy, recsa_backend="triton", **load))
    except Exception as error:
        results[fake]["error"] = f"{type(error).__name__}: {error}"
report(results=results)
"""


def test_triton_may_be_missing_or_broken(origin, expected, tmp_path):
    """RC-06: the reference path runs and says so at most once; asking for the kernels by name is a clear error."""
    fakes = tmp_path / "fakes"
    for name, source in FAKE_TRITON.items():
        package = fakes / name / "triton"
        (package / "language").mkdir(parents=True)
        (package / "__init__.py").write_text(source)
        (package / "language" / "__init__.py").write_text("")
    env = {"PYTHONPATH": str(fakes / "missing")}
    run = run_fresh(USE_FAKES, fakes, origin, *FAKE_TRITON, home=tmp_path / "home", env=env)
    for fake, result in run["results"].items():
        assert result["tokens"] == expected["tokens"]
        assert "triton" in result["error"].lower(), f"with triton {fake}: {result['error']}"
    notices = [line for line in run["stderr"].splitlines() if "triton" in line.lower()]
    assert len(notices) <= len(FAKE_TRITON), notices


def test_the_import_scan_does_not_ask_for_triton():
    """transformers refuses to load code that imports, outside `try`, something that is not installed."""
    required = {package for source in SOURCES for package in get_imports(ROOT / source)}
    assert required - set(sys.stdlib_module_names) <= {"torch", "transformers", "packaging", "safetensors"}
