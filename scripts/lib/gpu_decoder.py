"""GPTQ with llm-compressor and evaluation with transformers on a GPU, for comparison in scripts/gpu-check.

    gpu_decoder.py make FOLDER                  write a decoder of 1.5 B parameters with random weights, and windows of tokens
    gpu_decoder.py quantize FOLDER DEVICE       print the seconds and the peak memory of GPTQ to W4A16, as JSON
    gpu_decoder.py evaluate FOLDER DEVICE       print the seconds, the peak memory and the loss per token, as JSON

The decoder has the shape of Qwen2.5-1.5B in bf16; 16 windows of 512 random tokens. Time does not depend on the values
of weights. Loading and imports are not part of the seconds; writing the output of `quantize` is.
"""

import json
import sys
import time
from pathlib import Path

import torch

WINDOWS, LENGTH, VOCABULARY = 16, 512, 151936


def make(folder):
    from safetensors.torch import save_file
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
    config = Qwen2Config(**shape, vocab_size=VOCABULARY, max_position_embeddings=4096, tie_word_embeddings=True, dtype="bfloat16")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        network = Qwen2ForCausalLM(config).to(torch.bfloat16)
    network.save_pretrained(folder / "decoder")
    ids = torch.randint(0, VOCABULARY, (WINDOWS, LENGTH))
    save_file({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, folder / "windows.safetensors")


def loaded(folder, device):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(folder / "decoder", dtype=torch.bfloat16).to(device).eval()
    return network, load_file(folder / "windows.safetensors")["input_ids"]


def measured(job):
    """The result of a job, its seconds and its peak memory."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = job()
    torch.cuda.synchronize()
    return result, time.perf_counter() - start, torch.cuda.max_memory_allocated()


def quantize(folder, device):
    from datasets import Dataset
    from llmcompressor import __version__, oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    network, ids = loaded(folder, device)
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    recipe = [GPTQModifier(scheme="W4A16", targets="Linear", ignore=["lm_head"])]

    def job():
        oneshot(model=network, dataset=data, recipe=recipe, num_calibration_samples=WINDOWS, max_seq_length=LENGTH)
        network.save_pretrained(folder / "theirs", save_compressed=True)

    _, seconds, peak = measured(job)
    return {"seconds": seconds, "peak": peak, "by": f"llm-compressor {__version__}"}


def evaluate(folder, device):
    import transformers

    network, ids = loaded(folder, device)
    ids = ids.to(device)

    def job():
        with torch.no_grad():
            losses = [network(row[None], labels=row[None]).loss for row in ids]
        return torch.stack(losses).mean().item()

    job()
    loss, seconds, peak = measured(job)
    return {"seconds": seconds, "peak": peak, "loss": loss, "by": f"transformers {transformers.__version__}"}


if __name__ == "__main__":
    command, folder, *device = sys.argv[1:]
    if command == "make":
        make(Path(folder))
    else:
        print(json.dumps({"quantize": quantize, "evaluate": evaluate}[command](Path(folder), *device)))
