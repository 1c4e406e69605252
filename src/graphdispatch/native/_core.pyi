import torch

def bind(
    library: str,
    Tensor: type[torch.Tensor],  # noqa: N803
    Parameter: type[torch.nn.Parameter],  # noqa: N803
    samples: tuple[torch.Tensor, ...],
    /,
) -> None: ...
