"""Publishing to the Hub and loading from it, over HTTP, with a local server in the Hub's place."""

import json
import shutil

import pytest

from conftest import TINY, tiny_model
from fresh import SOURCES, run_fresh, tiny_tokenizer
from hub_server import HubServer


@pytest.fixture
def hub(tmp_path):
    with HubServer(tmp_path / "hub") as server:
        yield server
        assert server.unknown == []


PUSH_STOCK = """
from transformers import Qwen3Config, Qwen3ForCausalLM
model = Qwen3ForCausalLM(Qwen3Config(**json.loads(args[0])))
model.push_to_hub("stock")
AutoTokenizer.from_pretrained(args[1]).push_to_hub("stock")
report(logits=logits(model))
"""

PULL_STOCK = """
from huggingface_hub import HfApi, snapshot_download
model = AutoModelForCausalLM.from_pretrained("tester/stock")
ids = AutoTokenizer.from_pretrained("tester/stock")("w5 w7").input_ids
folder = Path(snapshot_download("tester/stock", local_dir=args[0]))
api = HfApi()
sha = api.model_info("tester/stock").sha
(folder / "README.md").write_text("new")
(folder / "generation_config.json").unlink()
for _ in range(2):  # the second time nothing has changed: no commit
    api.upload_folder(repo_id="tester/stock", folder_path=folder, delete_patterns="*")
report(logits=logits(model), ids=ids, sha=sha, files=api.list_repo_files("tester/stock"))
"""


def test_the_server_serves_a_stock_model(hub, tmp_path):
    """The server itself: push, pull, edit and delete with the real client, no RecSA involved."""
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    fields = json.dumps({name: value for name, value in TINY.items() if not name.startswith("recsa_")})
    pushed = run_fresh(PUSH_STOCK, fields, tmp_path / "tokenizer", home=tmp_path / "a", env=hub.env())
    first = hub.commits("tester/stock")
    assert "generation_config.json" in hub.files("tester/stock")

    pulled = run_fresh(PULL_STOCK, tmp_path / "edit", home=tmp_path / "b", env=hub.env())
    assert pulled["logits"] == pushed["logits"] and pulled["ids"] == [5, 7] and pulled["sha"] == first[-1]
    assert pulled["files"] == hub.files("tester/stock") and "generation_config.json" not in pulled["files"]
    assert (hub.folder("tester/stock") / "README.md").read_text() == "new"
    assert (hub.folder("tester/stock", first[-1]) / "README.md").read_text() != "new"
    assert len(hub.commits("tester/stock")) == len(first) + 1
    assert pushed["calls"] == pulled["calls"] == []


PUSH = """
from recsa_qwen3 import RecSAQwen3ForCausalLM
model = RecSAQwen3ForCausalLM.from_pretrained(args[0])
model.push_to_hub("first", tags=["recsa"])
AutoTokenizer.from_pretrained(args[0]).push_to_hub("first")
report(logits=logits(model), tokens=tokens(model))
"""

# Pulls args[0], changes a weight, and publishes the variant as args[1].
NEXT_GENERATION = """
model = AutoModelForCausalLM.from_pretrained(args[0], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(args[0], trust_remote_code=True)
before = {"pulled": logits(model), "tokens": tokens(model), "ids": tokenizer("w5 w7").input_ids}
with torch.no_grad():
    model.model.layers[1].self_attn.pooler.proj.mul_(1.5)
    model.model.embed_tokens.weight[7].add_(0.25)
model.push_to_hub(args[1])
tokenizer.push_to_hub(args[1])
report(pushed=logits(model), **before)
"""

# Downloads args[0], edits its code, leaves out a file, and publishes again under the same id.
EDIT = """
from huggingface_hub import HfApi, snapshot_download
model = AutoModelForCausalLM.from_pretrained(args[0], trust_remote_code=True)
folder = Path(snapshot_download(args[0], local_dir=args[1]))
with open(folder / "tree_recsa_qwen3.py", "a") as file:
    file.write("\\nEDITED = 7\\n")
(folder / "generation_config.json").unlink()
HfApi().upload_folder(repo_id=args[0], folder_path=folder, delete_patterns="*")
report(pulled=logits(model))
"""

AFTER_EDIT = """
model = AutoModelForCausalLM.from_pretrained(args[0], trust_remote_code=True)
package = type(model).__module__.rpartition(".")[0]
report(pulled=logits(model), edited=sys.modules[package + ".tree_recsa_qwen3"].EDITED)
"""


def test_publish_pull_and_republish(hub, tmp_path):
    """Three generations, each pulled in a fresh process with an empty home, then a second push under one id."""
    origin = tmp_path / "origin"
    tiny_model().save_pretrained(origin)
    tiny_tokenizer().save_pretrained(origin)
    pushed = run_fresh(PUSH, origin, home=tmp_path / "home0", env=hub.env())
    shutil.rmtree(origin)

    files = hub.files("tester/first")
    assert {"README.md", "generation_config.json", "config.json", "tokenizer.json", *SOURCES} <= set(files)
    assert "recsa" in (hub.folder("tester/first") / "README.md").read_text()

    expected, greedy = pushed["logits"], pushed["tokens"]
    for number, (source, target) in enumerate([("first", "second"), ("second", "third"), ("third", "fourth")], 1):
        run = run_fresh(NEXT_GENERATION, f"tester/{source}", target, home=tmp_path / f"home{number}", env=hub.env())
        assert run["pulled"] == expected and run["ids"] == [5, 7]
        assert number > 1 or run["tokens"] == greedy
        assert not run["own_package"] and run["calls"] == []
        assert hub.files(f"tester/{target}") == files
        assert run["pushed"] != expected
        expected = run["pushed"]
    config = json.loads((hub.folder("tester/fourth") / "config.json").read_text())
    assert all("--" not in entry for entry in config["auto_map"].values())

    used = tmp_path / "used-home"
    assert run_fresh(EDIT, "tester/fourth", tmp_path / "edit", home=used, env=hub.env())["pulled"] == expected
    assert sorted({*files} - {"generation_config.json"}) == hub.files("tester/fourth")
    assert "generation_config.json" in hub.files("tester/fourth", hub.commits("tester/fourth")[-2])
    after = run_fresh(AFTER_EDIT, "tester/fourth", home=used, env=hub.env())
    assert after["pulled"] == expected and after["edited"] == 7
