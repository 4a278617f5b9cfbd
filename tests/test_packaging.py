"""The package as it is installed: wheel, editable install, and the flat layout that remote code needs."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_relative_imports

import recsa_qwen3
from fresh import ROOT, SOURCES, run_fresh

MODULES = sorted(ROOT.glob("*.py"))
ENTRY = "modeling_recsa_qwen3.py"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """A wheel built from a copy of the checkout, so that neither leaves anything for the other."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "models", "benchmarks")
    shutil.copytree(ROOT, folder / "source", ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder]
    subprocess.run([*command, folder / "source"], check=True, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_flat_modules_only(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert sorted(names) == [f"recsa_qwen3/{path.name}" for path in MODULES]


USE_WHEEL = """
import recsa_qwen3
from recsa_qwen3 import RecSAQwen3Config, RecSAQwen3ForCausalLM
sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
model = RecSAQwen3ForCausalLM(RecSAQwen3Config(**sizes, **heads))
model.save_pretrained(args[0])
report(file=recsa_qwen3.__file__, saved=sorted(path.name for path in Path(args[0]).glob("*.py")))
"""


def test_the_wheel_works_when_installed(wheel, tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(command, check=True)
    run = run_fresh(USE_WHEEL, tmp_path / "saved", home=tmp_path / "home", env={"PYTHONPATH": str(site)})
    assert Path(run["file"]).parent == site / "recsa_qwen3"
    assert run["saved"] == SOURCES


def test_the_editable_install_is_this_checkout():
    assert Path(recsa_qwen3.__file__).resolve().parent == ROOT


def test_every_module_is_flat_and_named_after_the_model():
    assert [path.name for path in MODULES if not path.name.endswith("_recsa_qwen3.py")] == ["__init__.py"]
    assert not any(path.stem == "kernels" for path in ROOT.iterdir()), "would shadow the package of that name"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_relative_imports_are_what_transformers_finds_by_regex(path):
    """No import that the scan misses, and no line of a docstring that it takes for one."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom) and node.level]
    assert all(node.level == 1 and node.module and "." not in node.module for node in nodes)
    assert set(get_relative_imports(path)) == {node.module for node in nodes}


def test_the_entry_file_imports_every_sibling_itself():
    assert {f"{name}.py" for name in get_relative_imports(ROOT / ENTRY)} | {ENTRY} == set(SOURCES)


def test_constraints_agree_with_each_other():
    """The two files that CI installs from differ in transformers and its hub client alone."""

    def pins(name):
        return set(re.findall(r"^(\S+)==(\S+)$", (ROOT / name).read_text(), flags=re.MULTILINE))

    differing = {package for package, _ in pins("constraints.txt") ^ pins("constraints-oldest.txt")}
    assert differing == {"transformers", "huggingface-hub"}
