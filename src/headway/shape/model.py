"""The shape of a model: what the step-time model, the memory plan and the cache need to know of it, and no weights.

`kv_bytes` is the only place in Headway that knows bytes of cache; capacity, time, pool sizes and cost all call it.
`config.py` makes a `ModelShape` from a `config.json`, `gguf.py` from a GGUF header, `catalogue.py` from a name.
Plain floats only: this is read in the scheduler's hot path.
"""

from __future__ import annotations

import msgspec

from headway.shape.formats import find_format, nominal_bytes

STATE_BYTES = 4.0  # per number: engines that serve such models keep recurrent states in float32


class KVGroup(msgspec.Struct, frozen=True):
    """Layers that cache the same thing in the same way; they share one block-id space.

    Attributes:
        kind: "full" (every position), "window" (the last `window` positions), "latent" (one vector per token, not
            split over GPUs), or "state" (constant size, whatever the length).
        layers: indices of its layers in the model.
        heads: key/value heads per layer; what tensor parallelism can split.
        key_width, value_width: numbers cached per token, layer and head (kind "state": per sequence, layer and head;
            kind "latent": of the rotary key d_r, and of the latent vector d_c, which is read as key and as value).
        window: positions kept, for kind "window".
        dtype_bytes: bytes per cached number.
        readers: further layers that read this cache without storing their own (shared KV).
        read_limit: positions a query reads at most, for sparse attention that keeps all and reads some.
        decode_flops, prefill_flops: FLOPs per query-key pair and layer, when one token attends and when a chunk does
            (latent attention differs: it decodes on the latent vectors and prefills on the expanded heads).
            Kind "state": FLOPs per token and layer.
        stride: positions that one cached row stands for (compressed attention); all other figures, limits too, are
            still per position.
    """

    kind: str
    layers: tuple[int, ...]
    heads: int
    key_width: int
    value_width: int
    window: int | None = None
    dtype_bytes: float = 2.0
    readers: int = 0
    read_limit: int | None = None
    decode_flops: float = 0.0
    prefill_flops: float = 0.0
    stride: int = 1

    @property
    def reading_layers(self) -> int:
        """Layers that read this group's cache in a step."""
        return len(self.layers) + self.readers

    def kept(self, tokens: float) -> float:
        """Positions of a `tokens` long sequence that stay cached (1 for a state, which has no positions)."""
        if self.kind == "state":
            return 1.0 if tokens > 0 else 0.0
        return tokens if self.window is None else min(tokens, self.window)

    def read(self, tokens: float) -> float:
        """Positions one new token reads."""
        kept = self.kept(tokens)
        return kept if self.read_limit is None else min(kept, self.read_limit)

    def layer_row_bytes(self, tp: int = 1) -> float:
        """Bytes per position and layer on one of `tp` GPUs. Heads are split up to their number, then replicated; a
        latent vector is never split (B7)."""
        shards = 1 if self.kind == "latent" else min(tp, self.heads)
        return -(-self.heads // shards) * (self.key_width + self.value_width) * self.dtype_bytes / self.stride


class ByPart(msgspec.Struct, frozen=True):
    """One number per part a weight can play in a step: parameters, or bytes.

    embed (gathered, neither multiplied nor streamed), head (once per logit row), attention (projections, and the
    state-space or linear-attention mixers), mlp (dense), shared (shared experts), router, experts (all routed
    experts together), norm (norms, biases of norms, scalars), gathered (further tables of which only rows are read).
    """

    embed: float = 0
    head: float = 0
    attention: float = 0
    mlp: float = 0
    shared: float = 0
    router: float = 0
    experts: float = 0
    norm: float = 0
    gathered: float = 0

    @property
    def total(self) -> float:
        return sum(getattr(self, part) for part in PARTS)

    @property
    def body(self) -> float:
        """What every token passes through: all but embedding, head and routed experts."""
        return self.attention + self.mlp + self.shared + self.router + self.norm


PARTS: tuple[str, ...] = ByPart.__struct_fields__


class MoE(msgspec.Struct, frozen=True):
    """Routed experts: `experts` in each of `layers` layers, `active` of them per token, `expert_params` each."""

    layers: int
    experts: int
    active: int
    expert_params: int


class ModelShape(msgspec.Struct, frozen=True):
    """A language model without its weights.

    Attributes:
        name: what the user called it, or the catalogue's name.
        family: `model_type` of its config.
        layers, d_model, vocab: L, d, V.
        heads, kv_heads, head_width: h, n_kv, d_k of its attention layers (n_kv = 1 for latent attention).
        params: parameters by part. A tied head counts once, in `embed`.
        stored: bytes of the weights by part, as the checkpoint stores them, scales included.
        groups: its KV groups.
        tied: the output head is the embedding.
        moe: routed experts, None if dense.
        context: longest context its positions were made for; 0 = not said.
        weight_format: storage format of most weights ("bf16", "fp8", "int4"...).
        head_format: storage format of the output matrix; "" = as most.
        unread: fields of its config that could decide its shape and that nothing here knows.
    """

    name: str
    family: str
    layers: int
    d_model: int
    vocab: int
    heads: int
    kv_heads: int
    head_width: int
    params: ByPart
    stored: ByPart
    groups: tuple[KVGroup, ...]
    tied: bool = False
    moe: MoE | None = None
    context: int = 0
    weight_format: str = "bf16"
    head_format: str = ""
    unread: tuple[str, ...] = ()

    @property
    def n_params(self) -> float:
        """N, all parameters."""
        return self.params.total

    @property
    def n_active(self) -> float:
        """N_act of the textbook mode: all of N for a dense model (B2); for a mixture what a token is multiplied by:
        k of E experts, and no input embedding, which is gathered."""
        return self.params.total if self.moe is None else self.n_body + self.head_params

    @property
    def head_params(self) -> float:
        """V*d, tied or not."""
        return self.params.embed if self.tied else self.params.head

    @property
    def n_body(self) -> float:
        """N_body of the exact mode (B3): what each new token is multiplied by, head and embedding excluded."""
        return self.params.body + self.n_routed

    @property
    def n_routed(self) -> float:
        """Parameters of the experts one token is routed to, all layers together; 0 if dense."""
        return self.params.experts * self.moe.active / self.moe.experts if self.moe else 0.0

    @property
    def is_moe(self) -> bool:
        return self.moe is not None

    @property
    def kv_width(self) -> float:
        """Bytes per cached number, recurrent states apart; 0 if nothing else is cached."""
        return max((group.dtype_bytes for group in self.groups if group.kind != "state"), default=0.0)

    def with_vocab(self, rows: int) -> ModelShape:
        """The same model with so many rows of its embedding and head."""
        share = rows / self.vocab
        params = msgspec.structs.replace(self.params, embed=self.params.embed * share, head=self.params.head * share)
        return msgspec.structs.replace(self, vocab=rows, params=params)

    def held(self, stored: ByPart, kv_bytes: float, format: str, head_format: str) -> ModelShape:
        """The same model as a backend holds it: bytes of its weights and per cached number, and the formats that most
        matrices and the head came in."""
        shape = self.with_kv_bytes(kv_bytes)
        return msgspec.structs.replace(shape, stored=stored, weight_format=format, head_format=head_format)

    def with_kv_bytes(self, dtype_bytes: float) -> ModelShape:
        """The same model caching in `dtype_bytes` per number (recurrent states keep theirs)."""
        groups = tuple(
            group if group.kind == "state" else msgspec.structs.replace(group, dtype_bytes=dtype_bytes)
            for group in self.groups
        )
        return msgspec.structs.replace(self, groups=groups)


def kv_bytes(shape: ModelShape | tuple[KVGroup, ...], tokens: float, tp: int = 1) -> float:
    """Bytes one sequence of `tokens` keeps cached on one of `tp` GPUs (B1: L * numbers per token * s_KV)."""
    groups = shape.groups if isinstance(shape, ModelShape) else shape
    return sum(len(group.layers) * group.layer_row_bytes(tp) * group.kept(tokens) for group in groups)


def kv_bytes_per_token(shape: ModelShape, tp: int = 1) -> float:
    """m_KV: bytes each further token adds while no window is full (B1). States add nothing."""
    return sum(len(g.layers) * g.layer_row_bytes(tp) for g in shape.groups if g.kind != "state")


def block_bytes(group: KVGroup, block_size: int, tp: int = 1) -> float:
    """Bytes of one block of `block_size` positions across the layers of `group`, on one of `tp` GPUs."""
    return len(group.layers) * group.layer_row_bytes(tp) * block_size


def weight_bytes(shape: ModelShape, precision: str | None = None) -> float:
    """M_W. As the checkpoint stores them, or the textbook's s_W * N for a named precision (B2)."""
    if precision is None:
        return shape.stored.total
    return nominal_bytes(precision) * shape.n_params


def store_as(shape: ModelShape, precision: str) -> ModelShape:
    """The same model with its matrices quantised to `precision`; embedding, head, router and norms keep 16 bits, as
    the quantisers leave them. 32 and 16-bit formats apply to every weight."""
    format = find_format(precision)
    size = format.width
    wide = size if size >= 2 else 2.0
    counts = shape.params
    stored = ByPart(
        embed=counts.embed * wide, head=counts.head * wide, router=counts.router * wide, norm=counts.norm * wide,
        attention=counts.attention * size, mlp=counts.mlp * size, shared=counts.shared * size,
        experts=counts.experts * size, gathered=counts.gathered * wide,
    )  # fmt: skip
    return msgspec.structs.replace(shape, stored=stored, weight_format=format.name)
