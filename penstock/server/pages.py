"""HTML pages that ship with the package: one file each, nothing loaded from elsewhere.

Their scripts and styles are inline, so the content security policy names the hash of each: nothing else may run.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class StaticPage:
    body: bytes
    headers: Mapping[str, str]

    @classmethod
    def load(cls, name: str) -> "StaticPage":
        text = files("penstock.server").joinpath("static", name).read_text(encoding="utf-8")
        policy = "; ".join(
            [
                "default-src 'none'",
                f"script-src {_hashes(text, 'script')}",
                f"style-src {_hashes(text, 'style')}",
                "connect-src 'self'",
                "img-src data:",
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            ]
        )
        headers = {
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return cls(text.encode(), headers)


def _hashes(text: str, element: str) -> str:
    contents = re.findall(rf"<{element}>(.*?)</{element}>", text, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
