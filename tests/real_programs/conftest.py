"""Prints the versions that the programs ran with."""

from importlib.metadata import PackageNotFoundError, version

LIBRARIES = (
    *("torch", "transformers", "diffusers", "peft", "accelerate", "sentence-transformers", "torchao"),
    *("stable-baselines3", "tensordict", "fastapi", "uvicorn"),
)


def pytest_report_header() -> str:
    """One line with the versions of all libraries that are there."""

    def found(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"no {name}"

    return ", ".join(map(found, LIBRARIES))
