"""`python -m tk_kernel_core`, the same as `tk-kernels`."""

import sys

from tk_kernel_core.cli import main

sys.exit(main())
