""" Mixins that are added to the class of a model at run time, so that its modules and keys do not change """
from typing import Any

from torch import nn


class ModelMixin:
    """Base class of mixins; models with a mixin can be copied and pickled."""

    def __reduce_ex__(self, protocol: int) -> tuple:
        # The class is created at run time, so pickle cannot find it by name; it can find both of its bases.
        return _new, type(self).__bases__, self.__dict__


def add_mixin(model: nn.Module, mixin: type[ModelMixin]) -> None:
    """Let the methods of a mixin override those of a model."""
    model.__class__ = _with_mixin(mixin, type(model))


def remove_mixin(model: nn.Module) -> None:
    """Restore the class that a model had before `add_mixin`."""
    model.__class__ = type(model).__bases__[1]


def _with_mixin(mixin: type, cls: type) -> type:
    return type(cls.__name__, (mixin, cls), {'__module__': cls.__module__})


def _new(mixin: type, cls: type) -> Any:
    cls = _with_mixin(mixin, cls)
    return cls.__new__(cls)
