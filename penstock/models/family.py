"""What a model family gives: readers of its settings and the layouts of its files.

No torch. The families themselves are one module each; `models.registry` finds them.
"""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.models.parameters import WeightLayout
from penstock.models.settings import GgufSettings, Settings
from penstock.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture, under the name that `ModelSpec.family` holds."""

    name: str
    read_config: Callable[[Settings], ModelSpec]
    safetensors: WeightLayout
    read_gguf: Callable[[GgufSettings], ModelSpec]
    gguf: WeightLayout
