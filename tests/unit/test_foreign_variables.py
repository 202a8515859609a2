"""Variables of other systems: whatever is read is in the reference."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from shoal import registry
from shoal.settings import FOREIGN

PAGE = Path(__file__).parents[2] / "docs/reference/settings.md"


def test_every_part_of_an_address_is_in_the_table() -> None:
    read = set(re.findall(r'(?:_said|_number)\("([A-Z_]+)"', inspect.getsource(registry)))
    assert read and read == set(registry.VARIABLES)


def test_the_reference_names_them_all() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Variables of other systems")[2]
    assert [name for name in (*FOREIGN.values(), *registry.VARIABLES) if f"| `{name}` |" not in text] == []
