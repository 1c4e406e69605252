"""What an adaptive policy learnt, as validated plain data."""

import reprlib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ..errors import ConfigError
from ..modes import DispatchMode
from .estimates import CellState

__all__ = ["PolicyState", "parse_state"]


class _CurveState(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    mode: Literal["eager", "cudagraph", "piecewise"]
    prefill: bool
    cells: list[CellState]


class _PlaceState(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    prefill: bool
    graph_size: int = Field(ge=1)
    bucket: int = Field(ge=1)
    order: list[Literal["eager", "cudagraph", "piecewise"]]
    seen: int = Field(ge=0)

    @field_validator("order")
    @classmethod
    def _each_mode_once(cls, order: list[str]) -> list[str]:
        if sorted(order) != sorted(mode.value for mode in DispatchMode if mode is not DispatchMode.HYBRID):
            raise ValueError("expected each of eager, cudagraph and piecewise once")
        return order


class PolicyState(BaseModel):
    """The whole learnt state, as it is saved."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    version: Literal[1]
    history_size: int
    sizes: list[int] | None
    limits: list[int] = Field(min_length=2, max_length=2)
    exploration: float
    window: int
    records: int = Field(ge=0)
    spent_ms: float = Field(ge=0)
    explored_ms: float = Field(ge=0)
    capture_ms: float | None = Field(ge=0)
    curves: list[_CurveState]
    places: list[_PlaceState]


def parse_state(text: str | bytes) -> PolicyState:
    """The state in JSON ``text``. Raises ``ConfigError`` that names the first value at fault."""
    try:
        return PolicyState.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the whole"
        raise ConfigError(
            f"the saved policy is not valid at {where}: {first['msg']}, got {reprlib.repr(first['input'])}; "
            "delete it to start afresh"
        ) from None
