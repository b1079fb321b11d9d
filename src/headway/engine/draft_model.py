"""The second, smaller model of `--draft MODEL`: loaded, checked to have the same tokens, measured, ready to draft."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headway.core.errors import BadInput, shown
from headway.core.step import Capabilities
from headway.engine.warmup import measure_steps
from headway.executor.draft import ModelProposer, draft_limits, pass_tokens
from headway.executor.model import ModelExecutor
from headway.model.load import Model, ModelInfo, describe, open_model
from headway.model.source import Progress
from headway.ops.protocol import Backend, CacheLayout
from headway.roofline.fixed import FixedCosts
from headway.roofline.memory import logit_bytes
from headway.shape.model import KVGroup
from headway.text.tokenizer import Tokenizer

FLAG = "--draft"
PROPOSERS = ("off", "ngram")  # what it may be besides a model


@dataclass(frozen=True)
class DraftModel:
    """A model that drafts for another.

    Attributes:
        model, backend: the model, on a backend of its own.
        group: the KV group of the other one whose blocks it shares.
    """

    model: Model
    backend: Backend
    group: int

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        return self.model.shape.groups

    def block_bytes(self, block_size: int) -> int:
        """What it adds to each block."""
        return sum(self.backend.block_bytes(group, block_size) for group in self.groups)

    def step_bytes(self, step_tokens: int, rows: int, drafts: int, longest: int, block_size: int) -> int:
        """What its largest pass takes, besides weights and cache, beside steps of so many tokens, rows and drafts."""
        self.backend.allocate(CacheLayout(self.groups, (1,) * len(self.groups), block_size))  # to be measured
        program, drafting = self.backend.compile(self.model.forward), min(rows, drafts)
        tokens = pass_tokens(step_tokens, drafting)
        values = program.step_bytes(tokens, rows, drafting, rows * longest, longest)
        return values + logit_bytes(self.model.shape, drafting)

    def measure(self, limits: Capabilities) -> FixedCosts | None:
        """What its steps cost; None where a backend's steps are not measured."""
        if not self.backend.deterministic:
            return None
        own = draft_limits(limits, self.group, len(self.groups))
        executor = ModelExecutor(self.backend, self.model.forward, self.groups, own)
        try:
            return measure_steps(executor)
        finally:
            executor.close()

    def proposer(self, limits: Capabilities, mode: str) -> ModelProposer:
        """Ready to draft for an executor of these limits, whose drafts are verified so."""
        context = self.model.info.context_length
        return ModelProposer(self.backend, self.model.forward, self.groups, limits, self.group, context, mode)


def load_draft(
    source: str,
    backend: Backend,
    groups: Sequence[KVGroup],
    tokenizer: Tokenizer,
    room: float,
    progress: Progress | None,
) -> DraftModel:
    """
    Args:
        source: as of `open_model`.
        groups, tokenizer: of the model that it drafts for.
        room: bytes that its weights may take.

    Raises:
        BadInput: it is no model, or none that can draft for that one.
        ModelFileError: its files are at fault.
    """
    whole = [number for number, group in enumerate(groups) if group.window is None and group.kind != "state"]
    if not whole:
        raise BadInput(
            FLAG, "the model drops what lies behind its windows, and a draft model needs blocks that it keeps"
        )
    with _may_draft(source):
        opened = open_model(source, progress)
        other = Tokenizer(opened.info.tokenizer)
        apart = tokenizer.parting(other)
        if apart is not None:
            raise BadInput("model", f"{opened.info.name} has another tokenizer: {apart}")
        model = opened.prepare(backend, room, tokenizer.vocab_size)
    return DraftModel(model, backend, whole[0])


def describe_draft(source: str, progress: Progress | None = None) -> ModelInfo | None:
    """The model that is to draft, by its files' headers; None where none does.

    Raises:
        BadInput: it is no model.
        ModelFileError: its files are at fault.
    """
    if source in PROPOSERS:
        return None
    with _may_draft(source):
        return describe(source, progress)


@contextmanager
def _may_draft(source: str) -> Iterator[None]:
    """Refusals inside name the option, and what it accepts."""
    try:
        yield
    except BadInput as error:
        accepted = f"accepted: {', '.join(PROPOSERS)}, or a smaller model with the same tokenizer"
        raise BadInput(FLAG, f"{shown(source)}: {error}; {accepted}") from None
