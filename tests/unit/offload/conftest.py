"""The scheduler's fake device and step loop serve these tests, too."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "property"))
