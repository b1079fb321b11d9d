"""What a user asks for (`SamplingParams`) and what the scheduler keeps of it (`Request`).

A request has one counter of progress, `computed`: the number of its tokens whose keys and values are in the
cache. Scheduling lets `computed` catch up with `len(tokens) + len(draft)`; there is no prefill or decode phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from headway.core.errors import BadInput, shown, unknown_name
from headway.core.grammar import Grammar
from headway.core.pooling import POOLINGS
from headway.core.thinking import Thinking

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_LOGPROBS = 64
MAX_CHOICES = 128
MAX_BAD = 64  # ids of a sequence that is not to be generated
MAX_SEED = 2**63 - 1
MAX_INTEGER = 2**31 - 1  # what fits everywhere: files, messages, kernels


class _Named(msgspec.StructMeta):
    """Structs that people make: a keyword that is none is refused in a sentence."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        for name in given.keys() - set(cls.__struct_fields__):
            raise unknown_name(name, cls.__struct_fields__, f"a field of {cls.__name__}")
        return super().__call__(*args, **given)


class SamplingParams(msgspec.Struct, metaclass=_Named, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to turn logits into tokens, and when to stop. Field names as in OpenAI's API and vLLM.

    Attributes:
        max_tokens: most tokens to generate; None = whatever the context still holds.
        min_tokens: end-of-sequence and stop ids are masked, stop strings ignored, until this many are generated.
        temperature: 0 = greedy.
        top_k: keep the k likeliest tokens; 0 = off.
        top_p: keep the smallest set of tokens whose mass reaches p; 1 = off, 0 = only the likeliest.
        min_p: drop tokens less likely than min_p times the likeliest; 0 = off.
        seed: key of the sampling noise; None = a random one, which is logged.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: ids that end the text; kept in the ids, not in the text.
        logit_bias: (token id, bias) pairs added to the logits.
        presence_penalty, frequency_penalty: subtracted from logits of generated tokens, in [-2, 2].
        repetition_penalty: divides (positive) or multiplies (negative) logits of tokens seen in prompt or output, in
            [0.01, 100].
        logprobs: number of likeliest alternatives to report per generated token (0 = only the chosen one);
            None = off. Always of the raw model distribution.
        prompt_logprobs: the same for prompt tokens.
        n: number of independent choices sharing one prompt.
        grammar: what the text must look like; None = anything. Where it allows nothing more, the text ends, also before
            min_tokens.
        allowed_token_ids: nothing but these is generated; () = anything.
        bad_token_ids: sequences of ids that are not generated; the last id of one is masked after the others.
        include_stop_str_in_output: the text ends with the stop string, or the text of the stop id, that ended it.
        skip_special_tokens: control tokens have no text; else their names.
        ignore_eos: do not stop at the model's end-of-sequence ids.
        thinking_budget: most tokens of reasoning, of models that mark it; then it is closed. None = no limit.
        thinking: how they mark it; found out from the model when a request is made.
        pooling: nothing is generated: the answer is what the prompt's hidden states come to, one of `POOLINGS`.

    Raises:
        BadInput: a field is out of range; the message says what is accepted.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    thinking_budget: int | None = None
    thinking: Thinking | None = None
    pooling: str | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, None)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0, None)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        _stops(self.stop)
        _list("stop_token_ids", self.stop_token_ids, "token ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        _list("logit_bias", self.logit_bias, "(token id, bias) pairs")
        for pair in self.logit_bias:
            if not isinstance(pair, (list, tuple)) or len(pair) != 2:
                raise BadInput("logit_bias", f"{shown(pair)} is not a (token id, bias) pair")
            _integer("logit_bias", pair[0], 0, None)
            _number("logit_bias", pair[1], -100.0, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _integer(name, value, 0, MAX_LOGPROBS)
        _integer("n", self.n, 1, MAX_CHOICES)
        for field, ids in (("allowed_token_ids", self.allowed_token_ids), *(("bad_token_ids", s) for s in _bad(self))):
            _list(field, ids, "token ids")
            for token in ids:
                _integer(field, token, 0, None)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise BadInput(name, f"{shown(getattr(self, name))} is neither True nor False")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise BadInput("grammar", f"{shown(self.grammar)} is no Grammar; see headway.Grammar")
        if self.grammar is not None and self.ignore_eos:
            raise BadInput("ignore_eos", "not together with a grammar: where that is complete, the text ends")
        if self.thinking_budget is not None:
            _integer("thinking_budget", self.thinking_budget, 0, None)
        if self.pooling is not None:
            _check_pooling(self)

    def but(self, given: Mapping[str, Any]) -> SamplingParams:
        """These, changed by what was given; None = was not.

        Raises:
            BadInput: a value is out of range, or its name unknown.
        """
        for name in given.keys() - set(self.__struct_fields__):
            raise unknown_name(name, self.__struct_fields__, "a field of SamplingParams")
        return msgspec.structs.replace(self, **{name: value for name, value in given.items() if value is not None})

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _integer(field: str, value: int, low: int, high: int | None) -> None:
    most = MAX_INTEGER if high is None else high
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
        open_end = high is None and not (isinstance(value, int) and value > most)
        raise BadInput(
            field, f"{shown(value)} is not an integer {f'>= {low}' if open_end else f'from {low} to {most}'}"
        )


def _number(field: str, value: float, low: float, high: float, open_low: bool = False) -> None:
    accepted = f"a number {'above' if open_low else 'from'} {low:g} {'up ' if open_low else ''}to {high:g}"
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):
        raise BadInput(field, f"{shown(value)} is not {accepted}")


def _list(field: str, value: Sequence[object], holds: str) -> None:
    if not isinstance(value, (list, tuple)):
        raise BadInput(field, f"{shown(value)} is not a list of {holds}")


def _bad(params: SamplingParams) -> Sequence[Sequence[int]]:
    _list("bad_token_ids", params.bad_token_ids, "lists of token ids")
    if any(isinstance(ids, (list, tuple)) and not ids for ids in params.bad_token_ids):
        raise BadInput("bad_token_ids", "holds an empty list of ids")
    if any(isinstance(ids, (list, tuple)) and len(ids) > MAX_BAD for ids in params.bad_token_ids):
        raise BadInput("bad_token_ids", f"a sequence has at most {MAX_BAD} ids")
    return params.bad_token_ids


def _check_pooling(params: SamplingParams) -> None:
    if params.pooling not in POOLINGS:
        raise BadInput("pooling", f"{shown(params.pooling)} is not one of {', '.join(POOLINGS)}")
    for name in ("prompt_logprobs", "logprobs", "grammar", "thinking_budget"):
        if getattr(params, name) is not None:
            raise BadInput(name, "not together with pooling, which generates nothing")
    if params.n != 1:
        raise BadInput("n", "not together with pooling, which has one answer")


def _stops(stops: Sequence[str]) -> None:
    if not isinstance(stops, (list, tuple)) or len(stops) > MAX_STOP_STRINGS:
        raise BadInput("stop", f"give a list of at most {MAX_STOP_STRINGS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise BadInput("stop", f"each stop string must have 1 to {MAX_STOP_CHARS} characters")


class Finish(msgspec.Struct, frozen=True):
    """Why a request ended.

    Attributes:
        reason: "stop" (id or string), "length", "abort" (cancelled), or "error".
        matched: the stop string or stop id that was met, or the error's sentence; None otherwise.
    """

    reason: str
    matched: str | int | None = None


class Request:
    """One choice being generated. Only the scheduler writes to it, and only in `add`, `plan` and `commit`.

    Attributes:
        id: unique among live requests; choice c > 0 of request "x" is "x#c".
        tokens: prompt then generated ids; append-only.
        prompt_len: how many of `tokens` are prompt.
        computed: tokens whose keys and values are cached; the one counter.
        pending: tokens that steps in flight compute; 0 between steps.
        draft: proposed ids to verify in the next step. odds: probability that one of them is accepted.
        params: sampling parameters. Its seed is always set here (a random one is drawn before).
        choice: index among the n choices of one prompt.
        parent: id of choice 0, whose prompt blocks this choice shares; None for choice 0.
        request_id: of the request that this is a choice of.
        stop_ids: ids that end the request: the model's end-of-sequence ids unless ignored, and params.stop_token_ids.
        max_len: prompt_len + the most tokens it may generate (never above the model's context); one more than a prompt
            that is pooled, of which all tokens are computed, and no further one.
        priority: lower runs first; ties by arrival.
        arrival: time of arrival, ps.
        deadline: time after which it is aborted, ps; None = never.
        tenant: whose it is.
        namespace: of the cache; requests of different namespaces never share blocks. Given as None: the tenant.
        adapter: LoRA adapter name ("" = none); part of the cache key.
        preemptions: how often its blocks were taken back.
        cached: prompt tokens served from the prefix cache at its first admission.
        finish: set once, when it ended.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "cached",
        "choice",
        "computed",
        "deadline",
        "draft",
        "finish",
        "id",
        "max_len",
        "namespace",
        "odds",
        "params",
        "parent",
        "pending",
        "preemptions",
        "priority",
        "prompt_len",
        "remote",
        "request_id",
        "stop_ids",
        "tenant",
        "tokens",
    )

    def __init__(
        self,
        id: str,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        stop_ids: frozenset[int] = frozenset(),
        max_len: int,
        arrival: int = 0,
        priority: int = 0,
        deadline: int | None = None,
        tenant: str = "",
        namespace: str | None = None,
        adapter: str = "",
        choice: int = 0,
        parent: str | None = None,
        remote: bool = False,
    ) -> None:
        self.id = id
        self.tokens = list(tokens)
        self.prompt_len = len(self.tokens)
        self.computed = 0
        self.pending = 0
        self.draft: list[int] = []
        self.odds = 0.0
        self.params = params
        self.choice = choice
        self.parent = parent
        self.request_id = parent or id
        self.stop_ids = stop_ids
        self.max_len = max_len
        self.priority = priority
        self.arrival = arrival
        self.deadline = deadline
        self.tenant = tenant
        self.namespace = tenant if namespace is None else namespace
        self.adapter = adapter
        self.remote = remote
        self.preemptions = 0
        self.cached = 0
        self.finish: Finish | None = None

    @property
    def planned(self) -> int:
        """Tokens that are cached, or will be when the steps in flight are done."""
        return self.computed + self.pending

    @property
    def todo(self) -> int:
        """Tokens that the next step may compute, drafts apart: the known ones that no step in flight computes, or the
        one that such a step is drawing just now. 0 if it draws the last one, or verifies drafts: then nobody knows yet
        which token comes next, or whether any does."""
        planned = self.computed + self.pending
        if self.pending and self.draft:
            return 0
        known = len(self.tokens) - planned
        return known if known > 0 else int(planned < self.max_len - 1)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    def __repr__(self) -> str:
        return f"Request({self.id!r}, {self.computed}/{len(self.tokens)} of at most {self.max_len})"
