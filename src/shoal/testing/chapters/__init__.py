"""The chapters of the frontier contract, one module each; `shoal.testing.contract` binds them."""

import pkgutil

import pytest

# Before any of them is imported: only then does pytest explain their failed asserts.
pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))
