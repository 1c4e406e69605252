"""Tests of the test device, without the library and with it. They run where it is loaded: ``make device-test``."""

import sys

collect_ignore_glob = [] if "queued_backend" in sys.modules else ["test_*.py"]
