"""Frozen sets of options, whose every bad value is a ``ConfigError``."""

import reprlib
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from .errors import ConfigError

__all__ = ["Settings"]


class Settings(BaseModel):
    """A frozen set of options, given by keyword, whose every bad value is a ``ConfigError``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise self._config_error(error) from None

    @classmethod
    def model_validate(cls, obj: Any, **how: Any) -> Self:
        """An instance from a mapping or an instance, as pydantic's.

        Args:
            obj: The mapping or instance.
            **how: Further arguments of pydantic's method.

        Returns:
            The instance.

        Raises:
            ConfigError: An option is unknown, or its value is wrong.
        """
        try:
            return super().model_validate(obj, **how)
        except ValidationError as error:
            raise cls._config_error(error) from None

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """The object that ``to_dict`` described.

        Args:
            d: The options by name; missing ones take their defaults.

        Returns:
            The object.

        Raises:
            ConfigError: An option is unknown, or its value is wrong.
        """
        return cls.model_validate(dict(d) if isinstance(d, Mapping) else d)

    @classmethod
    def or_default(cls, given: Self | None, name: str) -> Self:
        """``given``, or the defaults for None.

        Args:
            given: An instance, or None.
            name: The name of the argument, for the message.

        Returns:
            The instance.

        Raises:
            ConfigError: ``given`` is something else.
        """
        if given is not None and not isinstance(given, cls):
            raise ConfigError(
                f"{name} must be a {cls.__name__} or None, got {reprlib.repr(given)}; {cls.__name__}.from_dict() makes "
                "one of a mapping"
            )
        return given or cls()

    def to_dict(self) -> dict[str, Any]:
        """All options as plain data that JSON can hold; ``from_dict`` reads it back."""
        return self.model_dump(mode="json")

    def replace(self, **changes: Any) -> Self:
        """A copy with some options changed, validated like a new one.

        Args:
            **changes: The new values by name.

        Returns:
            The copy.

        Raises:
            ConfigError: An option is unknown, or its value is wrong.
        """
        kept = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**(kept | changes))

    @classmethod
    def _config_error(cls, error: ValidationError) -> ConfigError:
        problems = dict.fromkeys(cls._describe(details) for details in error.errors(include_url=False))
        return ConfigError("; ".join(problems))

    @classmethod
    def _describe(cls, details: ErrorDetails) -> str:
        where = ".".join(map(str, details["loc"]))
        if details["type"] == "extra_forbidden":
            return f"option {where!r} is unknown to {cls.__name__}; {cls._remedy(where)}"
        cause = details.get("ctx", {}).get("error")
        if cause is not None:
            # Raised by a validator of ours, which names the option, or by the options nested in this one.
            text = str(cause)
            return text if text.startswith(where) else f"{where}: {text}"
        expected = details["msg"].removeprefix("Input should be ")
        return f"{where or cls.__name__} must be {expected}, got {reprlib.repr(details['input'])}"

    @classmethod
    def _remedy(cls, unknown: str) -> str:
        """What to do about an option that is unknown."""
        return f"expected one of {', '.join(cls.model_fields)}"
