"""Which layers see everything and which only a window, in the spellings of `config.json`.

No torch.
"""

from collections.abc import Callable

from penstock.models.settings import Settings
from penstock.models.spec import LayerSpec


def read_window(settings: Settings) -> int | None:
    """Read `sliding_window`: null means that there is none, absence the default of most families."""
    return settings.optional_integer("sliding_window") if settings.is_given("sliding_window") else 4096


def read_windows(settings: Settings, num_layers: int, is_windowed: Callable[[int], bool]) -> tuple[LayerSpec, ...]:
    """Read `layer_types` or, where it is absent, ask `is_windowed` for each layer."""
    types = settings.texts("layer_types")
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise settings.refusal("layer_types", "supported are: sliding_attention, full_attention")
    if types and len(types) != num_layers:
        raise settings.refusal("layer_types", f"give one for each of the {num_layers} layers")
    windowed = [types[number] == "sliding_attention" if types else is_windowed(number) for number in range(num_layers)]
    window = read_window(settings) if any(windowed) else None
    return tuple(LayerSpec(window=window if of_layer else None) for of_layer in windowed)
