"""``graphdispatch doctor``: what is installed, what serves here, what is wrong. It needs neither torch nor typer."""

import platform
import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from typing import NamedTuple

__all__ = ["Finding", "doctor", "examine"]


class Finding(NamedTuple):
    """One line of the report: what was looked at, what was found, and what to do if that is wrong."""

    name: str
    found: str
    remedy: str = ""


def doctor() -> int:
    """Say what is installed, what serves here, and what is wrong. Exits with 1 if something is."""
    findings = list(examine())
    width = max(len(finding.name) for finding in findings)
    for name, found, _ in findings:
        print(f"{name:{width}}  {found}")
    wrong = [finding for finding in findings if finding.remedy]
    for name, _, remedy in wrong:
        print(f"wrong: {name}: {remedy}")
    if not wrong:
        print("all is well")
    return 1 if wrong else 0


def examine() -> Iterator[Finding]:
    """Look at Python, the packages, the extras, the devices and the native parts; in this order."""
    yield Finding("graphdispatch", version("graphdispatch"))
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    needs = [_parsed(line) for line in requires("graphdispatch") or ()]
    for package, least, extra in needs:
        if not extra:
            yield _required(package, least)
    optional: dict[str, list[str]] = {}
    for package, _, extra in needs:
        if extra and package != "graphdispatch" and extra not in ("test", "dev", "docs"):
            optional.setdefault(extra, []).append(package)
    for extra, packages in optional.items():
        missing = [package for package in packages if _version(package) is None]
        told = ", ".join(f"{package} {_version(package)}" for package in packages if package not in missing)
        yield Finding(f"extra {extra}", told if not missing else f"not installed: pip install 'graphdispatch[{extra}]'")
    yield from _torch_parts()


def _required(package: str, least: str) -> Finding:
    found = _version(package)
    if found is None:
        return Finding(package, "not installed", f"install it: pip install '{package}{least and '>=' + least}'")
    if least and _release(found) < _release(least):
        return Finding(
            package, found, f"{least} is the oldest that is served; pip install --upgrade '{package}>={least}'"
        )
    return Finding(package, found)


def _torch_parts() -> Iterator[Finding]:
    """What can only be told with torch: devices, backends, the native parts."""
    try:
        import torch

        from .. import backends
        from ..native.bound import ASKED, CORE, WHY_NO_CORE
        from ..native.tape import TAPE
    except Exception as error:  # a broken installation raises anything
        if _version("torch") is not None:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            yield Finding("backends", f"cannot be loaded: {text}", "mend or reinstall what the error names")
        return
    yield Finding("backends", ", ".join(backends.available_backends()))
    if torch.version.cuda is None:
        yield Finding("cuda", "this torch is built without CUDA; graphs run on the CPU")
    elif "cuda" not in backends.available_backends():
        yield Finding("cuda", f"torch is built for CUDA {torch.version.cuda} and sees no GPU; graphs run on the CPU")
    else:
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        yield Finding("cuda", f"{torch.version.cuda}: {names}")
    asked = f"; it asks Python for {', '.join(ASKED)}" if ASKED else ""
    yield Finding("native core", f"in use{asked}" if CORE is not None else f"Python serves, since {WHY_NO_CORE}")
    TAPE.wait()
    yield Finding("cpu tape", "native" if TAPE.module is not None else f"Python's loop, since {TAPE.why_not}")


def _parsed(requirement: str) -> tuple[str, str, str]:
    """Name, oldest version and extra of a requirement of this package, which has no other parts."""
    name = re.match(r"[\w.-]+", requirement)
    least, extra = re.search(r">=\s*([\d.]+)", requirement), re.search(r"extra == ['\"]([\w-]+)", requirement)
    return name[0] if name else requirement, least[1] if least else "", extra[1] if extra else ""


def _version(package: str) -> str | None:
    try:
        return metadata(package)["Version"]
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])
