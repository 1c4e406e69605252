"""A pytest plugin that computes on the CPU what CUDA kernels would, over the emulated runtime of ``cudart.cpp``.

Device memory is host memory there. Each operator that torch has a CUDA kernel for is handed to the CPU's, on tensors
over the same bytes, as a piece of work of the current stream: run when the stream gets there, or recorded by a capture
and run by each replay. Views, allocation, random numbers and reads by the host stay torch's own.
"""

import atexit
import ctypes
import functools
import itertools
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any, cast

import torch
import torchgen
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

CUDA, CPU, META = torch.device("cuda", 0), torch.device("cpu"), torch.device("meta")
RUNTIME = ctypes.CDLL("libcudart.so.13")
RUNTIME.cudaLaunchHostFunc.argtypes = [ctypes.c_void_p] * 3
RUNTIME.emulator_is_capturing.argtypes = [ctypes.c_void_p]
RUNTIME.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]
RUNTIME.cudaPointerGetAttributes.argtypes = [ctypes.c_void_p] * 2
RUNTIME.cudaGetErrorString.restype = ctypes.c_char_p
DEVICE_ASSERT = 710
OVERLAP = (
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
    "Please clone() the tensor before performing the operation."
)
PAGEABLE = (
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned. "
    "Please use tensor.pin_memory() or allocate the tensor with pin_memory=True."
)
TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
INDICES = "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
MASKS = (torch.bool, torch.uint8)
# Operators that copy what is on the host to the device, where others take a number of 0 dimensions as it is.
COPYING = ("index", "_index_put_impl_", "where", "_foreach_copy_")
# Arguments that may not even be numbers on the host, of operators that take those elsewhere.
NEVER_ON_HOST = {
    "addcdiv": ("tensor1", "tensor2"),
    "addcdiv_": ("tensor1", "tensor2"),
    "masked_fill_": ("mask",),
}
# Operators with one of these in their name stay torch's: they launch nothing, draw random numbers, or are not emulated.
KEPT = (
    *("rand", "normal", "uniform", "bernoulli", "dropout", "exponential", "cauchy", "geometric", "poisson"),
    *("empty", "resize", "set_", "view", "as_strided", "alias", "record_stream", "_local_scalar_dense", "pin"),
    *("_copy_from", "cudnn", "miopen", "nested", "sparse", "quantize", "_fused_adam", "_flash", "_efficient_attention"),
    *("_scaled_dot_product", "_fused_sdp", "nccl", "_transformer", "_native_multi", "mkldnn", "fbgemm", "coalesce"),
    *("_values", "_indices", "crow", "storage", "data", "thnn", "_triton", "_int_mm", "_convert_weight", "_dyn_quant"),
)
UNSEEN = """
def unseen(*args, **kwargs):
    profiler = getprofile()
    if type(profiler) not in written:
        return kernel(*args, **kwargs)
    setprofile(None)
    try:
        return kernel(*args, **kwargs)
    finally:
        setprofile(profiler)
"""
_work: dict[int, tuple[Callable[[], object], bool]] = {}
_numbers = itertools.count(1)
_rehearsed: set[Any] = set()
_status = [0]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _run(number: int) -> None:
    """Run a piece of work, on the thread of its stream; an error there is a device-side assert."""
    work, once = _work[number]
    if once:
        del _work[number]
    try:
        with torch.inference_mode(True):
            work()
    except Exception:
        traceback.print_exc()
        RUNTIME.emulator_lose_device(DEVICE_ASSERT)


def submit(work: Callable[[], object]) -> None:
    """Put work at the end of the current stream, or into the graph that captures it."""
    stream, number = torch.cuda.current_stream().cuda_stream, next(_numbers)
    _work[number] = (work, not RUNTIME.emulator_is_capturing(stream))
    check(RUNTIME.cudaLaunchHostFunc(stream, ctypes.cast(_run, ctypes.c_void_p), number))


def synchronize() -> None:
    """Wait for the current stream, which spoils a capture."""
    check(RUNTIME.cudaStreamSynchronize(torch.cuda.current_stream().cuda_stream))


def check(code: int) -> None:
    """Raise what torch raises for an error of the runtime."""
    if code:
        RUNTIME.cudaGetLastError()
        error = torch.AcceleratorError(f"CUDA error: {RUNTIME.cudaGetErrorString(code).decode()}\n(emulated)")
        error.error_code = code
        raise error


def host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the same bytes as a CUDA one."""
    with torch.inference_mode(False), torch.no_grad():
        storage = tensor.untyped_storage()
        if not storage.data_ptr() or not storage.nbytes():
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CPU)
        over = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
        made = torch.empty(0, dtype=tensor.dtype, device=CPU)
        made = made.set_(over, tensor.storage_offset(), tensor.shape, tensor.stride())
        made = torch._conj(made) if tensor.is_conj() else made
        return torch._neg_view(made) if tensor.is_neg() else made


def host_argument(value: Any) -> Any:
    """An argument as the CPU's kernel is to have it, whenever it runs."""
    if isinstance(value, Tensor):
        return host(value) if value.is_cuda else value.detach().clone()
    return CPU if isinstance(value, torch.device) else value


def meta_argument(value: Any) -> Any:
    """An argument without memory."""
    if isinstance(value, Tensor):
        if not value.is_cuda and not value.dim():
            return value.detach().clone()
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
    return META if isinstance(value, torch.device) else value


def blank_argument(value: Any) -> Any:
    """An argument of the same type and shape, all zeros."""
    if isinstance(value, Tensor) and value.is_cuda:
        return torch.zeros(value.shape, dtype=value.dtype, device=CPU)
    return host_argument(value)


def refuse_overlap(value: Any) -> None:
    """Raise what torch raises before it writes to an expanded tensor."""
    if not isinstance(value, Tensor) or not value.numel():
        return
    if any(extent > 1 and not stride for extent, stride in zip(value.shape, value.stride(), strict=True)):
        raise RuntimeError(OVERLAP)


def is_pinned(tensor: Tensor) -> bool:
    """Whether the runtime allocated a CPU tensor's memory."""
    attributes = (ctypes.c_int * 64)()
    RUNTIME.cudaPointerGetAttributes(attributes, tensor.untyped_storage().data_ptr())
    return attributes[0] == 1


def is_capturing() -> bool:
    """Whether the current stream is being captured."""
    return bool(RUNTIME.emulator_is_capturing(torch.cuda.current_stream().cuda_stream))


@functools.cache
def unchecked() -> frozenset[str]:
    """Names of the operators that torch lets have tensors of several devices: their kernels look for themselves."""
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    operators = re.split(r"^- func: ", text, flags=re.MULTILINE)
    return frozenset(one.partition("(")[0] for one in operators if "\n  device_check: NoCheck" in one)


def on_host(value: Any) -> bool:
    """Whether a value is a CPU tensor."""
    return isinstance(value, Tensor) and value.device.type == "cpu"


def copy_from_host(values: list[Tensor]) -> None:
    """What a capture says to a copy that the host waits for."""
    values = [value for value in values if value.numel()]
    if values and is_capturing():
        if not all(is_pinned(value) for value in values):
            raise RuntimeError(PAGEABLE)
        synchronize()


def fills_mask(given: dict[str, Any]) -> bool:
    """Whether a write by indices is one of a number where one mask is true, which torch fills."""
    indices = [index for index in given["indices"] if index is not None]
    is_number = on_host(given["values"]) and given["values"].numel() == 1 and not given.get("accumulate")
    return is_number and len(indices) == 1 and indices[0].is_cuda and indices[0].dtype in MASKS


class Emulated:
    """The CUDA kernel of one operator."""

    def __init__(self, call: Callable[..., Any], schema: Any, is_out: bool) -> None:
        self.call = call
        self.schema = schema
        self.is_out = is_out
        self.names = [argument.name for argument in schema.arguments]
        self.writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.tensors = [i for i, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"]
        self.gives_tensors = all("Tensor" in str(result.type) for result in schema.returns)
        self.name = schema.name.removeprefix("aten::")
        self.is_checked = f"{self.name}.{schema.overload_name}".rstrip(".") not in unchecked()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(i < len(args) and isinstance(args[i], (int, float, complex)) for i in self.tensors):
            return by_number(self.schema.name, self.schema.overload_name)(*args, **kwargs)
        if any(on_host(one) for value in (*args, *kwargs.values()) for one in each(value)):
            self.refuse_host(dict(zip(self.names, args, strict=False)) | kwargs)
        return self.write(args, kwargs) if self.writes else self.compute(args, kwargs)

    def refuse_host(self, given: dict[str, Any]) -> None:
        """Raise what torch raises of CPU tensors among the arguments of a CUDA kernel."""
        tensors = [(name, one) for name, value in given.items() for one in each(value) if isinstance(one, Tensor)]
        here = [(name, one) for name, one in tensors if on_host(one)]
        if self.name in COPYING:
            if "indices" in given:
                if on_host(given["self"]):
                    raise RuntimeError(INDICES)
                if "values" in given and fills_mask(given):
                    return
                # A mask of the host's is looked at there, and goes to the device by pinned memory.
                here = [(name, one) for name, one in here if one.dtype not in MASKS or name != "indices"]
            if any(one.dim() for name, one in here if self.name == "where" or name == "values"):
                raise RuntimeError(TWO_DEVICES)
            copy_from_host([one for _, one in here])
        elif self.is_checked:
            first = tensors[0][1].device
            for name, one in tensors:
                if one.device != first:
                    raise RuntimeError(
                        f"Expected all tensors to be on the same device, but got {name} is on {one.device}, different "
                        f"from other tensors on {first} (when checking argument in method wrapper_CUDA_{self.name})"
                    )
        elif not self.name.startswith(("_foreach", "_fused")):
            never = (*self.writes, *NEVER_ON_HOST.get(self.name, ()))
            if any(one.dim() or name in never for name, one in here):
                raise RuntimeError(TWO_DEVICES)
            if len(here) > 1:
                raise RuntimeError("Trying to pass too many CPU scalars to non-CPU kernel!")

    def write(self, args: Any, kwargs: Any) -> Any:
        """In place, or into the tensors of ``out``."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        for name in self.writes:
            refuse_overlap(given[name])
        if self.is_out:
            self.resize_outs(args, kwargs, given)
        self.rehearse(args, kwargs)
        there, named = tree_map(host_argument, (args, kwargs))
        submit(lambda: self.call(*there, **named))
        results = [given[name] for name in self.writes][: len(self.schema.returns)]
        return tuple(results) if len(results) > 1 else next(iter(results), None)

    def resize_outs(self, args: Any, kwargs: Any, given: dict[str, Any]) -> None:
        """Give the tensors of ``out`` the shapes of the results."""
        shapes, named = tree_map(meta_argument, (args, kwargs))
        try:
            self.call(*shapes, **named)
        except (NotImplementedError, RuntimeError):
            return
        wanted = dict(zip(self.names, shapes, strict=False)) | named
        for name in self.writes:
            if isinstance(given[name], Tensor) and given[name].shape != wanted[name].shape:
                given[name].resize_(wanted[name].shape)

    def compute(self, args: Any, kwargs: Any) -> Any:
        """New tensors, of the shapes that the meta device gives; where it gives none the host must see the values."""
        shapes, named = tree_map(meta_argument, (args, kwargs))
        try:
            meta = self.call(*shapes, **named) if self.gives_tensors else None
        except Exception:
            meta = None
        if meta is None:
            return self.compute_now(args, kwargs)
        self.rehearse(args, kwargs)
        leaves, spec = tree_flatten(meta)
        outs = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=CUDA) for t in leaves]
        targets = [host(out) for out in outs]
        there, named = tree_map(host_argument, (args, kwargs))

        def work() -> None:
            for target, result in zip(targets, tree_flatten(self.call(*there, **named))[0], strict=True):
                if target.numel():
                    target.copy_(result)

        submit(work)
        return tree_unflatten(outs, spec)

    def compute_now(self, args: Any, kwargs: Any) -> Any:
        """Wait, and compute on the host."""
        synchronize()
        there, named = tree_map(host_argument, (args, kwargs))
        with torch.inference_mode(False), torch.no_grad():
            result = self.call(*there, **named)
        return tree_map(lambda value: to_device(value) if isinstance(value, Tensor) else value, result)

    def rehearse(self, args: Any, kwargs: Any) -> None:
        """Raise at once what the operator says of types and shapes: on a device only values are looked at later."""
        leaves = tree_flatten((args, kwargs))[0]
        if "index_put" in self.schema.name and any(isinstance(v, Tensor) and v.dtype is torch.bool for v in leaves):
            return  # how many values fit is the mask's to say
        key = (self.schema.name, *((v.dtype, v.shape) if isinstance(v, Tensor) else repr(v) for v in leaves))
        if key in _rehearsed:
            return
        blank, named = tree_map(blank_argument, (args, kwargs))
        try:
            with torch.inference_mode(True):
                self.call(*blank, **named)
        except RuntimeError as error:
            if "out of" in str(error) or "ZeroDivision" in str(error):  # it is the zeros that do not fit
                return
            raise
        except Exception:
            return
        _rehearsed.add(key)


def each(value: Any) -> Iterator[Any]:
    """A value, or the members of a list of them."""
    if isinstance(value, (list, tuple)):
        yield from value
    else:
        yield value


@functools.cache
def by_number(name: str, overload: str) -> Emulated:
    """The operator for a number where it takes a tensor, which torch makes of numbers in Python."""
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    made = Emulated(packet, getattr(packet, overload or "default")._schema, overload.endswith("out"))
    made.tensors = []
    return made


def to_device(value: Tensor) -> Tensor:
    """A result of the host's as a CUDA tensor."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=CUDA)
    if value.numel():
        host(made).copy_(value)
    return made


def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """``aten::copy_``, with torch's rules for copies between devices."""
    refuse_overlap(target)
    meta_argument(target).copy_(meta_argument(source))
    if target.is_cuda and source.is_cuda:
        there, here = host(target), host(source)
        submit(lambda: there.copy_(here))
        return target
    other = source if target.is_cuda else target
    pinned = is_pinned(other)
    if not pinned and other.numel() and is_capturing():
        raise RuntimeError(PAGEABLE)
    there = host(target) if target.is_cuda else target
    here = host(source) if source.is_cuda else source if pinned else source.detach().clone()
    submit(lambda: there.copy_(here))
    if not non_blocking or not (pinned or target.is_cuda):
        synchronize()
    return target


def unseen(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel as one of torch's, of which a profiler written in Python sees nothing."""
    table: dict[str, Any] = {"kernel": kernel, "written": (FunctionType, MethodType), "__file__": torch.__file__}
    # By a partial, of which a profiler hears nothing: code that is heard to take the profiler away gets no graph.
    table |= {"getprofile": sys.getprofile, "setprofile": functools.partial(sys.setprofile)}
    exec(compile(UNSEEN, "<kernel>", "exec"), table)
    return cast("Callable[..., Any]", table["unseen"])


def install() -> torch.library.Library:
    """Take the place of torch's CUDA kernels."""
    torch.cuda.init()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"):
        name, _, overload = full.removeprefix("aten::").partition(".")
        if not full.startswith("aten::") or (name != "is_set_to" and any(word in name for word in KEPT)):
            continue
        op = getattr(getattr(torch.ops.aten, name), overload or "default")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)
        if not is_view and any("Tensor" in str(argument.type) for argument in op._schema.arguments):
            is_out = overload.endswith("out") or any(argument.is_out for argument in op._schema.arguments)
            library.impl(full.removeprefix("aten::"), unseen(Emulated(op, op._schema, is_out)))
    library.impl("copy_", unseen(copy_))
    return library


def pytest_sessionfinish(session: object, exitstatus: int) -> None:
    """Note how the session ended."""
    _status[0] = int(exitstatus)


@atexit.register
def _leave() -> None:
    """End before Python takes itself apart, while the streams' threads may still want it."""
    RUNTIME.cudaDeviceSynchronize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_status[0])


sys.setswitchinterval(2e-4)  # the streams' threads wait for Python's lock
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _library = install()
