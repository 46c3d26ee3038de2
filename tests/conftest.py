"""What holds for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A test fails for what the code does, never for how fast this machine is: pytest's timeout ends what hangs.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
