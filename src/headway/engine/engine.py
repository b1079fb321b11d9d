"""A loaded model, and the loop that serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import BadInput, ModelFileError
from headway.core.request import SamplingParams
from headway.engine.loop import EngineLoop
from headway.engine.options import EngineOptions
from headway.engine.warmup import Pacing
from headway.model.load import Model, ModelInfo
from headway.model.source import DEFAULT_SAMPLING, is_default
from headway.ops.protocol import Backend
from headway.roofline.hardware import GIB
from headway.roofline.memory import MemoryPlan
from headway.roofline.timing import Timing
from headway.text.chat import encode_chat
from headway.text.grammar import GrammarChecker
from headway.text.template import ChatTemplate
from headway.text.thinking import TAIL, thinking_of
from headway.text.tokenizer import Tokenizer


class Engine:
    """A loaded model and the loop that serves it.

    Attributes:
        options: how it was set up.
        info: the model's description.
        shape: of the model, with the bytes that the backend holds.
        default_params: how requests are sampled that leave it open.
        tokenizer, template: text to ids and back; `template` is None if the checkpoint has none.
        memory: the memory plan.
        backend: what computes.
        threads: CPU threads it was given.
        loop: the engine loop; `loop.submit`, `loop.cancel`, `loop.turn`.
        pacing: how large its steps are to be.
        timing: what the saved profile of this machine says of its steps; None without one.
        kv_address: "HOST:PORT" where engines of its pool fetch blocks; "" = nowhere.
    """

    def __init__(
        self,
        options: EngineOptions,
        model: Model,
        tokenizer: Tokenizer,
        backend: Backend,
        threads: int,
        memory: MemoryPlan,
        loop: EngineLoop,
        resources: ExitStack,
        pacing: Pacing,
        timing: Timing | None = None,
        kv_address: str = "",
    ) -> None:
        self.options = options
        self.pacing = pacing
        self.timing = timing
        self.kv_address = kv_address
        self.info: ModelInfo = model.info
        self.shape = model.shape
        self.default_params = default_params(options, model.info)
        self.backend = backend
        self.threads = threads
        self.memory = memory
        self.loop = loop
        self.tokenizer = tokenizer
        self._resources = resources
        self._grammars = GrammarChecker(tokenizer.special_ids)
        resources.callback(self._grammars.close)
        source = model.info.tokenizer.chat_template
        self.template = None if source is None else ChatTemplate(source, tokenizer.template_tokens())
        if self.template is not None:
            resources.callback(self.template.close)

    @property
    def max_model_len(self) -> int:
        return self.loop.scheduler.limits.max_model_len

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) pairs worth printing at start: the memory plan, and what predicts its steps."""
        predicted = {
            "none": "not predicted; `headway probe` measures this machine",
            "first steps": "predicted from the first ones; `headway probe` measures this machine",
        }
        times = predicted.get(self.step_times) or (self.timing.text() if self.timing else "")
        own = [("step times", times), ("steps", self.pacing.text)]
        own += [*self.disk_lines(), *self.pool_lines(), *self.draft_lines()]
        return [*self.memory.lines(), *own, *self.sampling_lines(), *self.adapter_lines()]

    def disk_lines(self) -> list[tuple[str, str]]:
        """What the prefix cache has on disk."""
        tier = self.loop.scheduler.cache.tier
        if tier is None:
            return []
        held = tier.blocks * self.options.block_size // len(self.shape.groups)
        return [("cache on disk", f"{held} tokens, {tier.bytes / GIB:.2f} of {tier.limit / GIB:g} GiB")]

    def pool_lines(self) -> list[tuple[str, str]]:
        """Its place among other engines."""
        if self.options.kv_secret_file is None:
            return []
        gives = f"gives blocks at {self.kv_address}" if self.kv_address else "fetches blocks"
        return [("pool", f"{self.options.role}; {gives}")]

    def draft_lines(self) -> list[tuple[str, str]]:
        """Who proposes drafts, and how they are verified."""
        if self.options.draft == "off":
            return []
        return [("drafts", f"{self.options.draft}, {self.options.verification} verification")]

    def adapter_lines(self) -> list[tuple[str, str]]:
        """What is loaded, and what there is room for."""
        if self.loop.adapters is None:
            return []
        names = ", ".join(self.loop.adapters.loaded) or "none"
        room = f"room for {self.options.lora_room} of rank up to {self.options.max_lora_rank}"
        return [("LoRA adapters", f"{names}; {room}")]

    def sampling_lines(self) -> list[tuple[str, str]]:
        """What requests that leave it open take from the model's files."""
        stated = stated_sampling(self.options, self.info)
        values = ", ".join(f"{name} {value}" for name, value in stated.items())
        built_in = stated is DEFAULT_SAMPLING
        said = "best for the built-in model" if built_in else f"as {Path(self.info.sampling.where).name} says"
        return [("sampling", f"{values}, {said}")] if stated else []

    @property
    def caution(self) -> str:
        """Why answers are not the model's; "" if they are."""
        if self.options.draft == "off" or self.options.verification != "accept-all":
            return ""
        return "accept-all: drafts were taken without asking the model; the text is not what it would have said"

    @property
    def step_times(self) -> str:
        """What predicts its steps: "estimate", "bound", "first steps", or "none"."""
        if self.timing is not None and (self.timing.label == "estimate" or self.pacing.costs is None):
            return self.timing.label
        return "none" if self.pacing.costs is None else "first steps"

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a plain text (with the model's start token, if it has one); ids are passed through."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        listed = isinstance(prompt, Sequence) and not isinstance(prompt, bytes)
        if not listed or not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            raise BadInput("prompt", "give a text, or a list of token ids")
        return list(prompt)

    def encode_whole(self, text: str | Sequence[int]) -> list[int]:
        """Token ids of a text that is complete, for a vector of it; ids are passed through."""
        return self.tokenizer.encode_whole(text) if isinstance(text, str) else self.encode(text)

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        if self.template is None:
            raise BadInput("messages", f"{self.info.name} has no chat template; give a plain prompt")
        return encode_chat(self.template, self.tokenizer, messages)

    def compiled(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """These parameters with their grammar, if there is one, tried and ready for `loop.submit`, and with how the
        model marks the reasoning after `prompt`, if that matters.

        Raises:
            BadInput: it cannot be followed.
        """
        if params.thinking is None and (params.thinking_budget is not None or params.grammar is not None):
            tail = self.tokenizer.decode(prompt[-TAIL:], skip_special=False)
            encode = partial(self.tokenizer.encode, add_special=False)
            template = self.info.tokenizer.chat_template or ""
            thinking = thinking_of(template, encode, tail, params.thinking_budget)
            params = msgspec.structs.replace(params, thinking=thinking)
        if params.grammar is None or self.loop.grammars is None:
            return params
        grammar = self._grammars.check(params.grammar)
        self.loop.grammars.begin(grammar).result()
        return msgspec.structs.replace(params, grammar=grammar)

    def close(self) -> None:
        """Give back cache, threads, files and processes; idempotent."""
        self._resources.close()


def stated_sampling(options: EngineOptions, info: ModelInfo) -> Mapping[str, Any]:
    """The sampling fields that the model's makers have defaults for, where those are to count."""
    if options.generation_config == "none":
        return {}
    return DEFAULT_SAMPLING if is_default(info.path) else info.sampling.values


def default_params(options: EngineOptions, info: ModelInfo) -> SamplingParams:
    """`SamplingParams`' own defaults, changed as the model's files say.

    Raises:
        ModelFileError: they hold a value that is out of range.
    """
    try:
        return SamplingParams(**stated_sampling(options, info))
    except BadInput as error:
        problem = f"{error}; --generation-config none leaves it out"
        raise ModelFileError(f"{info.sampling.where}: {problem}") from None
