"""The subclass that a served model gets: it hooks in where transformers prepares caches and calls the model.

Hooks on the model itself would be attributes, and graphs would take each for a change of the model.
"""

import copyreg
import inspect
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any

from .slots import NotServed

if TYPE_CHECKING:
    from .generation import GraphedGeneration, Request


class Hooks:
    """Marks the class of a served model."""


def hooked_class(original: Any, owner: "GraphedGeneration") -> type:
    """A subclass of a model's class, of the same name, by which ``owner`` serves one model.

    Other objects of the class, if somebody makes one, behave as the original. Methods find their owner here: a request
    that is under way holds some of them, and finishes by them after the model has got its class back.
    """

    def request_of(model: Any) -> "Request | None":
        return owner.request if model is owner.model else None

    @wraps(original.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain = MethodType(original.generate, self)
        return _generate(owner, plain, args, kwargs) if self is owner.model else plain(*args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = request_of(self)
        return original.__call__(self, *args, **kwargs) if request is None else request.call(args, kwargs)

    def prepare_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        request, plain = request_of(self), MethodType(original._prepare_cache_for_generation, self)
        given = inspect.signature(plain).bind(*args, **kwargs).arguments
        config = given["generation_config"]
        if request is None or request.slot is not None or owner.assign(request, config, given) is None:
            return plain(*args, **kwargs)
        given_cache, config.cache_implementation = config.cache_implementation, "static"
        try:
            return plain(*args, **kwargs)
        finally:
            config.cache_implementation = given_cache

    def prepare_static_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = request_of(self)
        if request is None or request.slot is None:
            return original._prepare_static_cache(self, *args, **kwargs)
        return request.slot.cache

    def may_compile(self: Any, model_kwargs: dict[str, Any], generation_config: Any) -> bool:
        request = request_of(self)
        if request is not None and request.uses(model_kwargs):
            return False  # graphs serve it
        return bool(original._valid_auto_compile_criteria(self, model_kwargs, generation_config))

    def reduce(self: Any, protocol: Any) -> Any:
        """Copies and pickles are of the original class, since nobody serves them."""
        _, _, *rest = original.__reduce_ex__(self, protocol)
        return copyreg._reconstructor, (original, object, None), *rest  # type: ignore[attr-defined]

    space = {
        "__doc__": original.__doc__,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "generate": generate,
        "__call__": call,
        "_prepare_cache_for_generation": prepare_cache,
        "_prepare_static_cache": prepare_static_cache,
        "_valid_auto_compile_criteria": may_compile,
        "__reduce_ex__": reduce,
    }
    return type(original.__name__, (Hooks, original), space)


def _generate(owner: "GraphedGeneration", plain: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As the model's own ``generate``, with its decode steps served by graphs."""
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
    assert request.slot is not None
    request.slot.error = said  # without the slot's cache it raises nothing, so the slot serves no more
    return result
