"""Fetches transformers' own common tests for the installed version: `python tests/common/fetch.py`.

They are not part of this repository. The source distribution on the package index holds the files directly under its
`tests` folder; this script unpacks a few into `tests/common/source/<version>/transformers_tests`, which git ignores.
Does nothing where they are there already; needs pip, setuptools and the package index otherwise.
"""

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = "transformers_tests"
WANTED = (
    "test_configuration_common.py",
    "test_modeling_common.py",
    "test_tensor_parallel_mixin.py",
    "test_training_mixin.py",
)
# What the distribution lacks and the wanted files import is found among our stand-ins.
INIT = """from pathlib import Path

__path__.append(str(Path(__file__).resolve().parents[3] / "standins"))
"""


def source_dir() -> Path:
    """The folder for the installed transformers version; on `sys.path` it makes `transformers_tests` importable."""
    return HERE / "source" / version("transformers")


def is_fetched() -> bool:
    """Whether the installed version's files are there."""
    return (source_dir() / PACKAGE / "__init__.py").is_file()


def fetch() -> None:
    """Downloads the source distribution and unpacks the wanted files.

    Raises:
        SystemExit: the download failed; the message holds pip's last words.
    """
    requirement = f"transformers=={version('transformers')}"
    with tempfile.TemporaryDirectory() as folder:
        # built without isolation, since pip insists on the metadata and would download a build environment for it
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        command += ["--no-binary", "transformers", "--dest", folder, requirement]
        done = subprocess.run(command, capture_output=True, text=True)
        archives = list(Path(folder).glob("transformers-*.tar.gz"))
        if done.returncode or not archives:
            raise SystemExit(
                f"Could not download the source distribution of {requirement} (offline, or no setuptools?); "
                f"the common tests will be skipped. pip said:\n{done.stderr.strip()[-2000:]}"
            )
        _unpack(archives[0], source_dir() / PACKAGE)


def _unpack(archive: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    found = set()
    with tarfile.open(archive) as tar:
        for member in tar:
            folder, _, name = member.name.partition("/tests/")
            if "/" in folder or name not in WANTED or not member.isfile():
                continue
            content = tar.extractfile(member)
            assert content is not None
            (target / name).write_bytes(content.read())
            found.add(name)
    if missing := set(WANTED) - found:
        raise SystemExit(f"{archive.name} holds no tests/{', tests/'.join(sorted(missing))}.")
    # last, so that an interrupted run is repeated
    (target / "__init__.py").write_text(INIT)


if __name__ == "__main__":
    if not is_fetched():
        fetch()
    print(f"transformers' common tests: {source_dir()}")
