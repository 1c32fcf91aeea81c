"""Loads and runs a folder in transformers."""

import json


def run(folder, scratch, result):
    import safetensors.torch
    import torch
    import transformers

    result["version"] = transformers.__version__
    transformers.logging.set_verbosity_error()
    config = json.loads((folder / "config.json").read_text())
    name = (config.get("architectures") or ["AutoModel"])[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise RuntimeError(f"transformers has no class {name}, which `architectures` in config.json names")
    model, info = model_class.from_pretrained(folder, output_loading_info=True, local_files_only=True)
    if mismatched := [str(key) for key in info.get("mismatched_keys", [])]:
        raise RuntimeError(f"tensors have other shapes than the model: {', '.join(sorted(mismatched)[:3])}")
    result["missing_tensors"] = sorted(map(str, info.get("missing_keys", [])))
    inputs = safetensors.torch.load_file(scratch / "inputs.safetensors")
    with torch.no_grad():
        dtype = model.dtype
        stored = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}
        # The first forward pass in the stored type decompresses the weights.
        model.eval()(**stored)
        # Models with quantized weights have no method `float`.
        outputs = torch.nn.Module.float(model)(**inputs)
    tensors = {name: value.float().contiguous() for name, value in outputs.items() if torch.is_tensor(value) and value.is_floating_point()}
    safetensors.torch.save_file({name: value.clone() for name, value in tensors.items()}, scratch / "outputs.safetensors")
