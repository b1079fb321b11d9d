"""What a model makes of a whole text: a vector, or a score, instead of more text."""

from __future__ import annotations

import msgspec

from headway.core.errors import BadInput

# last: the hidden state of the last token, after the last norm; mean: of all tokens; cls: of the first one. score: what
# the model's classification head makes of the last token's.
VECTORS = ("last", "mean", "cls")
POOLINGS = (*VECTORS, "score")
WHOLE = ("mean", "cls")  # need every position computed, or the first: nothing of such a prompt comes from the cache


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files say about the vectors it makes of texts.

    Attributes:
        pooling: how, unless a request says otherwise.
        normalise: vectors get length 1.
        embeds: it was made for this; any model that generates can do it too.
        labels: numbers that its classification head gives; 0 = it has none.
        positive: which of several means yes.
        generates: it can be asked for text.
        problem: why its vectors cannot be made here; "" = they can.
    """

    pooling: str = "last"
    normalise: bool = True
    embeds: bool = False
    labels: int = 0
    positive: int = -1
    generates: bool = True
    problem: str = ""

    def vectors(self, asked: str | None) -> str:
        """How a vector is made, as asked for or as the model does.

        Raises:
            BadInput: what is asked for is no vector, or the model makes none.
        """
        if asked == "score":
            raise BadInput("pooling", "'score' is no vector")
        chosen = asked or ("last" if self.pooling == "score" else self.pooling)
        check_use(self, chosen)
        return chosen


GENERATES = PoolingConfig()  # an ordinary model


def check_use(config: PoolingConfig, pooling: str | None) -> None:
    """
    Raises:
        BadInput: the model cannot be asked for this.
    """
    if pooling is None:
        if not config.generates:
            made = "scores" if config.labels else "embeddings"
            raise BadInput("model", f"it cannot generate text: it was made for {made}, and has no output matrix")
        return
    if pooling == "score" and not config.labels:
        raise BadInput("model", "it has no classification head to score with")
    if pooling != "score" and config.labels and not config.embeds:
        raise BadInput("model", "it was made for scores, not for embeddings")
    if pooling != "score" and config.problem:
        raise BadInput("model", f"its embeddings cannot be made here: {config.problem}")
