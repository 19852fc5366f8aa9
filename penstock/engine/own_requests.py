"""The engine's own requests: in whose name they run, so that they share no block and count as nobody's.

Knows nothing of what they are for.
"""

# No caller's name begins with it: tenants' names are printable (`penstock/tenants.py`).
_MARK = "\x00"

WARM_UP = f"{_MARK}warm-up"
CANARY = f"{_MARK}canary"


def is_own(tenant: str) -> bool:
    """Whether a request of this tenant is the engine's own."""
    return tenant.startswith(_MARK)
