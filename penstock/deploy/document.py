"""Writes documents as YAML that people can read: in the order they were made, long texts as blocks.

Knows nothing of what they say. The same document is always the same text.
"""

from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes out what is used twice, instead of referring to it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(document: Any) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
