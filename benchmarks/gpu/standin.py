"""In place of a package that SGLang imports and the benchmarks never use: all names import, no call
works. gpu/pack.py copies it to PACKAGE/__init__.py."""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0"
_PACKAGE = __name__
# SGLang asks for these in a try, and has kernels of its own when they are not there.
_ABSENT = {f"{_PACKAGE}.{name}" for name in ("norm", "fused_moe", "fused_moe.core")}


def _refuse(name):
    def refuse(*args, **kwargs):
        raise RuntimeError(f"{name} was called: {_PACKAGE} is only a stand-in here")

    return refuse


def _names_of(module):
    """A module's ``__getattr__``: a class for a name that looks like one, else a function."""

    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{module}.{name}"
        if not name[0].isupper():
            return _refuse(full)
        # Pydantic asks the classes in annotations for a schema.
        schema = classmethod(lambda cls, source, handler: _any_schema())
        return type(name, (), {"__init__": _refuse(full), "__get_pydantic_core_schema__": schema})

    return get


def _any_schema():
    from pydantic_core import core_schema

    return core_schema.any_schema()


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"{_PACKAGE}.") and name not in _ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _names_of(spec.name)
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())
__getattr__ = _names_of(_PACKAGE)
