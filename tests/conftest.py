"""Makes the folder under test importable as `monarch_split`, and by no other name, in every test."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parent.parent / "__main__.py"))["load_pack"]()
