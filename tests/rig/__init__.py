"""What the project's own tests and benchmarks use: commands and servers in processes, storms, hostile hosts.

The tests of others use `shoal.testing`.
"""

from pathlib import Path

FIND_RIG = f"import sys; sys.path.append({str(Path(__file__).resolve().parents[2])!r})\n"
"""First line of a program that a test writes, if that program imports the rig."""
