"""Python imports this at its start: processes that a test of Lightning spawns get the same class."""

import hvd_for_ddp

hvd_for_ddp.replace_in_tests()
