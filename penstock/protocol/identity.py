"""What a server or gateway says of itself to a gateway that asks whether it is ready: who it is, and where it counts.

A server answers /ready, and a gateway everything, with the header

    x-penstock-identity: server; store=STORE; keys=on
    x-penstock-identity: gateway; instance=INSTANCE

STORE is the store's own random identity, or none; `keys` tells whether callers need one. Neither tells anything of
what is stored. Knows nothing of HTTP.
"""

import re
from dataclasses import dataclass
from typing import Literal

IDENTITY_HEADER = "x-penstock-identity"
_NONE = "none"
_SERVER = re.compile(r"server; store=([0-9A-Za-z]{1,64}); keys=(on|off)")
_GATEWAY = re.compile(r"gateway; instance=([0-9A-Za-z]{1,64})")


@dataclass(frozen=True, slots=True)
class Identity:
    role: Literal["server", "gateway"]
    store: str | None = None  # where a server counts what its callers use
    has_keys: bool = False  # whether a server knows its callers
    instance: str = ""  # of a gateway: another each time that one starts


def encode_identity(identity: Identity) -> str:
    if identity.role == "gateway":
        return f"gateway; instance={identity.instance}"
    return f"server; store={identity.store or _NONE}; keys={'on' if identity.has_keys else 'off'}"


def decode_identity(text: str) -> Identity | None:
    """Return what a header says; None where it is not one of these."""
    if found := _SERVER.fullmatch(text):
        return Identity("server", store=None if found[1] == _NONE else found[1], has_keys=found[2] == "on")
    if found := _GATEWAY.fullmatch(text):
        return Identity("gateway", instance=found[1])
    return None
