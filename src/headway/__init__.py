"""Headway serves open-weight language models and knows what every token costs.

from headway import LLM, SamplingParams

llm = LLM()                       # the built-in demo model
print(llm.chat("Why is the sky blue?", SamplingParams(max_tokens=60)).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.core.grammar import Grammar
    from headway.core.request import SamplingParams
    from headway.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Grammar", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for, so that `import headway` is instant."""
    if name == "LLM":
        from headway.engine.llm import LLM

        return LLM
    if name == "Grammar":
        from headway.core.grammar import Grammar

        return Grammar
    if name == "SamplingParams":
        from headway.core.request import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'headway' has no attribute {name!r}")
