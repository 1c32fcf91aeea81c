"""Loads and runs a folder in vLLM."""

# The largest number of log-probabilities per token that vLLM returns by default.
MOST = 20


def run(folder, scratch, result):
    import safetensors.torch
    import torch
    import vllm

    result["version"] = vllm.__version__
    inputs = safetensors.torch.load_file(scratch / "inputs.safetensors")
    ids = inputs["input_ids"]
    lengths = inputs.get("attention_mask", torch.ones_like(ids)).sum(1).tolist()
    texts = [row[:length] for row, length in zip(ids.tolist(), lengths)]
    model = vllm.LLM(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, max_model_len=max(lengths) + 8, max_logprobs=MOST, max_num_seqs=len(texts))
    sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=MOST, detokenize=False)
    columns = {"text": [], "position": [], "token": [], "log_probability": []}
    for text, output in enumerate(model.generate([{"prompt_token_ids": tokens} for tokens in texts], sampling, use_tqdm=False)):
        # The first token has no predecessor.
        for position, found in enumerate(output.prompt_logprobs):
            for token, value in (found or {}).items():
                for column, number in zip(columns.values(), (text, position, token, value.logprob)):
                    column.append(number)
    tensors = {name: torch.tensor(column, dtype=torch.float32 if name == "log_probability" else torch.int64) for name, column in columns.items()}
    safetensors.torch.save_file(tensors, scratch / "outputs.safetensors")
