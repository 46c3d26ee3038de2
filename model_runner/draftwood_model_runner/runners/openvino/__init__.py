"""Steps computed by OpenVINO on CPUs.

Importing OpenVINO counts its users at Google Analytics, if the package openvino_telemetry is there, which it brings.
Without that package it sends nothing; so here it is as if it were not installed.
"""

import sys

sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
