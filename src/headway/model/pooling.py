"""What a checkpoint says about the vectors and scores it makes of texts; checkpoints that cannot generate."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from headway.core.errors import ModelFileError, shown
from headway.core.fields import Fields
from headway.core.pooling import PoolingConfig
from headway.model.reading import read_json, read_json_objects
from headway.ops.weight import Weight

MAX_LABELS = 1024
MAX_MODULES = 16
_SCORE = {False: "score.weight", True: "cls.output.weight"}  # by whether it is a GGUF
_GGUF = {1: "mean", 2: "cls", 3: "last", 4: "score"}  # pooling_type; 0 = none
_MODES = {
    "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last",
    "pooling_mode_mean": "mean", "pooling_mode_cls": "cls",
}  # fmt: skip


def split_score(
    config: Fields, tensors: Mapping[str, Weight], gguf: bool
) -> tuple[Fields, dict[str, Weight], Weight | None, bool]:
    """A folder's decoder under a generating model's names and config -> (config, tensors, classification head, whether
    it generates). One without an output matrix has the embedding's in its place, which nothing is made of.

    Raises:
        ModelFileError: the head does not fit.
    """
    rest = dict(tensors)
    score = rest.pop(_SCORE[gguf], None)
    if score is not None and (len(score.shape) != 2 or not 0 < score.shape[0] <= MAX_LABELS):
        raise ModelFileError(f"{config.where}: tensor {_SCORE[gguf]}: its shape {score.shape} is not (labels, d)")
    if gguf:
        return config, rest, score, score is None
    if "embed_tokens.weight" in rest:
        rest = {f"model.{name}": weight for name, weight in rest.items()}
    kinds = config.values.get("architectures")
    kind = kinds[0] if isinstance(kinds, list) and kinds and isinstance(kinds[0], str) else ""
    headless = kind.endswith(("Model", "ForSequenceClassification")) and "lm_head.weight" not in rest
    if headless and not config.flag("tie_word_embeddings"):
        config = config.holding({**config.values, "tie_word_embeddings": True})
        return config, rest, score, False
    return config, rest, score, score is None


def pooling_config(path: Path, config: Fields, architecture: str, gguf: bool, score: Weight | None) -> PoolingConfig:
    """
    Raises:
        ModelFileError: a file of it is broken.
    """
    labels = score.shape[0] if score is not None else 0
    if gguf:
        return _of_gguf(config, architecture, labels)
    generates = labels == 0
    if not os.path.lexists(path / "modules.json"):
        return PoolingConfig(pooling="score" if labels else "last", labels=labels, generates=generates)
    normalise, pooling, problem = False, "", ""
    for module in read_json_objects(path / "modules.json", MAX_MODULES):
        kind, where = module.get("type"), module.get("path", "")
        name = kind.rpartition(".")[2] if isinstance(kind, str) else ""
        if name == "Pooling" and isinstance(where, str):
            if Path(where).is_absolute() or ".." in Path(where).parts:
                raise ModelFileError(f"{path / 'modules.json'}: {shown(where)} lies outside of the model's folder")
            pooling, problem = _of_folder(path / where)
        elif name == "Normalize":
            normalise = True
        elif name not in ("Transformer",):
            problem = f"its modules.json has a {name[:40] or 'nameless'} module, which is not supported"
    return PoolingConfig(
        pooling=pooling or "last", normalise=normalise, embeds=bool(pooling), labels=labels, generates=generates,
        problem=problem,
    )  # fmt: skip


def _of_folder(folder: Path) -> tuple[str, str]:
    """(how it pools, why that cannot be done)."""
    stated = read_json(folder / "config.json")
    modes = [name for name, value in stated.items() if name.startswith("pooling_mode_") and value is True]
    named = stated.get("pooling_mode")
    modes = [f"pooling_mode_{named}"] if isinstance(named, str) else modes
    if len(modes) != 1 or modes[0] not in _MODES:
        return "last", f"it pools by {shown(modes)}; supported, one at a time, are {', '.join(_MODES)}"
    return _MODES[modes[0]], ""


def _of_gguf(config: Fields, architecture: str, labels: int) -> PoolingConfig:
    kind = config.values.get(f"{architecture}.pooling_type", 0)
    if kind not in (0, *_GGUF):
        raise config.fault(f"{architecture}.pooling_type", f"{shown(kind)} is not one of 0 to {max(_GGUF)}")
    if labels and _GGUF.get(kind) != "score":
        raise config.fault(f"{architecture}.pooling_type", "it has a classification head, so it must be 4")
    if kind == 4 and not labels:
        return PoolingConfig(problem="it has no classification head to rank with", generates=False)
    names = config.values.get(f"{architecture}.classifier.output_labels")
    positive = names.index("yes") if isinstance(names, list) and "yes" in names else -1
    return PoolingConfig(
        pooling=_GGUF.get(kind, "last"), embeds=kind in (1, 2, 3), labels=labels, generates=labels == 0,
        positive=positive,
    )  # fmt: skip
