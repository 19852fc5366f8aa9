"""The drafters by name."""

from penstock.engine.speculative.interface import Drafter
from penstock.registry import Registry

DRAFTERS: Registry[type[Drafter]] = Registry("drafter", {"ngram": "penstock.engine.speculative.ngram:NgramDrafter"})
