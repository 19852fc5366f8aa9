"""The wire type of /live and /ready when all is well; when not, they answer with an error of the catalogue."""

import msgspec


class Health(msgspec.Struct, frozen=True):
    status: str
