"""`python tests/idle_gpu COMMAND...` runs a command on GPUs that do nothing; see idle_gpu.py."""

import sys

from idle_gpu import main

sys.exit(main(sys.argv[1:]))
