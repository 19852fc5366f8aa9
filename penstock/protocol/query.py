"""The parameters of a URL's query: those that a route knows, each once.

Knows nothing of what they mean.
"""

from collections.abc import Sequence

from penstock.errors import RequestError

_SHOWN_CHARACTERS = 100


def check_query(names: Sequence[str], known: Sequence[str]) -> None:
    """Raise RequestError for a parameter that a route does not know, or that stands there twice."""
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        shown = unknown[:_SHOWN_CHARACTERS]
        right = f"the query may have: {', '.join(known)}" if known else "there is none that the query could have here"
        raise RequestError(f"unknown parameter {shown!r}; {right}", param=shown)
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise RequestError(f"{repeated} stands twice in the query; give it once", param=repeated)
