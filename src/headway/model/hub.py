"""Models of a Hugging Face hub: `org/name`, `org/name:Q4_K_M`, `org/name@revision`.

What is complete in the local cache (HF_HUB_CACHE, HF_HOME) is taken from there, and the network is left alone. The rest
is downloaded by huggingface_hub, which goes on in a file when its connection breaks (newer versions of it not in a
later run: then that file begins again): the files that are read here, and no others, from HF_ENDPOINT, with the token
in HF_TOKEN or of `hf auth login`. HF_HUB_OFFLINE=1 forbids it. A hub that all but stops sending is given up.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from headway.core.errors import BadInput, HeadwayError, ModelFileError, shown
from headway.model.fetching import FetchError, Progress, StallGuard, bytes_under, watched
from headway.model.gguf_parts import model_name, parts_named
from headway.model.reading import MAX_JSON_BYTES, read_json
from headway.model.safetensors import INDEX, SINGLE, holds_safetensors

PREFERRED = "Q4_K_M"  # of several GGUF files, as other engines do

_ID = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?::(?P<kind>[\w.-]+))?(?:@(?P<revision>\w[\w./-]*))?", re.ASCII)
CONFIG = "config.json"
CHUNK = (
    32 << 10
)  # bytes that are written at once: what is kept of an interrupted download, and what shows that it moves
_BESIDE = (CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class HubSource(NamedTuple):
    """kind: which of a repository's GGUF files, as "Q4_K_M"; None = safetensors, or the only or preferred one."""

    repo: str
    kind: str | None
    revision: str


def parse_hub(text: str) -> HubSource | None:
    """Read `org/name[:KIND][@revision]`; None if it is not of that form."""
    match = _ID.fullmatch(text)
    if match is None or ".." in text or text.lower().endswith((".gguf", ".safetensors")):
        return None
    return HubSource(match["repo"], match["kind"], match["revision"] or "main")


def fetch_hub(source: HubSource, progress: Progress | None = None) -> Path:
    """The model's folder or GGUF file in the local cache, downloaded first if it is not complete there.

    Raises:
        BadInput: there is no such model, or it has several GGUF files.
        FetchError: it could not be fetched.
    """
    found = cached(source)
    if found is not None:
        return found
    with _reached(source) as (endpoint, sizes):
        _download(source, endpoint, _wanted(source, sizes), sizes, progress)
    found = cached(source)
    if found is None:
        raise FetchError(f"{source.repo}: changed while it was downloaded; run this again")
    return found


def fetch_config(source: HubSource) -> Path:
    """The model's folder or GGUF file in the local cache, if it is complete there; else its config.json alone, which is
    downloaded if it is not there (a few kilobytes; never weights).

    Raises:
        BadInput: there is no such model, or it has no config.json.
        FetchError: it could not be fetched.
    """
    found = cached(source) or _snapshot(source) / CONFIG
    if found.exists():
        return found
    with _reached(source) as (endpoint, sizes):
        if not 0 < sizes.get(CONFIG, 0) <= MAX_JSON_BYTES:
            raise BadInput("model", f"{source.repo} has no {CONFIG} to read; accepted also: the path of its GGUF file")
        _download(source, endpoint, [CONFIG], sizes, None)
    return _snapshot(source) / CONFIG


@contextmanager
def _reached(source: HubSource) -> Iterator[tuple[str, dict[str, int]]]:
    """(the hub's address, bytes of each file of the repository). Whatever fails within is said in one sentence."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise FetchError(f"{source.repo} is not complete in {hub_cache()}, and HF_HUB_OFFLINE is set")
    try:
        import huggingface_hub
    except ImportError:
        raise FetchError(f"{source.repo}: `pip install huggingface_hub`, which fetches it, or give a path") from None
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    try:
        guard = StallGuard(endpoint)
        api = huggingface_hub.HfApi(endpoint=endpoint)
        info = watched(
            lambda: api.model_info(source.repo, revision=source.revision, files_metadata=True, timeout=30),
            lambda: guard.check(0),
        )
        yield endpoint, {file.rfilename: file.size or 0 for file in info.siblings or ()}
    except HeadwayError:
        raise
    except Exception as error:  # of the library, of what it uses, and of the disk
        raise _explained(source, endpoint, error) from None


def hub_cache() -> Path:
    """HF_HUB_CACHE, or `hub` under HF_HOME, or under `huggingface` in the user's cache folder."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def cached(source: HubSource) -> Path | None:
    """The model's folder or GGUF file in the local cache, if all its files are there."""
    folder = _repo_folder(source)
    try:
        commit = (folder / "refs" / source.revision).read_text().strip()
    except (OSError, UnicodeDecodeError):
        commit = source.revision
    snapshot = folder / "snapshots" / commit
    if "/" in commit or not snapshot.is_dir():
        return None
    if source.kind is None and holds_safetensors(snapshot):
        try:
            shards = _shards(snapshot)
        except ModelFileError:
            return None
        return snapshot if all((snapshot / name).exists() for name in (CONFIG, *shards)) else None
    files = [str(path.relative_to(snapshot)) for path in snapshot.rglob("*.gguf")]
    try:
        chosen = _gguf(source, files)
    except BadInput:
        return None
    return snapshot / chosen[0] if chosen and all((snapshot / name).exists() for name in chosen) else None


def _snapshot(source: HubSource) -> Path:
    """Where the cache has, or would have, the files of the revision."""
    folder = _repo_folder(source)
    try:
        commit = (folder / "refs" / source.revision).read_text().strip()
    except OSError:
        commit = source.revision
    return (
        folder / "snapshots" / commit.replace("/", "--")
    )  # a revision with a "/" that was never fetched has no folder


def _repo_folder(source: HubSource) -> Path:
    return hub_cache() / f"models--{source.repo.replace('/', '--')}"


def _shards(folder: Path) -> list[str]:
    """The safetensors files of a folder that has an index, or is of one."""
    if not os.path.lexists(folder / INDEX):
        return [SINGLE]
    files = read_json(folder / INDEX).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) and "/" not in name for name in files.values()):
        raise ModelFileError(f"{folder / INDEX}: weight_map must map tensor names to file names")
    return sorted(set(files.values()))


def _gguf(source: HubSource, files: Iterable[str]) -> list[str]:
    """Which GGUF file, in all its parts."""
    paths = [Path(file) for file in sorted(files, reverse=True) if ".." not in Path(file).parts]
    models = {model_name(path): path for path in paths if not path.name.startswith("mmproj")}
    kind = source.kind or (PREFERRED if len(models) > 1 else "")
    ending = re.compile(rf"(^|.*[-._]){re.escape(kind)}", re.IGNORECASE)
    chosen = [path for name, path in models.items() if not kind or ending.fullmatch(name)]
    if len(chosen) != 1:
        names = ", ".join(sorted(models)[:8]) or "none"
        raise BadInput("model", f"{source.repo}: name one of its GGUF files, as {source.repo}:{PREFERRED}: {names}")
    return [str(part) for part in parts_named(chosen[0])]


def _wanted(source: HubSource, sizes: Mapping[str, int]) -> list[str]:
    """The files to download; of safetensors in shards those that are no shards."""
    ggufs = [name for name in sizes if name.endswith(".gguf")]
    plain = [name for name in (INDEX, SINGLE) if name in sizes][:1]
    if source.kind is not None or (ggufs and not plain):
        return _gguf(source, ggufs)
    if not plain:
        raise BadInput("model", f"{source.repo} holds neither safetensors nor GGUF files; others are not supported")
    return [*(name for name in _BESIDE if name in sizes), *plain]


def _download(
    source: HubSource, endpoint: str, names: list[str], sizes: Mapping[str, int], progress: Progress | None
) -> None:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # there is one of ours
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK
    blobs = _repo_folder(source) / "blobs"
    hub_cache().mkdir(parents=True, exist_ok=True)
    present = bytes_under(blobs)
    guard, given_up = StallGuard(endpoint), threading.Event()

    def get(name: str) -> Path:
        return Path(
            hf_hub_download(
                source.repo,
                name,
                revision=source.revision,
                cache_dir=hub_cache(),
                endpoint=endpoint,
                etag_timeout=30,
                tqdm_class=_counted(name, sizes.get(name) or MAX_JSON_BYTES, given_up),
            )
        )

    def watch() -> None:
        here = bytes_under(blobs)
        if progress is not None:
            progress(f"downloading {source.repo}", min(here, total), total)
        guard.check(here - present)

    total = 0
    try:
        if INDEX in names:
            names = names + _shards(watched(lambda: get(INDEX), watch).parent)
        total = sum(sizes.get(name, 0) for name in names)
        if total - present > shutil.disk_usage(hub_cache()).free:
            raise FetchError(f"{source.repo}: needs {total} bytes, the disk of {hub_cache()} has fewer free")
        for name in names:
            watched(partial(get, name), watch)
        if progress is not None:
            progress(f"downloading {source.repo}", total, total)
    except BaseException:
        given_up.set()
        _hang_up()
        raise


def _hang_up() -> None:
    """End what is still being received, where the library can."""
    import huggingface_hub

    close = getattr(huggingface_hub, "close_session", None)  # since 1.0
    if close is not None:
        close()


def _counted(name: str, most: int, given_up: threading.Event) -> type:
    """A progress bar that shows nothing, and ends a download of more than `most` bytes, or that was given up."""
    from huggingface_hub.utils import tqdm

    class Counted(tqdm):  # type: ignore[misc, unused-ignore]
        received = 0

        def update(self, n: float | None = 1) -> bool | None:
            self.received += int(n or 0)
            if given_up.is_set():
                raise FetchError(f"{shown(name)}: given up")
            if self.received > most:
                raise FetchError(f"{shown(name)}: the hub sends more than the {most} bytes that it says the file has")
            return super().update(n)

    return Counted


def _explained(source: HubSource, endpoint: str, error: Exception) -> HeadwayError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return FetchError(
            f"{source.repo} is gated: accept its terms at {endpoint}/{source.repo}, and set HF_TOKEN to a token of the "
            "account that did"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        missing = f"no such model at {endpoint}; a private one needs HF_TOKEN"
        return BadInput("model", f"{shown(source.repo)}: there is no such file or folder, and {missing}")
    if isinstance(error, errors.RevisionNotFoundError):
        return BadInput("model", f"{source.repo} has no revision {shown(source.revision)}")
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return FetchError(
        f"{shown(source.repo)}: there is no such file or folder, it is not complete in the Hugging Face cache "
        f"({hub_cache()}), and {endpoint} does not give it: {lines[0][:200]}"
    )
