"""Convert OpenAI's Whisper tiny.en to a Hugging Face folder, and print it and the folder of a recording.

    scripts/prepare whisper

Weights keep their 16 bits. generation_config.json has the contents of OpenAI's folders on the Hub. The
tokenizer is that of GPT-2: the order of merges follows from the ranks of tokens.
"""

import base64

from lib import cached, venv

venv.enter()

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers.models.whisper.configuration_whisper import NON_SPEECH_TOKENS
from transformers.models.whisper.tokenization_whisper import LANGUAGES

# OpenAI's module names, with dots around them, and those of transformers; longer names are first.
NAMES = {
    ".blocks.": ".layers.",
    ".cross_attn_ln.": ".encoder_attn_layer_norm.",
    ".cross_attn.": ".encoder_attn.",
    ".attn_ln.": ".self_attn_layer_norm.",
    ".attn.": ".self_attn.",
    ".query.": ".q_proj.",
    ".key.": ".k_proj.",
    ".value.": ".v_proj.",
    ".out.": ".out_proj.",
    ".mlp_ln.": ".final_layer_norm.",
    ".mlp.0.": ".fc1.",
    ".mlp.2.": ".fc2.",
    ".ln_post.": ".layer_norm.",
    ".ln.": ".layer_norm.",
    ".token_embedding.": ".embed_tokens.",
    ".positional_embedding.": ".embed_positions.weight.",
}
END, START = 50256, 50257


def renamed(name):
    name = f".{name}."
    for old, new in NAMES.items():
        name = name.replace(old, new)
    return f"model{name.removesuffix('.')}"


def pieces(token, ranks):
    """The two operands of the last merge of a token, after all earlier merges."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        joined = [ranks.get(a + b, len(ranks)) for a, b in zip(parts, parts[1:])]
        at = min(range(len(joined)), key=joined.__getitem__)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def tokenizer(ranks):
    """The vocabulary of GPT-2 with the special tokens of Whisper."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}

    def text(token):
        return "".join(letters[byte] for byte in token)

    order = sorted(ranks, key=ranks.__getitem__)
    merges = [tuple(map(text, pieces(token, ranks))) for token in order if len(token) > 1]
    made = Tokenizer(models.BPE({text(token): rank for token, rank in ranks.items()}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|startoftranscript|>", *(f"<|{language}|>" for language in [*LANGUAGES][:99])]
    special += [f"<|{name}|>" for name in ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")]
    made.add_special_tokens([AddedToken(token, special=True) for token in special])
    made.add_tokens([AddedToken(f"<|{0.02 * at:.2f}|>", special=False) for at in range(1501)])
    around = [("<|startoftranscript|>", START), ("<|notimestamps|>", 50362), ("<|endoftext|>", END)]
    made.post_processor = processors.TemplateProcessing("<|startoftranscript|> <|notimestamps|> $A <|endoftext|>", special_tokens=around)
    assert (made.get_vocab_size(), made.token_to_id("<|notimestamps|>")) == (51864, 50362)
    return made


def model(source, folder):
    stored = torch.load(source / "tiny.en.pt", map_location="cpu", weights_only=True)
    dims = stored["dims"]
    shape = {"vocab_size": dims["n_vocab"], "num_mel_bins": dims["n_mels"], "d_model": dims["n_audio_state"]}
    shape |= {"max_source_positions": dims["n_audio_ctx"], "max_target_positions": dims["n_text_ctx"]}
    for side, name in (("encoder", "audio"), ("decoder", "text")):
        shape |= {f"{side}_layers": dims[f"n_{name}_layer"], f"{side}_attention_heads": dims[f"n_{name}_head"]}
        shape |= {f"{side}_ffn_dim": 4 * dims[f"n_{name}_state"]}
    tokens = {"bos_token_id": START, "eos_token_id": END, "pad_token_id": END, "decoder_start_token_id": START}
    silent = {"suppress_tokens": NON_SPEECH_TOKENS, "begin_suppress_tokens": [220, END]}
    config = transformers.WhisperConfig(**shape, **tokens, architectures=["WhisperForConditionalGeneration"], dtype="float16")
    config.save_pretrained(folder)
    save_file({renamed(name): x.contiguous() for name, x in stored["model_state_dict"].items()}, folder / "model.safetensors", {"format": "pt"})
    times = {"forced_decoder_ids": [[1, 50362]], "no_timestamps_token_id": 50362, "return_timestamps": False, "prev_sot_token_id": 50360}
    transformers.GenerationConfig(**tokens, **silent, **times, is_multilingual=False, max_length=448).save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=dims["n_mels"]).save_pretrained(folder)
    lines = (cached.fetched("whisper-tokens") / "gpt2.tiktoken").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    tokenizer(ranks).save(str(folder / "tokenizer.json"))


print(cached.prepared("whisper-tiny-en", model))
print(cached.fetched("speech"))
