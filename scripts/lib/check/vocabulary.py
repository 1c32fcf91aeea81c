"""Check that transformers loads models with fewer tokens.

    scripts/check vocabulary [--compress BINARY] [--model FOLDER --keep TEXT]

Small models with tokenizers that the tokenizers package trains lose the tokens that a text does not need:
byte-level BPE, BPE with bytes for other characters, WordPiece and Unigram. AutoTokenizer must split the text into
the same tokens, and the logits of the remaining tokens must equal those of the original. --model and --keep check
another model and text.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from lib import COMPRESS, ROOT, venv

venv.enter(venv.reference)

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
TOLERANCE = 1e-5
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def trained(kind):
    """A tokenizer of 700 tokens, trained on the documentation."""
    texts = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    common = {"vocab_size": 700, "special_tokens": SPECIAL, "show_progress": False}
    if kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common)
    elif kind == "byte fallback":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        trainer = trainers.BpeTrainer(**{**common, "vocab_size": 900, "special_tokens": [*SPECIAL, *BYTES]})
        texts = [line for text in texts for line in text.split() if len(line) < 20]
    elif kind == "word pieces":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(**common)
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **common)
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=ends)
    names = ("pad_token", "unk_token", "bos_token", "eos_token", "mask_token")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **dict(zip(names, SPECIAL)))


def model(kind, tokenizer):
    torch.manual_seed(0)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    common = {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64, **ids}
    if kind == "word pieces":
        return transformers.BertForMaskedLM(transformers.BertConfig(**common))
    if kind == "unigram":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": ids["pad_token_id"]}
        return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=len(tokenizer), **sizes, **ids))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=kind == "bytes", **common))


def load(folder):
    config = transformers.AutoConfig.from_pretrained(folder)
    is_masked = any(name.endswith("ForMaskedLM") for name in config.architectures)
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForMaskedLM if is_masked else AutoModelForCausalLM
    loaded, info = kind.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    problems = [info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(key)]
    return loaded.eval(), AutoTokenizer.from_pretrained(folder), problems


@torch.no_grad()
def logits(loaded, ids):
    ids = torch.tensor([ids])
    inputs = {"input_ids": ids, "decoder_input_ids": ids} if loaded.config.is_encoder_decoder else {"input_ids": ids}
    return loaded(**inputs).logits[0]


def names(tokenizer, line):
    return tokenizer.convert_ids_to_tokens(tokenizer(line)["input_ids"])


def check(binary, folder, text, scratch):
    """Returns a problem, or the sizes of both vocabularies."""
    out = scratch / "out"
    command = [binary, "prune-vocabulary", folder, "-o", out, "--force", "--quiet", "--keep", text]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip(), None
    (before, old, _), (after, new, problems) = load(folder), load(out)
    if problems:
        return f"parameters do not match: {problems}", None
    lines = [line for line in Path(text).read_text().splitlines() if line.strip()][:200]
    for line in lines:
        if names(old, line) != names(new, line) or new.decode(new(line)["input_ids"]) != old.decode(old(line)["input_ids"]):
            return f"{line!r} has other tokens: {names(new, line)}", None
    if after.config.vocab_size >= before.config.vocab_size:
        return f"no token was removed: {after.config.vocab_size} of {before.config.vocab_size} remain", None
    vocabulary = old.get_vocab()
    rows = [vocabulary[token] for token, _ in sorted(new.get_vocab().items(), key=lambda entry: entry[1])]
    if len(rows) != after.config.vocab_size:
        return f"{len(rows)} tokens, but {after.config.vocab_size} rows", None
    for line in lines[:10]:
        expected = logits(before, old(line)["input_ids"][:64])[:, rows]
        error = float((logits(after, new(line)["input_ids"][:64]) - expected).abs().max())
        if not error <= TOLERANCE * float(expected.abs().max()):
            return f"logits differ by {error}", None
    settings = json.loads((out / "config.json").read_text())
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(new, key)
        if token is not None and isinstance(settings.get(key), int) and settings[key] != token:
            return f"{key} is {settings[key]} in config.json and {token} in the tokenizer", None
    return None, (before.config.vocab_size, after.config.vocab_size)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compress", metavar="BINARY", default=COMPRESS, type=Path)
    parser.add_argument("--model", metavar="FOLDER", type=Path, help="check this model")
    parser.add_argument("--keep", metavar="TEXT", type=Path, help="a .txt or .raw file whose tokens remain")
    args = parser.parse_args()
    if (args.model is None) != (args.keep is None):
        parser.error("--model and --keep require each other")
    binary = args.compress.absolute()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="compress-vocabulary-") as scratch:
        scratch = Path(scratch)
        text = scratch / "text.txt"
        text.write_text("\n".join((ROOT / "docs" / "vocabulary.md").read_text().splitlines()[:9]) + "\n")
        cases = {"model": (args.model, args.keep)} if args.model else {}
        for kind in () if args.model else ("bytes", "byte fallback", "word pieces", "unigram"):
            folder = scratch / kind.replace(" ", "-")
            tokenizer = trained(kind)
            tokenizer.save_pretrained(folder)
            model(kind, tokenizer).save_pretrained(folder)
            cases[kind] = (folder, text)
        for name, (folder, text) in cases.items():
            problem, sizes = check(binary, folder, text, scratch)
            print(f"{name:14} {problem or f'ok: {sizes[0]} -> {sizes[1]} tokens'}")
            failed += problem is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
