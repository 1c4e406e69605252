"""What of the CUDA backend can be checked on any machine: the reading of errors, and silence without a device."""

import subprocess
import sys

import pytest
import torch

from graphdispatch import Reason
from graphdispatch.backends.cuda import CUDABackend
from graphdispatch.backends.cuda.errors import diagnose
from graphdispatch.errors import BackendError, CaptureError


@pytest.mark.parametrize(
    ("text", "reason", "remedy"),
    [
        ("CUDA error: operation not permitted when stream is capturing", Reason.CAPTURE_UNSAFE, "item"),
        ("CUDA error: operation failed due to a previous error during capture", Reason.CAPTURE_UNSAFE, "swallowed"),
        (
            "info.status != cudaStreamCaptureStatusInvalidated INTERNAL ASSERT FAILED. Invalid stream capture status",
            Reason.CAPTURE_UNSAFE,
            "swallowed",
        ),
        ("CUDA error: capturing stream has unjoined work", Reason.CAPTURE_UNSAFE, "side stream"),
        (
            "CUDA error: operation would make the legacy stream depend on a capturing blocking stream",
            Reason.CAPTURE_UNSAFE,
            "legacy default stream",
        ),
        (
            "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the CPU tensor is pinned.",
            Reason.CAPTURE_UNSAFE,
            "pin it",
        ),
        (
            "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture",
            Reason.CAPTURE_UNSAFE,
            "refuses to be captured",
        ),
        ("Offset increment outside graph capture encountered unexpectedly.", Reason.CAPTURE_UNSAFE, "generator"),
        ("CUDA error: out of memory", Reason.OUT_OF_MEMORY, "fewer or smaller"),
        ("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)", Reason.OUT_OF_MEMORY, "fewer or smaller"),
        ("CUDA error: an illegal memory access was encountered", Reason.CAPTURE_FAILED, "restart"),
        ("the sizes of two tensors differ", Reason.CAPTURE_FAILED, "original error"),
    ],
)
def test_an_error_text_names_the_reason_and_the_remedy(text: str, reason: Reason, remedy: str) -> None:
    """Each kind of failed capture is told apart by what CUDA and torch say."""
    diagnosis = diagnose(RuntimeError(text))
    assert diagnosis.reason is reason
    assert remedy in diagnosis.remedy


def test_an_error_of_the_users_own_is_not_read() -> None:
    """Only CUDA's errors are classified by their text."""
    assert diagnose(ValueError("out of memory of earlier requests")).reason is Reason.CAPTURE_FAILED


def test_a_classified_error_keeps_its_reason() -> None:
    """The reason that a ``CaptureError`` carries is not guessed again."""
    backend = CUDABackend(torch.device("cuda", 0))
    assert backend.classify_error(CaptureError("out of memory", Reason.INSIDE_CAPTURE)) is Reason.INSIDE_CAPTURE


def test_out_of_memory_is_recognised() -> None:
    """torch's own error and the driver's text both count."""
    backend = CUDABackend(torch.device("cuda", 0))
    assert backend.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert backend.is_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert not backend.is_out_of_memory(RuntimeError("CUDA error: misaligned address"))


def test_a_device_without_an_index_is_refused() -> None:
    """One backend object is one GPU."""
    with pytest.raises(BackendError, match="must have an index"):
        CUDABackend(torch.device("cuda"))


def test_a_pool_of_another_device_is_refused() -> None:
    """A capture goes into a pool of its own device only."""
    first, second = (CUDABackend(torch.device("cuda", index)) for index in range(2))
    with pytest.raises(BackendError, match="pool must come from the backend of cuda:1"):
        second.begin_capture(first.make_pool())


def test_asking_does_not_touch_cuda() -> None:
    """Importing, making a backend and a pool, and the questions that never raise leave CUDA uninitialised."""
    code = (
        "import torch\n"
        "from graphdispatch.backends.cuda import CUDABackend\n"
        "backend = CUDABackend(torch.device('cuda', 0))\n"
        "backend.make_pool(), CUDABackend.is_available(), backend.is_capturing()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_tensor_on_the_host_is_its_own_weak_reference() -> None:
    """Where no alias can be made, the tensor itself comes back."""
    tensor = torch.ones(2)
    assert CUDABackend(torch.device("cuda", 0)).weak_reference(tensor) is tensor
