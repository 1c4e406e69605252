"""The kernels that copy inputs and outputs of hits, made by the C++ compiler, and launched by a driver of the tests."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphdispatch.backends import cuda
from graphdispatch.backends.accelerator import outlet
from graphdispatch.backends.base import CopyKernel
from graphdispatch.backends.cuda import CUDABackend

from ..copy_kernels import LAUNCH, Input, Inputs, Place

HERE = Path(__file__).resolve().parent
FUNCTIONS = {"copy_inputs": 4096, "give_outputs": 8192}


def switched_on(monkeypatch: pytest.MonkeyPatch) -> CUDABackend:
    """A backend of the device that torch would find, with the switch on and a compiler that gives a function."""
    compiled: list[str] = []

    def compile_kernel(source: str, name: str) -> SimpleNamespace:
        compiled.append(source)
        assert f"void {name}(" in source
        return SimpleNamespace(func=ctypes.c_void_p(FUNCTIONS[name]))

    monkeypatch.setenv("GRAPHDISPATCH_COPY_KERNEL", "1")
    monkeypatch.setattr(torch.cuda, "_compile_kernel", compile_kernel, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return CUDABackend(torch.device("cuda", 0))


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CopyKernel]:
    """What the CUDA backend finds where ``libcuda.so.1`` is the driver of the tests."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("the driver of the tests needs g++")
    made = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    flags = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([compiler, *flags, str(HERE / "driver.cpp"), "-o", str(made)], check=True)
    ctypes.CDLL(str(made))  # from now on the name is this library's
    with pytest.MonkeyPatch.context() as monkeypatch:
        backend = switched_on(monkeypatch)
        backend.make_pool()
        assert backend.copy_kernel is not None
        yield backend.copy_kernel


def test_it_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, and torch copies."""
    backend = switched_on(monkeypatch)
    monkeypatch.delenv("GRAPHDISPATCH_COPY_KERNEL")
    backend.make_pool()
    assert backend.copy_kernel is None


def test_where_it_cannot_be_compiled_torch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a warning that says why."""
    backend = switched_on(monkeypatch)

    def fail(source: str, name: str) -> None:
        raise OSError("Could not find any NVRTC library")

    monkeypatch.setattr(torch.cuda, "_compile_kernel", fail)
    with pytest.warns(UserWarning, match="torch copies the inputs of graphs on cuda:0, .*any NVRTC library"):
        backend.make_pool()
    assert backend.copy_kernel is None


def test_it_is_of_the_context_that_it_was_compiled_on(kernel: CopyKernel) -> None:
    """The core compares that of each thread."""
    context = ctypes.c_void_p()
    assert ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(kernel.current)(ctypes.addressof(context)) == 0
    assert (kernel.context, kernel.function) == (context.value, FUNCTIONS["copy_inputs"])


WIDTH = st.sampled_from((1, 2, 3, 4, 6, 8, 12, 16, 40, 48, 1000))


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 5), WIDTH, st.booleans(), *[st.integers(0, 20)] * 2),
        min_size=1,
        max_size=16,
    ),
    st.integers(1, 3),
)
def test_it_puts_bytes_and_padding_where_they_belong(
    kernel: CopyKernel, forms: list[tuple[int, int, int, bool, int, int]], columns: int
) -> None:
    """Whatever the lengths and addresses, by however many blocks; and nothing beside."""
    inputs, memory, wanted = Inputs(), [], []
    for place, (rows, padding, width, repeats, at, to) in enumerate(forms):
        real = bytes((place + 7 * byte) % 251 for byte in range((rows + repeats) * width))
        fill = bytes(range(100, 116))
        places = range(len(real), len(real) + padding * width)
        behind = real[len(real) - width :] * padding if repeats else bytes(fill[one % 16] for one in places)
        source = ctypes.create_string_buffer(b"." * at + real, at + len(real) + 1)
        target = ctypes.create_string_buffer(b"." * (to + len(real + behind) + 9))
        wanted.append(b"." * to + real + behind + b"." * 9 + b"\0")
        memory.append((source, target))
        addresses = ctypes.addressof(source) + at, ctypes.addressof(target) + to
        inputs.each[place] = Input(
            (ctypes.c_ubyte * 16)(*fill), *addresses, len(real), len(real + behind), width * repeats
        )
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(inputs))
    launch = LAUNCH(kernel.launch)
    assert launch(kernel.function, columns, len(forms), 1, 256, 1, 1, 0, None, ctypes.addressof(parameters), None) == 0
    assert [target.raw for _, target in memory] == wanted


@pytest.mark.parametrize("is_wanted", [True, False])
def test_it_notes_where_outputs_are_wanted(kernel: CopyKernel, is_wanted: bool) -> None:
    """On the device, for the last kernel of the graph; nothing where none is."""
    inputs, noted = Inputs(), (Place * 9)(*[Place(1, 1)] * 9)
    inputs.outputs = (Place * 8)(*[Place(64 * place, place) for place in range(8)])
    inputs.wanted = noted if is_wanted else None
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(inputs))
    launch = LAUNCH(kernel.launch)
    assert launch(kernel.function, 3, 2, 1, 256, 1, 1, 0, None, ctypes.addressof(parameters), None) == 0
    there = [(place.address or 0, place.bytes) for place in noted]
    assert there == ([(64 * place, place) for place in range(8)] if is_wanted else [(1, 1)] * 8) + [(1, 1)]


@given(
    st.lists(st.tuples(*[st.integers(0, 3000)] * 2, *[st.integers(0, 20)] * 2), min_size=1, max_size=8),
    st.integers(1, 3),
)
def test_outputs_go_where_they_are_wanted(
    kernel: CopyKernel, forms: list[tuple[int, int, int, int]], columns: int
) -> None:
    """As much of each as is wanted, and no more than there is."""
    places, memory, wanted = (Place * 8 * 2)(), [], []
    for number, (length, wish, at, to) in enumerate(forms):
        real = bytes((number + 7 * byte) % 251 for byte in range(length))
        source = ctypes.create_string_buffer(b"." * at + real, at + length + 1)
        target = ctypes.create_string_buffer(b"." * (to + wish + 9))
        wanted.append((b"." * to + real[:wish]).ljust(to + wish + 9, b".") + b"\0")
        memory.append((source, target))
        places[0][number] = Place(ctypes.addressof(source) + at, length)
        places[1][number] = Place(ctypes.addressof(target) + to, wish)
    address = ctypes.c_void_p(ctypes.addressof(places))
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(address))
    function, launch = FUNCTIONS["give_outputs"], LAUNCH(kernel.launch)
    assert launch(function, columns, len(forms), 1, 256, 1, 1, 0, None, ctypes.addressof(parameters), None) == 0
    assert [target.raw for _, target in memory] == wanted


def test_the_types_are_those_of_the_source() -> None:
    """The structures here are those of the kernels' parameters."""
    assert (ctypes.sizeof(Input), ctypes.sizeof(Inputs)) == (64, 1168)
    assert "kMostInputs = 16, kMostOutputs = 8;" in Path(cuda.__file__).with_name("copies.cu").read_text()
    assert outlet._MOST == 8
