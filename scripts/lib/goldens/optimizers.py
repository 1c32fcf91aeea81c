"""Write tests/golden/optimizers.safetensors: optimizer steps of PyTorch and transformers in float64.

    scripts/goldens optimizers

"matrix" [7, 5], "vector" [6] and "gradient/PARAMETER" [20, …], for steps 1 to 20, are the starting point of
every case. The learning rate of step t is 0.1 × (1 - t / 40). "CASE/PARAMETER" [20, …] is the parameter after
each step. Weight decay, if a case has it, applies only to the matrix. "muon" has a matrix "wide" [4, 9] too.

"schedule/CURVE": factors of transformers for steps 0 to 59 of 50, with a warm-up of 10. "clip/norm",
"clip/PARAMETER": the result of clip_grad_norm_(0.5) for the gradients of step 1. "average/PARAMETER" [20, …]: d
× average + (1 - d) × parameter, starting with the initial matrix and vector, over the parameters of case
"adamw", with d the smaller of 0.25 and (1 + t) / (10 + t).
"""



import torch
import torch.optim._muon
import transformers
from safetensors.torch import save_file
from transformers.optimization import Adafactor

from lib import GOLDEN

FILE = GOLDEN / "optimizers.safetensors"
STEPS = 20
SHAPES = {"matrix": (7, 5), "vector": (6,)}
CASES = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1.0, weight_decay=0.0),
    "adamw-decay": lambda groups: torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), eps=1e-6),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1.0),
    "sgd-momentum": lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9),
    "sgd-nesterov": lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True),
    "muon": lambda groups: Muon(groups),
    "adafactor": lambda groups: Adafactor(groups, lr=1.0, scale_parameter=False, relative_step=False),
}
DECAY = {"adamw-decay": 0.1, "sgd-momentum": 0.05, "adafactor": 0.1, "muon": 0.1}
# The tolerance of Newton-Schulz iterations in bfloat16.
BFLOAT16 = 0.1


def orthogonalized(matrix, coefficients, count, least):
    """Newton-Schulz iterations in float64; those of PyTorch are in bfloat16."""
    a, b, c = coefficients
    wide = matrix.T if len(matrix) > matrix.shape[1] else matrix
    x = wide / wide.norm().clamp(min=least)
    for _ in range(count):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    result = x.T if len(matrix) > matrix.shape[1] else x
    gap = (IN_BFLOAT16(matrix, coefficients, count, least).double() - result).abs().max() / result.abs().max()
    assert gap < BFLOAT16, f"the iterations of PyTorch differ by {gap}"
    return result


IN_BFLOAT16 = torch.optim._muon._zeropower_via_newtonschulz
torch.optim._muon._zeropower_via_newtonschulz = orthogonalized


class Muon:
    """Muon for matrices, with the learning rate of AdamW, and AdamW for vectors."""

    def __init__(self, groups):
        matrices, vectors = ([group for group in groups if (group["params"][0].dim() == 2) == wanted] for wanted in (True, False))
        self.parts = [torch.optim.Muon(matrices, lr=1.0, momentum=0.9, adjust_lr_fn="match_rms_adamw")]
        self.parts += [torch.optim.AdamW(vectors, lr=1.0)] if vectors else []

    @property
    def param_groups(self):
        return [group for part in self.parts for group in part.param_groups]

    def step(self):
        for part in self.parts:
            part.step()


def steps(case, start, gradients):
    parameters = {name: torch.nn.Parameter(tensor.double()) for name, tensor in start.items()}
    decay = {name: DECAY.get(case, 0.0) if tensor.dim() > 1 else 0.0 for name, tensor in start.items()}
    optimizer = CASES[case]([{"params": [parameter], "weight_decay": decay[name]} for name, parameter in parameters.items()])
    seen = {name: [] for name in parameters}
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * (1 - (step + 1) / 40)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name][step].double()
        optimizer.step()
        for name, parameter in parameters.items():
            seen[name].append(parameter.detach().clone())
    return {name: torch.stack(tensors) for name, tensors in seen.items()}


def factors(scheduler, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = scheduler(optimizer, num_warmup_steps=10, **options)
    return torch.tensor([schedule.lr_lambdas[0](step) for step in range(60)], dtype=torch.float64)


def averages(start, seen):
    average, made = start.double(), []
    for step, parameter in enumerate(seen, 1):
        decay = min(0.25, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * parameter
        made.append(average)
    return torch.stack(made)


def main():
    generator = torch.Generator().manual_seed(1)
    start = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    gradients = {name: torch.randn((STEPS, *shape), generator=generator) for name, shape in SHAPES.items()}
    tensors = {**start, **{f"gradient/{name}": tensor for name, tensor in gradients.items()}}
    for case in CASES:
        tensors.update({f"{case}/{name}": tensor for name, tensor in steps(case, start, gradients).items()})
    # A matrix with more columns than rows, with its own generator.
    generator = torch.Generator().manual_seed(2)
    wide, wide_gradients = {"wide": torch.randn(4, 9, generator=generator)}, {"wide": torch.randn(STEPS, 4, 9, generator=generator)}
    tensors |= {**wide, "gradient/wide": wide_gradients["wide"], "muon/wide": steps("muon", wide, wide_gradients)["wide"]}
    tensors["schedule/constant"] = factors(transformers.get_constant_schedule_with_warmup)
    tensors["schedule/linear"] = factors(transformers.get_linear_schedule_with_warmup, num_training_steps=50)
    tensors["schedule/cosine"] = factors(transformers.get_cosine_schedule_with_warmup, num_training_steps=50)
    clipped = {name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for name, shape in SHAPES.items()}
    for name, parameter in clipped.items():
        parameter.grad = gradients[name][0].double()
    tensors["clip/norm"] = torch.nn.utils.clip_grad_norm_(list(clipped.values()), 0.5).reshape(1)
    tensors.update({f"clip/{name}": parameter.grad for name, parameter in clipped.items()})
    tensors.update({f"average/{name}": averages(start[name], tensors[f"adamw/{name}"]) for name in SHAPES})
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FILE, {"made_by": "scripts/goldens optimizers", **versions})
    print(f"{FILE.name}: {len(tensors)} tensors, {FILE.stat().st_size} bytes")


main()
