"""`python -m vllm_pp_fixes.cli`."""

import sys

from . import main

sys.exit(main())
