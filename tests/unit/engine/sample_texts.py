"""Varied texts for tokenizer tests: the same ones on every run."""

import random

_PROSE = """
the quick brown fox jumps over lazy dogs isn't they'll we've I'm you're he'd O'Brien's THE İstanbul naïve façade
Straße größer œuvre piñata žluťoučký kůň Łódź αβγ Ελληνικά привет мир Україна שלום עולם مرحبا بالعالم नमस्ते दुनिया
สวัสดีชาวโลก 你好世界 こんにちは カタカナ 안녕하세요 Việt Nam ქართული հայերեն አማርኛ 𝒳𝓎𝓏 ﬁnance ﷽ ½ ² Ⅷ ٣٤٥ १२३ 一二三
def return lambda x: self.value[i+1] != None; i++ &&|| => -> :: /* */ // # <div class="a"> {"key": [1,2.5e-10,null]}
SELECT * FROM t WHERE a<>'b'; \\n \\t $PATH ~/.cache C:\\Windows https://example.org/a?b=c&d=%20e user@example.org
1 12 123 1234 12345678 3.14159 1,000,000 0x1F 1e-9 2024-02-29 12:34:56 +49-30-123456 50% $9.99 №5 v1.2.3-rc.4
"""
_WORDS = _PROSE.split()

_EMOJI = ["😀", "👍🏽", "👩\u200d👩\u200d👧\u200d👦", "🏳️\u200d🌈", "🇩🇪🇫🇷", "❤️", "1️⃣", "🤷🏻\u200d♀️", "☃", "𓀀"]
_SPACES = [
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u2003",
    "\u200b",
    "\u3000",
    " " * 17,
    "\n" * 5,
]
_ODD = ["\x00", "\x07", "\x1b[31m", "\x7f", "\x85", "\ufeff", "\ufffd", "\u0301", "e\u0301", "\u202e", "\u2028"]
_SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start",
    "im_end|>",
    "<s>",
    "</s>",
    "<0x41>",
    "<repo_name>",
    "▁",
    "Ġ",
]
_EDGES = [
    "",
    " ",
    "\n",
    "a",
    "A b",
    " leading",
    "trailing ",
    "  two",
    "tab\tend\t",
    "1 2  3   4",
    "x  1",
    "\n 1",
    "don't",
    "'s",
    "12'3",
]


def sample_texts(count: int, *, special: bool = True, seed: int = 0) -> list[str]:
    """Return `count` texts of one to thirty parts in many scripts; the first ones are edge cases."""
    generator = random.Random(seed)
    kinds = [_WORDS] * 6 + [_EMOJI, _SPACES, _SPACES, _ODD] + ([_SPECIAL] if special else [])
    texts = list(_EDGES)
    while len(texts) < count:
        parts = []
        for _ in range(generator.randint(1, 30)):
            kind = generator.choice(kinds)
            parts.append(generator.choice(kind))
            parts.append(generator.choice(["", " ", " ", " ", generator.choice(_SPACES)]))
        if generator.random() < 0.2:
            parts.append("".join(chr(_scalar(generator)) for _ in range(generator.randint(1, 12))))
        texts.append("".join(parts))
    return texts[:count]


def _scalar(generator: random.Random) -> int:
    """A random code point of the planes that hold characters, and no surrogate."""
    point = generator.randrange(0x20, 0x20000 - 0x800)
    return point if point < 0xD800 else point + 0x800
