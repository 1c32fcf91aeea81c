"""Write tests/golden/pytorch: files written by torch.save, and their tensors as safetensors.

Every file has the same tensors as `tensors.safetensors`: in the current archive format, in the format before
PyTorch 1.6, among other objects of a training program, with the names of torch.nn.DataParallel, and with a
later pickle protocol.
"""

from argparse import Namespace
from collections import OrderedDict

import torch
from safetensors.torch import save_file

from lib import GOLDEN

folder = GOLDEN / "pytorch"
folder.mkdir(parents=True, exist_ok=True)
generator = torch.Generator().manual_seed(0)
wide = torch.randn(6, 40, generator=generator)
block = torch.randn(2, 3, 4, 5, generator=generator)
tensors = OrderedDict(
    {
        "plain.weight": torch.randn(3, 5, generator=generator),
        "half.weight": torch.randn(4, 3, generator=generator).half(),
        "bfloat.bias": torch.randn(7, generator=generator).bfloat16(),
        "double.scale": torch.randn((), generator=generator).double(),
        "steps": torch.tensor(123456789012),
        "mask": torch.tensor([True, False, True]),
        "codes": torch.tensor([-128, 127, 3], dtype=torch.int8),
        "narrow": torch.tensor([0.5, -448.0, 3.25]).to(torch.float8_e4m3fn),
        "parameter": torch.nn.Parameter(torch.randn(2, 2, generator=generator)),
        "tied.first": wide,
        "tied.second": wide,
        "transposed": wide.t(),
        "part": wide[1:5],
        "columns": wide[:, 3:11:2],
        "column": wide[:, 7],
        "mixed": block.permute(2, 0, 3, 1),
        "empty": torch.zeros(0, 4),
    }
)
optimizer = torch.optim.AdamW([tensors["parameter"]])
tensors["parameter"].sum().backward()
optimizer.step()
save_file({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}, folder / "tensors.safetensors")
torch.save(tensors, folder / "archive.pt")
torch.save(tensors, folder / "legacy.pt", _use_new_zipfile_serialization=False)
torch.save(tensors, folder / "protocol.pt", pickle_protocol=4)
torch.save({f"module.{name}": tensor for name, tensor in tensors.items()}, folder / "parallel.pt")
torch.save({"epoch": 3, "state_dict": tensors, "optimizer": optimizer.state_dict(), "arguments": Namespace(rate=0.1)}, folder / "training.pt")
torch.save(torch.nn.Linear(2, 2), folder / "object.pt")
torch.save({"weight": torch.eye(3).to_sparse()}, folder / "sparse.pt")
torch.save({"weight": torch.ones(1, 1).expand(1000, 1000)}, folder / "repeated.pt")
