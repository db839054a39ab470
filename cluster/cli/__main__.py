"""`python -m shardline.cluster.cli`."""

from __future__ import annotations

import sys

from shardline.cluster.cli import main

sys.exit(main())
