"""The subclass that a served model gets: it hooks in where transformers prepares caches and calls the model.

Hooks on the model itself would be attributes, and graphs would take each for a change of the model.
"""

import copyreg
import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any

from .slots import NotServed

if TYPE_CHECKING:
    from .generation import GraphedGeneration, Request


class Hooks:
    """What the class of a served model does before that model's own methods. Other objects of the class, if somebody
    makes one, behave as the original."""

    _graphed_by: Any  # a GraphedGeneration; transformers evaluates the annotations of a model's class

    @property
    def _request(self) -> "Request | None":
        owner: GraphedGeneration = self._graphed_by
        return owner.request if self is owner.model else None

    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As the model's own, with its decode steps served by graphs."""
        owner, plain = self._graphed_by, super().generate  # type: ignore[misc]
        if self is not owner.model:
            return plain(*args, **kwargs)
        given = inspect.signature(plain).bind_partial(*args, **kwargs).arguments
        try:
            with owner.begin(NotServed.CUSTOM if given.get("custom_generate") is not None else None) as request:
                return request.released(plain(*args, **kwargs))
        except Exception as error:
            if given.get("streamer") is not None or not request.may_begin_again:
                raise
            said = f"{type(error).__name__}: {error}"
        with owner.begin_again():
            result = plain(*args, **kwargs)
        request.slot.error = said  # without the slot's cache it raises nothing, so the slot serves no more
        return result

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As the model's own; a decode step of a request that is served goes to its graph."""
        request = self._request
        return super().__call__(*args, **kwargs) if request is None else request.call(args, kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        request, plain = self._request, super()._prepare_cache_for_generation  # type: ignore[misc]
        given = inspect.signature(plain).bind(*args, **kwargs).arguments
        config = given["generation_config"]
        if request is None or request.slot is not None or self._graphed_by.assign(request, config, given) is None:
            return plain(*args, **kwargs)
        given_cache, config.cache_implementation = config.cache_implementation, "static"
        try:
            return plain(*args, **kwargs)
        finally:
            config.cache_implementation = given_cache

    def _prepare_static_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = self._request
        if request is None or request.slot is None:
            return super()._prepare_static_cache(*args, **kwargs)  # type: ignore[misc]
        return request.slot.cache

    def _valid_auto_compile_criteria(self: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        request = self._request
        if request is not None and request.uses(model_kwargs):
            return False  # graphs serve it
        return bool(super()._valid_auto_compile_criteria(model_kwargs, generation_config))  # type: ignore[misc]

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """Copies and pickles are of the original class, since nobody serves them."""
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *rest = reduced
        original = type(self).__mro__[2]
        return copyreg._reconstructor, (original, object, None), *rest  # type: ignore[attr-defined]


def hooked_class(original: Any, owner: "GraphedGeneration") -> type:
    """A subclass of a model's class, of the same name, by which ``owner`` serves one model."""
    space = {
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_graphed_by": owner,
        "generate": wraps(original.generate)(Hooks.generate),
    }
    return type(original.__name__, (Hooks, original), space)
