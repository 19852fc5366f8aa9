"""Penstock: an LLM inference engine and server that keeps its promises.

`from penstock import LLM, SamplingParams` is the Python door; `penstock serve` the other. Importing the package is
cheap: torch is loaded only when an engine is built.
"""

from typing import TYPE_CHECKING, Any

from penstock.request import SamplingParams

if TYPE_CHECKING:
    from penstock.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from penstock.llm import LLM

        return LLM
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
