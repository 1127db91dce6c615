"""Imported by Python at its start: processes that a test of Lightning spawns get our class too."""

import hvd_for_ddp

hvd_for_ddp.replace_in_tests()
