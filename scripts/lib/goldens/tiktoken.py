"""Write tests/golden/tiktoken: a small vocabulary in the files of Kimi K2, and tokens of texts by tiktoken.

    scripts/goldens tiktoken
"""

import base64
import json

import tiktoken
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from lib import GOLDEN, ROOT

FOLDER = GOLDEN / "tiktoken"
CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
END = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = [
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?" + CASED[0] + "*" + CASED[1] + "+" + END,
    r"[^\r\n\p{L}\p{N}]?" + CASED[0] + "+" + CASED[1] + "*" + END,
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
]
TEXTS = [
    "Hello world, it's 12345 o'clock!",
    "  two  spaces\n\n\tand\r\na tab   ",
    "I'LL SEE THEY'RE naïve cafe\u0301 déjà vu, 3.14159 ÷ 2 = ½",
    "你好，世界！ こんにちは 안녕 Mixed中文and English 🙂👍🏽",
    "[BOS]def main():\n    return {'x': 0xFF}[EOS]<|im_end|> <|reserved_token_700|>",
    "http://example.org/a/b//c?x=1&y=2 //// CamelCaseWords HTTPServer",
    "the license, the licensor and the licensee; THE LICENSE",
    " ",
    "",
]
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>"}
RESERVED = 256


def trained():
    """Tokens in the order of their ranks: all bytes, and then merges."""
    tokenizer = Tokenizer(models.BPE())
    # The other regular expressions of the library have no intersections of classes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s*\w+|\s*[^\w\s]+"), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([(ROOT / "LICENSE").read_text(), *TEXTS * 20], trainer)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    letters = {letter: bytes([byte]) for byte, letter in bytes_to_letters().items()}
    spelled = lambda text: b"".join(letters[letter] for letter in text)
    return list(dict.fromkeys([bytes([byte]) for byte in range(256)] + [spelled("".join(pair)) for pair in merges]))


def bytes_to_letters():
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in printable else next(others)) for byte in range(256)}


def main():
    FOLDER.mkdir(exist_ok=True)
    tokens = trained()
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (FOLDER / "tiktoken.model").write_text("".join(lines))
    parts = "".join(f'        r"""{part}""",\n' for part in PATTERN)
    code = f"class TikTokenTokenizer:\n    num_reserved_special_tokens = {RESERVED}\n    pat_str = '|'.join([\n{parts}    ])\n"
    (FOLDER / "tokenization_kimi.py").write_text(code)
    named = {len(tokens) + at: name for at, name in SPECIAL.items()}
    settings = {"added_tokens_decoder": {str(number): {"content": name, "special": True} for number, name in named.items()}}
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    special = {named.get(number, f"<|reserved_token_{number}|>"): number for number in range(len(tokens), len(tokens) + RESERVED)}
    ranks = {token: rank for rank, token in enumerate(tokens)}
    encoding = tiktoken.Encoding("kimi", pat_str="|".join(PATTERN), mergeable_ranks=ranks, special_tokens=special)
    found = [[text, encoding.encode(text, allowed_special="all", disallowed_special=())] for text in TEXTS]
    (FOLDER / "tokens.json").write_text("[\n" + ",\n".join(json.dumps(case) for case in found) + "\n]\n")
    print(f"{len(tokens)} tokens, {max(len(token) for token in tokens)} bytes at most")


main()
