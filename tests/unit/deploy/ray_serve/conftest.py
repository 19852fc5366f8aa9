"""Ray's own import warns of itself, so it is imported here first, where it is installed at all."""

import contextlib
import warnings

with warnings.catch_warnings(), contextlib.suppress(ImportError):
    warnings.simplefilter("ignore")
    import ray.serve  # noqa: F401
