"""``Profile``: what a serving process learnt of its traffic and its graphs, kept for the next start."""

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from ..sizes import check_sizes
from .cost import CostModel
from .storage import read_document, write_document
from .traffic import LARGEST_STEP
from .workload import Workload

__all__ = ["Profile"]

_Size = Annotated[int, Field(ge=1, le=LARGEST_STEP)]
_Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _increasing(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return check_sizes(sizes, "sizes")


class Profile(BaseModel):
    """The sizes in use, the traffic that led to them, and what graphs cost. Immutable plain data.

    ``graphed(..., sizes=Path("profile.json"))`` starts with its sizes, ``prewarm`` captures them, and
    ``AutoPlan(step, profile=Profile.load("profile.json"))`` goes on from its traffic.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal["graphdispatch.profile"]
    version: Literal[1]
    sizes: Annotated[tuple[_Size, ...], AfterValidator(_increasing)]
    """The capture sizes, strictly increasing."""
    rows: Annotated[tuple[_Size, ...], AfterValidator(_increasing)]
    """The numbers of rows that were seen, strictly increasing."""
    weights: tuple[_Weight, ...]
    """The weight of the steps of each of ``rows``, older ones weighing less."""
    cost: CostModel
    """What steps and captures cost, measured as far as it was."""

    @model_validator(mode="after")
    def _one_weight_for_each(self) -> Self:
        if len(self.rows) != len(self.weights):
            raise ValueError(f"expected a weight for each of {len(self.rows)} rows, got {len(self.weights)}")
        return self

    @classmethod
    def of(cls, sizes: tuple[int, ...], traffic: Mapping[int, float], cost: CostModel) -> Self:
        """The profile of capture sizes, the weight of steps by number of rows, and costs."""
        rows, weights = zip(*sorted(traffic.items()), strict=True)
        return cls(format="graphdispatch.profile", version=1, sizes=sizes, rows=rows, weights=weights, cost=cost)

    @property
    def traffic(self) -> dict[int, float]:
        """The weight of steps by number of rows."""
        return dict(zip(self.rows, self.weights, strict=True))

    @property
    def workload(self) -> Workload:
        """The traffic as a workload, for ``plan_capture_sizes``."""
        return Workload.from_histogram(self.traffic)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile to ``path`` as JSON, replacing a file there in one step."""
        write_document(Path(path), self)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """The profile that was saved to ``path``. Raises ``ConfigError`` for a file that holds none."""
        return read_document(Path(path), cls)

    def __repr__(self) -> str:
        return (
            f"<Profile {len(self.sizes)} sizes up to {self.sizes[-1]}, {len(self.rows)} numbers of rows seen, "
            f"{self.cost.source} costs>"
        )
