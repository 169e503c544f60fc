"""What must be so before any test module is imported."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # triton reads it once; interpreted even where there is a GPU
